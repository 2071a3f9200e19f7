"""The torch backend's layout of a dispatch, and how a token's slots become places and copies."""

from __future__ import annotations

import torch
from torch import Tensor


class Layout:
    """Names for the parts of a torch layout, which are views of one int32 tensor.

    Attributes:
        num_copies: copies that this rank receives; num_rows: rows they need, padding included.
        made_by: the Buffer and the call of it that made this layout: numbers, equal on all ranks.
        send_counts, recv_counts: lists, copies per peer.
        send_tokens: ``[copies sent]``, token of each copy, ordered by (peer, token).
        home_copies: ``[T, min(K, R)]``, the token's copies in rank order, -1 where it has fewer.
        positions: ``[T, K]``, slot -> place of its expert among the token's distinct experts in
            ascending order; -1 for a slot without expert.
        copy_rows: ``[num_copies, K]``, row for each such place, -1 where the expert is not mine or
            the row was dropped.
        sources: ``[num_copies]``, ``source rank * max_tokens + source token`` of each copy.
    """

    HEADER = 6

    def __init__(self, storage: Tensor, num_ranks: int, max_tokens: int, topk: int) -> None:
        header = storage[: self.HEADER + 2 * num_ranks].tolist()
        self.num_tokens, self.num_copies, self.num_rows, num_sent = header[:4]
        self.made_by = header[4], header[5]
        self.send_counts = header[self.HEADER : self.HEADER + num_ranks]
        self.recv_counts = header[self.HEADER + num_ranks :]
        fanout = min(topk, num_ranks)
        shapes = {
            "send_tokens": (max_tokens * fanout, (num_sent,)),
            "home_copies": (max_tokens * fanout, (self.num_tokens, fanout)),
            "positions": (max_tokens * topk, (self.num_tokens, topk)),
            "copy_rows": (num_ranks * max_tokens * topk, (self.num_copies, topk)),
            "sources": (num_ranks * max_tokens, (self.num_copies,)),
        }
        begin = self.HEADER + 2 * num_ranks
        for name, (capacity, shape) in shapes.items():
            size = 1
            for length in shape:
                size *= length
            setattr(self, name, storage[begin : begin + size].view(shape))
            begin += capacity

    @staticmethod
    def size(num_ranks: int, max_tokens: int, topk: int) -> int:
        """Int32 words of the storage: the worst case, so that shapes never depend on routing."""
        fanout = min(topk, num_ranks)
        per_token = 2 * fanout + topk + num_ranks * (topk + 1)
        return Layout.HEADER + 2 * num_ranks + max_tokens * per_token


def distinct_experts(topk_idx: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's distinct experts in ascending order, then -1; and slot -> place among them."""
    topk, big = topk_idx.shape[1], torch.iinfo(torch.int32).max
    ordered, slot = torch.where(topk_idx < 0, big, topk_idx.int()).sort(dim=1, stable=True)
    valid = ordered != big
    new = valid.clone()
    new[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    place = torch.where(valid, new.cumsum(1) - 1, -1)
    positions = torch.empty_like(place).scatter_(1, slot, place)
    # slots without expert write to a column of their own, which is cut off
    experts = torch.full((topk_idx.shape[0], topk + 1), -1, dtype=torch.int32, device=place.device)
    experts.scatter_(1, torch.where(valid, place, topk), ordered)
    return experts[:, :topk].contiguous(), positions


def ranks_of_tokens(experts: Tensor, num_local_experts: int, num_ranks: int) -> Tensor:
    """Bool ``[T, R]``: does token t have an expert on rank r?"""
    shape = (experts.shape[0], num_ranks + 1)  # the last column stands for "no expert"
    rank = torch.where(experts >= 0, experts // num_local_experts, num_ranks)
    present = torch.zeros(shape, dtype=torch.bool, device=experts.device)
    return present.scatter_(1, rank.long(), True)[:, :num_ranks]


def list_home_copies(present: Tensor, peer: Tensor, token: Tensor, fanout: int) -> Tensor:
    """``[T, fanout]``: which copies a token has, in rank order; -1 where there are fewer."""
    slot = present.long().cumsum(1) - 1
    home = torch.full((present.shape[0], fanout), -1, dtype=torch.long, device=present.device)
    number = torch.arange(token.numel(), dtype=torch.long, device=present.device)
    home[token, slot[token, peer]] = number
    return home


def sum_slots(weights: Tensor, positions: Tensor) -> Tensor:
    """Weights by slot -> by place; slots with the same expert add, in slot order."""
    by_place = torch.zeros_like(weights)
    for slot in range(weights.shape[1]):
        place = positions[:, slot : slot + 1].long()
        weight = torch.where(place >= 0, weights[:, slot : slot + 1], 0.0)
        by_place.scatter_add_(1, place.clamp(min=0), weight)
    return by_place


def gather_slots(by_place: Tensor, positions: Tensor) -> Tensor:
    """By place -> by slot; slots with the same expert get the same value."""
    places = positions.long()
    return torch.where(places >= 0, by_place.gather(1, places.clamp(min=0)), 0.0)
