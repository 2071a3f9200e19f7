"""Compiled layers of exact sizes where a rank has no tokens, or no token goes to its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hybrid_ep
from hybrid_ep.moe import MoELayer
from tests.launch import Rank
from tests.ranks.compiled import inductor

HIDDEN, NUM_EXPERTS, TOPK = 64, 8, 2


@dataclass(frozen=True)
class Nothing:
    """A layer on two ranks.

    Attributes:
        name: the condition that is tested.
        tokens: T of each rank.
        chosen: experts that the router may choose; the first four are rank 0's.
        dynamic: of torch.compile.
        checkpoint: the compiled layer is in a ``hybrid_ep.checkpoint``.
    """

    name: str
    tokens: tuple[int, int]
    chosen: range
    dynamic: bool | None = None
    checkpoint: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def has_rank_without_rows(self) -> bool:
        return len(self.chosen) <= NUM_EXPERTS // 2


def run(me: Rank, nothing: Nothing, cache: str) -> dict[str, Any]:
    """The loss and the gradients of the tokens and the weights of two steps, and M."""
    tokens = nothing.tokens[me.rank]
    dtype = torch.bfloat16 if me.device.type == "cuda" else torch.float32
    sizes = {"hidden": HIDDEN, "num_experts": NUM_EXPERTS, "max_tokens": 256, "topk": TOPK}
    buffer = me.buffer(**sizes, dtype=dtype)
    # what inductor made for a GPU divided by zero rows before torch 2.13, pytorch/pytorch#179222;
    # docs/recipes/compile.md names the cure
    needs_bound = (
        dtype == torch.bfloat16 and torch.__version__ < "2.13" and nothing.has_rank_without_rows
    )
    layer = MoELayer(buffer, ffn_hidden=32, max_rows=1024 if needs_bound else None)
    with torch.no_grad():  # the tokens are positive, so experts that are not chosen lose
        layer.router.weight.fill_(-1.0)
        for expert in nothing.chosen:
            layer.router.weight[expert, expert::NUM_EXPERTS] = 1.0

    def loss(x: Tensor) -> Tensor:
        out = layer(x)
        return out.y.float().square().sum() + out.aux_loss

    def steps(function: Any) -> list[Tensor]:
        results = []
        generator = torch.Generator().manual_seed(me.rank)
        for _ in range(2):
            x = torch.rand(tokens, HIDDEN, generator=generator).to(me.device, dtype)
            layer.zero_grad()
            value = function(x.requires_grad_())
            value.backward()
            weights = [weight.grad.clone() for weight in layer.parameters()]
            results += [value.detach(), x.grad, *weights]
        return results

    eager = steps(loss)
    with inductor(cache):
        compiled = torch.compile(loss, dynamic=nothing.dynamic, fullgraph=True)
        if nothing.checkpoint:
            found = steps(lambda x: hybrid_ep.checkpoint(compiled, x))
        else:
            found = steps(compiled)
    with torch.no_grad():
        rows = layer(torch.rand(tokens, HIDDEN).to(me.device, dtype)).counts.sum()
    buffer.destroy()
    return {"eager": eager, "compiled": found, "rows": rows}
