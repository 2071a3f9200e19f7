"""Dispatches that say how many experts their tokens have: enough slots for all, or not."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import hybrid_ep
from hybrid_ep.errors import TooManyExperts
from hybrid_ep.ops import verbs
from tests.launch import Rank
from tests.ranks.graphs import warmed_up_and_captured
from tests.ranks.raised import what_it_raises

HIDDEN, LOCAL, TOPK = 16, 3, 2


def map_of(me: Rank, counts: list[int]) -> Tensor:
    """A routing map whose tokens have so many experts, the first ones."""
    routing_map = torch.zeros(len(counts), LOCAL * me.num_ranks, dtype=torch.bool)
    for token, count in enumerate(counts):
        routing_map[token, :count] = True
    return routing_map.to(me.device)


def made(me: Rank, topk: int = TOPK) -> hybrid_ep.Buffer:
    sizes = {"hidden": HIDDEN, "num_experts": LOCAL * me.num_ranks, "max_tokens": 40}
    return me.buffer(**sizes, topk=topk)


def sent(
    me: Rank, buffer: hybrid_ep.Buffer, counts: list[int], *, asks: bool = True, **sizing: Any
) -> tuple[Tensor, hybrid_ep.Dispatched]:
    """A dispatch by such a map, whose tokens want a gradient, and these."""
    topk_idx, _, most = hybrid_ep.map_to_topk(map_of(me, counts), None, TOPK)
    x = torch.arange(len(counts) * HIDDEN, dtype=torch.float32) % 64 + me.rank
    x = x.view(len(counts), HIDDEN).bfloat16().to(me.device).requires_grad_()
    return x, buffer.dispatch(x, topk_idx, most=most if asks else None, **sizing)


def refused(
    me: Rank, counts: list[list[int]], topk: int, max_rows: int | None, as_ops: bool
) -> list[Any]:
    """What such a dispatch says on this rank, and the two calls after it.

    Args:
        me: the rank.
        counts: experts of the tokens of each rank.
        topk: of the Buffer.
        max_rows: of the dispatches.
        as_ops: whether somebody watches ops.

    Returns:
        list: the rank and the experts that each call names; M of a call that succeeds.
    """
    buffer, told = made(me, topk), []
    good = [min(count, TOPK) for count in counts[me.rank]]
    watching = mock.patch.object(verbs, "watched", lambda *tensors: True)
    with watching if as_ops else contextlib.nullcontext():
        for each in (counts[me.rank], counts[me.rank], good):
            try:
                _, out = sent(me, buffer, each, max_rows=max_rows)
                if me.device.type == "cuda":
                    torch.cuda.synchronize()
                buffer.check()
                told.append(len(out.rows))
            except TooManyExperts as error:
                assert isinstance(error, ValueError)
                told.append((error.rank, error.experts))
    buffer.destroy()
    return told


def left_behind(me: Rank, counts: list[list[int]]) -> list[list[int]]:
    """The numbers that such a dispatch of static size leaves on the device, before anyone knows."""
    buffer = made(me)
    poison = [torch.full((size,), 7, dtype=torch.int32, device=me.device) for size in range(1, 300)]
    del poison
    _, out = sent(me, buffer, counts[me.rank], max_rows=400)
    handle = out.handle
    numbers = (out.counts, out.offsets, handle.padded_counts, handle.overflow_word)
    found = [each.tolist() for each in (*numbers, handle.required_rows[None])]
    buffer.destroy()
    return found


def accepted(me: Rank, counts: list[list[int]], max_rows: int | None, way: str) -> bool:
    """Whether a dispatch that says how many experts there are gives what any other gives."""
    buffer = made(me)

    def step(asks: bool) -> list[Tensor]:
        x, out = sent(me, buffer, counts[me.rank], asks=asks, max_rows=max_rows)
        again = buffer.dispatch(x, handle=out.handle)
        y = buffer.combine(out.rows * 2 + again.rows, out.handle)
        return [out.rows.detach(), out.counts, y.detach(), *torch.autograd.grad(y.sum(), x)]

    def forward(x: Tensor, topk_idx: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        out = hybrid_ep.dispatch(buffer, x, topk_idx, most=most, max_rows=max_rows)
        word = out.handle.overflow_word + out.handle.padded_counts.sum()
        return hybrid_ep.combine(buffer, out.rows, out.handle), word

    if way == "compiled":
        x = torch.ones(len(counts[me.rank]), HIDDEN, dtype=torch.bfloat16, device=me.device)
        topk_idx, _, most = hybrid_ep.map_to_topk(map_of(me, counts[me.rank]), None, TOPK)
        compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
        results = [each(x, topk_idx, most) for each in (compiled, forward)]
    else:
        results = [step(asks) for asks in (True, False)]
    buffer.destroy()
    return all(map(torch.equal, *results))


def refused_in_a_graph(me: Rank, counts: list[list[int]]) -> list[str]:
    """What each replay of a captured dispatch leaves behind; the second has such tokens."""
    buffer, told = made(me), []
    good = [min(count, TOPK) for count in counts[me.rank]]
    routing_map = map_of(me, good)
    x = torch.ones(len(good), HIDDEN, dtype=torch.bfloat16, device=me.device)

    def step() -> None:
        topk_idx, _, most = hybrid_ep.map_to_topk(routing_map, None, TOPK)
        out = buffer.dispatch(x, topk_idx, most=most, max_rows=400)
        buffer.combine(out.rows, out.handle)

    graph, _ = warmed_up_and_captured(step)
    for each in (good, counts[me.rank], good):
        routing_map.copy_(map_of(me, each))
        graph.replay()
        torch.cuda.synchronize()
        told.append(what_it_raises(buffer.check, TooManyExperts))
    buffer.destroy()
    return told
