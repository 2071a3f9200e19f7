"""The torch backend's layout of a dispatch, and how a token's slots become places, copies and rows.

A place is a slot that names its expert first: the experts of a token are those at its places. Rows
ascend with the experts and copies with the ranks, so sums add in ascending order of these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep.backends.torch.tensors import trues_first
from hybrid_ep.shape import Shape


@dataclass
class Layout:
    """Who sends what into which row.

    Attributes:
        made_by: the Buffer and the call of it that made this layout: numbers, equal on all ranks.
        num_tokens: T.
        num_rows: rows that the copies need, padding included.
        num_filled: rows that hold a token: neither padding nor dropped.
        num_repeats: slots of my tokens that name an expert again.
        send_counts, recv_counts: copies per peer.
        row_terms: for each j below K, how many received copies have more than j rows; None where
            rows were dropped.
        named: ``[T, K]``, the expert that each slot of my tokens names, ``num_experts`` for none.
        send_tokens: ``[copies sent]``, token of each copy, ordered by (peer, token).
        sources: ``[copies received]``, ``source rank * max_tokens + source token`` of each copy;
            None where no rank sees the tokens of all.
        copy_rows: ``[copies received, K]``, row of each place, -1 where the slot is no place, the
            expert is not mine or the row was dropped; None before rows are assigned.
    """

    made_by: tuple[int, int]
    num_tokens: int
    num_rows: int
    num_filled: int
    num_repeats: int
    send_counts: list[int]
    recv_counts: list[int]
    row_terms: list[int] | None
    named: Tensor
    send_tokens: Tensor
    sources: Tensor | None = None
    copy_rows: Tensor | None = None

    @staticmethod
    def size(shape: Shape) -> int:
        """Int32 words of the storage: the worst case, so that shapes never depend on routing."""
        return sum(_capacities(shape))

    @classmethod
    def read(cls, storage: Tensor, shape: Shape) -> Layout:
        """What ``write`` wrote, as views of it; the host waits for it."""
        head, *parts = storage.split(_capacities(shape))
        words = iter(head.tolist())
        numbers = list(islice(words, _NUMBERS))
        sent, received, terms = (
            list(islice(words, length)) for length in (shape.num_ranks, shape.num_ranks, shape.topk)
        )
        tokens, copies = numbers[2], sum(received)
        sizes = ((tokens, shape.topk), (sum(sent),), (copies,), (copies, shape.topk))
        tensors = (
            part[: torch.Size(size).numel()].view(size)
            for part, size in zip(parts, sizes, strict=True)
        )
        row_terms = None if terms[0] == _UNKNOWN else terms
        return cls((numbers[0], numbers[1]), *numbers[2:], sent, received, row_terms, *tensors)

    def write(self, shape: Shape) -> Tensor:
        """The layout as one int32 tensor; the host waits for nothing."""
        device = self.named.device
        capacities = _capacities(shape)
        storage = torch.zeros(sum(capacities), dtype=torch.int32, device=device)
        head, *parts = storage.split(capacities)
        numbers = [*self.made_by, self.num_tokens, self.num_rows, self.num_filled]
        numbers += [self.num_repeats, *self.send_counts, *self.recv_counts]
        numbers += [_UNKNOWN] * shape.topk if self.row_terms is None else self.row_terms
        head.copy_(torch.tensor(numbers, dtype=torch.int32, device="cpu"), non_blocking=True)
        tensors = (self.named, self.send_tokens, self.sources, self.copy_rows)
        for part, tensor in zip(parts, tensors, strict=True):
            if tensor is not None:
                part[: tensor.numel()].view(tensor.shape).copy_(tensor)
        return storage

    def all_slots(self) -> tuple[Tensor, Tensor]:
        """All slots of the copies, ``copy * K + place``, and the row of each, -1 for none."""
        rows = self.copy_rows.flatten()
        return torch.arange(rows.numel(), dtype=torch.int64, device=rows.device), rows


_NUMBERS = 6  # at the beginning of a layout
_UNKNOWN = -1


def _capacities(shape: Shape) -> list[int]:
    """Words of the numbers, and of the four tensors behind them."""
    ranks, tokens, topk = shape.num_ranks, shape.max_tokens, shape.topk
    head, copies = _NUMBERS + 2 * ranks + topk, ranks * tokens
    return [head, tokens * topk, tokens * min(topk, ranks), copies, copies * topk]


@dataclass(frozen=True)
class Groups:
    """The groups of rows of the local experts.

    Attributes:
        copies: copies that each expert gets.
        counts: rows of each expert that hold a token.
        offsets: first row of each group, and the end of the last one; within the bound.
        required: rows that nothing dropped would need.
        starts: first row of each group as if there were no bound.
    """

    copies: list[int]
    counts: list[int]
    offsets: list[int]
    required: int
    starts: list[int]

    @property
    def drops(self) -> bool:
        """Whether some copies get no row of an expert."""
        return self.counts != self.copies

    @property
    def padded_counts(self) -> list[int]:
        """Rows of each group, padding included; within the bound."""
        return [end - begin for begin, end in pairwise(self.offsets)]

    @classmethod
    def of(cls, copies: list[int], max_rows: int | None, align: int) -> Groups:
        """Groups of multiples of ``align`` rows.

        Rows from ``max_rows`` on are dropped, so the last experts lose theirs first.
        """
        offsets = [0, *accumulate(-(-n // align) * align for n in copies)]
        *starts, required = offsets
        counts = copies
        if max_rows is not None and required > max_rows:
            kept = [max(0, max_rows - start) for start in starts]
            counts = [min(pair) for pair in zip(copies, kept, strict=True)]
            offsets = [min(offset, max_rows) for offset in offsets]
        return cls(copies, counts, offsets, required, starts)


def name_experts(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Int64 ``[T, K]``: the expert that each slot names, ``num_experts`` for none."""
    return torch.where(topk_idx < 0, num_experts, topk_idx.long())


