"""Tokens and routing to measure with, and the bytes that they send between the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_ep.bench.options import Load
from hybrid_ep.group import Group

NUM_INPUTS = 3  # sets that the calls rotate through: together more than a GPU's L2 holds


@dataclass(frozen=True)
class Inputs:
    """One rank's tokens of one call.

    Attributes:
        x: ``[T, H]``.
        topk_idx: int64 ``[T, K]``.
        topk_weights: float32 ``[T, K]``.
        scales: float32 ``[T, S]``, or None.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    scales: Tensor | None


def make_topk(load: Load, rank: int, index: int) -> Tensor:
    """Routing of a rank in input set ``index``: int64 ``[T, K]`` on the host, the same always."""
    generator = torch.Generator().manual_seed(1_000_003 * index + rank)
    popularity = torch.arange(1, load.num_experts + 1).double().pow(-load.skew)
    shuffle = torch.randperm(load.num_experts, generator=torch.Generator().manual_seed(index))
    noise = torch.empty(load.max_tokens, load.num_experts).exponential_(generator=generator)
    # the K largest of log p + Gumbel noise: K distinct experts, drawn by popularity
    scores = popularity.log()[shuffle].float() - noise.log()
    return scores.topk(load.topk, dim=1).indices


def make_inputs(load: Load, rank: int, index: int, device: torch.device) -> Inputs:
    """Input set ``index`` of a rank."""
    generator = torch.Generator(device).manual_seed(7 * index + rank)

    def draw(kind: str, columns: int) -> Tensor:
        make = getattr(torch, kind)
        return make(load.max_tokens, columns, generator=generator, device=device)

    x = draw("randn", load.hidden).to(load.dtype)
    scales = draw("rand", load.scale_bytes // 4) if load.scale_bytes else None
    topk_idx = make_topk(load, rank, index).to(device)
    return Inputs(x, topk_idx, draw("rand", load.topk), scales)


def count_copies(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Int64 ``[R]``: tokens that have an expert on rank r, each counted once."""
    rank = topk_idx // (num_experts // num_ranks)
    present = torch.zeros(topk_idx.shape[0], num_ranks, dtype=torch.bool)
    return present.scatter_(1, rank, True).sum(dim=0)


def count_rows(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Int64 ``[R]``: rows that rank r gets, one for each (token, expert)."""
    return (topk_idx.flatten() // (num_experts // num_ranks)).bincount(minlength=num_ranks)


def bytes_between_ranks(copies: Tensor, copy_bytes: int) -> int:
    """What the busiest rank sends to, or receives from, the others; ``copies [from, to]``."""
    away = copies * ~torch.eye(len(copies), dtype=torch.bool)
    return int(torch.maximum(away.sum(dim=0), away.sum(dim=1)).max()) * copy_bytes


class CopyCounts:
    """How many copies and rows go from rank to rank in each input set; collective.

    Attributes:
        copies: int64 ``[set, from, to]``.
        rows: int64 ``[set, from, to]``.
    """

    def __init__(self, load: Load, inputs: list[Inputs]) -> None:
        group, experts = Group(), load.num_experts
        mine = [
            [count(each.topk_idx.cpu(), experts, group.num_ranks).tolist() for each in inputs]
            for count in (count_copies, count_rows)
        ]
        self.copies, self.rows = torch.tensor(group.gather(mine)).permute(1, 2, 0, 3)

    def between_ranks(self, copy_bytes: int) -> int:
        """Bytes of the busiest rank, in one direction, as a copy each; mean over the sets."""
        each = [bytes_between_ranks(copies, copy_bytes) for copies in self.copies]
        return round(sum(each) / len(each))

    @property
    def most_rows(self) -> int:
        """Rows of the rank that gets most, without padding; mean over the sets."""
        return round(self.rows.sum(dim=1).amax(dim=1).double().mean().item())
