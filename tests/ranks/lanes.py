"""A layer whose communication has a stream of its own, beside the same on one stream."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.lanes import Lane
from examples.overlap import Layer, step
from tests.launch import Rank

HIDDEN, FFN_HIDDEN, NUM_EXPERTS, TOPK, STEPS = 64, 32, 8, 3, 4


def both_ways(
    me: Rank, num_parts: int, bounded: bool, recompute: bool
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Result and gradients of some steps: on one stream, and with a lane."""
    tokens = 96 + 32 * me.rank
    dtype = torch.bfloat16 if me.device.type == "cuda" else torch.float32
    buffer = me.buffer(
        hidden=HIDDEN, num_experts=NUM_EXPERTS, max_tokens=256, topk=TOPK, dtype=dtype
    )
    max_rows = 256 * me.num_ranks * TOPK if bounded else None
    inputs = torch.randn(
        STEPS, tokens, HIDDEN, generator=torch.Generator().manual_seed(me.rank)
    ).to(me.device, dtype)
    found: list[list[dict[str, Tensor]]] = []
    for beside in (False, True):
        lane = Lane(me.device, beside=beside)
        assert (lane.stream is not None) == (beside and me.device.type == "cuda")
        layer = Layer(buffer, FFN_HIDDEN, lane, num_parts, max_rows=max_rows)
        # no wait between the steps: memory that was given back too early is used again
        found.append([step(layer, x, recompute) for x in inputs])
    if me.device.type == "cuda":
        torch.cuda.synchronize()
    buffer.destroy()
    return list(zip(*found, strict=True))


def order_of_calls(me: Rank, bounded: bool) -> list[str]:
    """Of a layer of two halves, forward and backward."""
    buffer = me.buffer(hidden=HIDDEN, num_experts=NUM_EXPERTS, max_tokens=8, topk=TOPK)
    max_rows = 8 * me.num_ranks * TOPK if bounded else None
    layer = Layer(buffer, FFN_HIDDEN, Lane(me.device), max_rows=max_rows)
    made = []
    for name in ("_dispatch", "_compute", "_combine"):
        called = getattr(layer, name)
        setattr(layer, name, lambda *inputs, n=name, f=called: (made.append(n[1:]), f(*inputs))[1])
    step(layer, torch.randn(8, HIDDEN, device=me.device).bfloat16(), recompute=False)
    buffer.destroy()
    return made
