"""Dispatch of tokens that say where they come from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import hybrid_ep
from tests.launch import Rank

MAX_TOKENS = 6


@dataclass(frozen=True)
class Routing:
    """Any routing at all: ``topk_idx[rank][token]`` lists K experts or -1."""

    num_local_experts: int
    topk: int
    topk_idx: tuple[tuple[tuple[int, ...], ...], ...]
    align: int
    max_rows: int | None

    @property
    def num_ranks(self) -> int:
        return len(self.topk_idx)


def dispatch_and_return(me: Rank, routing: Routing) -> dict[str, Tensor]:
    """Rows ``[M, 4]`` of (rank, token, 7, 9); y, to which each kept row of a token adds one."""
    buffer = me.buffer(
        hidden=4,
        num_experts=routing.num_local_experts * routing.num_ranks,
        max_tokens=MAX_TOKENS,
        topk=routing.topk,
        dtype=torch.int32,
    )
    mine = routing.topk_idx[me.rank]
    topk_idx = torch.tensor(mine, dtype=torch.int64).view(len(mine), routing.topk).to(me.device)
    token = torch.arange(len(mine), dtype=torch.int32)
    x = torch.stack([torch.full_like(token, v) for v in (me.rank, 0, 7, 9)], dim=1)
    x[:, 1] = token
    x = x.to(me.device)
    weights = torch.ones(topk_idx.shape, device=me.device)
    sizes = {"max_rows": routing.max_rows, "align": routing.align}
    out = hybrid_ep.dispatch(buffer, x, topk_idx, weights, **sizes)
    again = hybrid_ep.dispatch(buffer, x, topk_idx, weights, **sizes)
    y = hybrid_ep.combine(buffer, torch.ones(out.rows.shape, device=me.device), out.handle)
    buffer.destroy()
    results = {
        "rows": out.rows,
        "weights": out.weights,
        "counts": out.counts,
        "offsets": out.offsets,
        "required_rows": out.handle.required_rows,
        "overflow": out.handle.overflow,
        "y": y,
    }
    assert torch.equal(out.rows, again.rows), "rows differ between two equal calls"
    assert torch.equal(out.offsets, again.offsets), "offsets differ between two equal calls"
    return results
