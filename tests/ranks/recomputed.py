"""A compiled block that routes otherwise when it is recomputed, in checkpoints around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hybrid_ep
from tests.cases import Case
from tests.launch import Rank
from tests.ranks.compiled import inductor
from tests.ranks.layers import RUNS, NoisyBlock


class CompiledBlock(NoisyBlock):
    """Compiled, with its router or without it; the experts differ from each other."""

    def compile(self, with_router: bool) -> None:
        if with_router:
            self.layer = torch.compile(self.layer, fullgraph=True)
        else:
            self.experts = torch.compile(self.experts, fullgraph=True)

    def layer(self, x: Tensor, noise: Tensor) -> Tensor:
        return self.experts(x, *torch.topk(x @ self.router + noise, self.case.num_slots))

    def experts(self, x: Tensor, scores: Tensor, topk_idx: Tensor) -> Tensor:
        # in place of the scores, if inductor may: the backward needs the sigmoid alone
        weights = scores.sigmoid()
        out = hybrid_ep.dispatch(self.buffer, x, topk_idx, weights, max_rows=self.max_rows)
        row = torch.arange(out.rows.shape[0], device=x.device)
        expert = torch.bucketize(row, out.offsets[1:], right=True)
        rows = torch.tanh(out.rows) * (1 + expert).unsqueeze(1)
        return hybrid_ep.combine(self.buffer, rows, out.handle, weights=out.weights)


def _nested(outer: str, inner: str) -> Any:
    return lambda block, x: RUNS[outer](lambda inside: RUNS[inner](block, inside), x)


NESTED = {
    "hybrid_ep.checkpoint in itself": _nested("hybrid_ep.checkpoint", "hybrid_ep.checkpoint"),
    "hybrid_ep.checkpoint in a plain one": _nested("plain checkpoint", "hybrid_ep.checkpoint"),
    "plain checkpoint in hybrid_ep.checkpoint": _nested("hybrid_ep.checkpoint", "plain checkpoint"),
}


def gradients(
    me: Rank, case: Case, run: str, compiled: str, max_rows: int | None, cache: str
) -> dict[str, object]:
    """What ``NoisyBlock.gradients`` returns; compiled is "", "block" or "experts"."""
    block = CompiledBlock(me, case, max_rows)
    block.make_buffer()
    with inductor(cache):
        if compiled:
            block.compile(with_router=compiled == "block")
        return block.gradients((RUNS | NESTED)[run])