def find_places(named: Tensor) -> Tensor:
    """Slot -> place. The slots without expert have one in common, at which there is no expert."""
    same = named.unsqueeze(2) == named.unsqueeze(1)  # [T, slot, slot]
    return same.view(torch.uint8).argmax(dim=2)  # the first of those that are equal


def experts_at_places(named: Tensor, num_experts: int) -> Tensor:
    """Each token's experts at its places, ``num_experts`` elsewhere."""
    return torch.where(find_places(named) == _count_up(named), named, num_experts)


class Counts(NamedTuple):
    """What a rank counts for a peer.

    Attributes:
        num_named: slots of all its tokens that name an expert.
        experts_beyond: the most experts of any of its tokens, if they are more than that has slots
            for, else 0.
        of_terms: for each j below K, copies for more than j experts of the peer.
        of_experts: copies for each expert of the peer.
    """

    num_named: int
    experts_beyond: int
    of_terms: list[int]
    of_experts: list[int]

    @staticmethod
    def num_words(shape: Shape) -> int:
        """Of a row of ``count_for_peers``."""
        return 2 + shape.topk + shape.num_local_experts

    @classmethod
    def of(cls, words: list[int], topk: int) -> Counts:
        """From a row of ``count_for_peers``."""
        return cls(words[0], words[1], words[2 : 2 + topk], words[2 + topk :])

    @property
    def copies(self) -> int:
        """Copies for the peer."""
        return self.of_terms[0]


def experts_of_ranks(experts: Tensor, shape: Shape) -> Tensor:
    """``[T, R]``: how many experts token t has on rank r; it goes there if there are any."""
    size = (experts.shape[0], shape.num_ranks + 1)  # the last column takes what has no expert
    found = torch.zeros(size, dtype=torch.int64, device=experts.device)
    ones = torch.ones_like(experts)
    return found.scatter_add_(1, experts // shape.num_local_experts, ones)[:, : shape.num_ranks]


def local_experts(experts: Tensor, shape: Shape, rank: int) -> Tensor:
    """The number of each expert on a rank; from E / R on where it is another's, or none."""
    first = rank * shape.num_local_experts
    return (experts - first).remainder(shape.num_experts + 1)


def count_for_peers(
    named: Tensor,
    experts: Tensor,
    of_ranks: Tensor,
    num_experts: int,
    most: Tensor | None,
    slots: int,
) -> Tensor:
    """Int64 ``[R, 2 + K + E / R]``, the words of the ``Counts`` for each peer."""
    num_ranks, flat = of_ranks.shape[1], experts.flatten()
    of_experts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
    of_experts.scatter_add_(0, flat, torch.ones_like(flat))
    of_terms = (of_ranks.unsqueeze(2) > _count_up(experts)).sum(dim=0)
    beyond = torch.zeros((), dtype=torch.int64, device=experts.device)
    if most is not None:
        beyond = torch.where(most > slots, most, 0).max().long()
    numbers = torch.stack([(named < num_experts).sum(), beyond]).expand(num_ranks, 2)
    return torch.cat([numbers, of_terms, of_experts[:-1].view(num_ranks, -1)], dim=1)


def _count_up(table: Tensor) -> Tensor:
    """The numbers of the columns."""
    return torch.arange(table.shape[1], dtype=torch.int64, device=table.device)


def slots_of_rows(
    slots: Tensor, rows: Tensor | None, num_rows: int, num_filled: int
) -> tuple[Tensor, Tensor | None]:
    """The slot of each row, ``[num_rows]``, 0 where the row is empty; and which rows are.

    Args:
        slots: int64 ``[N]``.
        rows: ``[N]``, the row of each slot, -1 for none; None for ascending rows.
        num_rows: M.
        num_filled: how many of them have a slot.
    """
    num_empty = num_rows - num_filled
    if rows is None:
        if num_empty == 0:
            return slots, None
        rows = torch.arange(slots.numel(), dtype=torch.int64, device=slots.device)
    of_row = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=slots.device)
    # the last element takes the slots without row
    of_row.scatter_(0, torch.where(rows < 0, num_rows, rows).long(), slots)
    of_row = of_row[:num_rows]
    if num_empty == 0:
        return of_row, None
    return of_row.clamp(min=0), trues_first(of_row < 0)[:num_empty]


def list_home_copies(of_ranks: Tensor, topk: int) -> Tensor:
    """``[T, min(K, R)]``: which copies a token has, in rank order; -1 where there are fewer."""
    present = of_ranks > 0
    tokens, ranks = present.shape
    fanout = min(topk, ranks)
    number = present.t().flatten().cumsum(0).view(ranks, tokens).t() - 1  # by (rank, token)
    place = torch.where(present, present.cumsum(1) - 1, fanout)
    shape = (tokens, fanout + 1)  # the last column takes those of absent ranks
    home = torch.full(shape, -1, dtype=torch.int64, device=present.device)
    return home.scatter_(1, place, number)[:, :fanout]


def count_terms(index: Tensor) -> Tensor:
    """For each j below the width of ``index``, how many of its rows have more than j terms."""
    return ((index >= 0).sum(dim=1, keepdim=True) > _count_up(index)).sum(dim=0)


def sum_slots(weights: Tensor, layout: Layout) -> Tensor:
    """Weights by slot -> by place; slots with the same expert add, in slot order."""
    if layout.num_repeats == 0:
        return weights + 0.0  # sums begin with zero
    positions = find_places(layout.named)
    by_place = torch.zeros_like(weights)
    for slot in range(weights.shape[1]):
        here = slice(slot, slot + 1)
        by_place.scatter_add_(1, positions[:, here], weights[:, here])
    return by_place


def gather_slots(by_place: Tensor, layout: Layout) -> Tensor:
    """By place -> by slot; slots with the same expert get the same value."""
    return by_place.gather(1, find_places(layout.named)) if layout.num_repeats else by_place
