"""The calls of the library that are timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from hybrid_ep.bench.clock import Call
from hybrid_ep.bench.inputs import CopyCounts, Inputs
from hybrid_ep.bench.options import Load, Options
from hybrid_ep.buffer import Buffer, combine, dispatch
from hybrid_ep.config import Config
from hybrid_ep.group import Group
from hybrid_ep.integers import round_up
from hybrid_ep.launch import COMMAND_TIMEOUT_S

BOUND_MULTIPLE = 128  # max_rows is the least multiple of it that drops nothing: the tail costs time


def make_buffer(load: Load, device: torch.device, backend: str, config: Config) -> Buffer:
    """A Buffer for calls of the shape, with the deadline of a command; collective."""
    return Buffer(
        hidden=load.hidden,
        num_experts=load.num_experts,
        max_tokens=load.max_tokens,
        topk=load.topk,
        dtype=load.combine_dtype,
        device=device,
        backend=backend,
        config=replace(config, timeout_s=COMMAND_TIMEOUT_S),
    )


def least_bound(buffer: Buffer, inputs: list[Inputs], align: int = 1) -> int:
    """The least bound, as benches round it, that drops no row of any rank; collective."""
    needed = [int(_dispatch(buffer, each, align=align).handle.required_rows) for each in inputs]
    most = max(Group().gather(max(needed)))
    return round_up(round_up(most, BOUND_MULTIPLE), align)


def library_calls(
    buffer: Buffer,
    load: Load,
    inputs: list[Inputs],
    sizing: str,
    copy_counts: CopyCounts,
    options: Options,
) -> Iterator[Call]:
    """Everything that is timed of one Buffer; collective."""
    align = options.align
    max_rows = least_bound(buffer, inputs, align) if sizing == "max_rows" else None
    outs = [_dispatch(buffer, each, max_rows=max_rows, align=align) for each in inputs]
    rows = [out.rows for out in outs]
    weights = [out.weights if options.weighted else None for out in outs]
    out_bytes = copy_counts.between_ranks(load.token_bytes)
    home_bytes = copy_counts.between_ranks(load.sum_bytes)
    call = functools.partial(Call, buffer.backend, sizing=sizing, max_rows=max_rows)

    def fresh(i: int) -> Callable[[], Any]:
        return lambda: _dispatch(buffer, inputs[i], max_rows=max_rows, align=align)

    def cached(i: int) -> Callable[[], Any]:
        each, handle = inputs[i], outs[i].handle
        return lambda: dispatch(
            buffer, each.x, None, each.topk_weights, scales=each.scales, handle=handle
        )

    def home_by(handle: Any, i: int) -> Callable[[], Any]:
        return lambda: combine(buffer, rows[i], handle, weights=weights[i])

    yield call("dispatch", "fresh", fresh, out_bytes, host_waits=max_rows is None)
    yield call("dispatch", "cached", cached, out_bytes)
    if load.is_fp8:
        return
    yield call("combine", "fresh", lambda i: home_by(fresh(i)().handle, i), home_bytes)
    yield call("combine", "cached", lambda i: home_by(outs[i].handle, i), home_bytes)
    if not options.backward:
        return

    # graphs made once; their backward is what is timed
    def graph_of_dispatch(i: int) -> tuple[Any, ...]:
        leaves = (
            inputs[i].x.detach().requires_grad_(),
            inputs[i].topk_weights.detach().requires_grad_(),
        )
        out = dispatch(buffer, leaves[0], None, leaves[1], handle=outs[i].handle)
        return (out.rows, out.weights), leaves, (outs[i].rows, outs[i].weights)

    def graph_of_combine(i: int) -> tuple[Any, ...]:
        leaf = rows[i].detach().requires_grad_()
        y = combine(buffer, leaf, outs[i].handle, weights=weights[i])
        return (y,), (leaf,), (torch.randn_like(y),)

    for op, graph_of in (("dispatch", graph_of_dispatch), ("combine", graph_of_combine)):
        graphs = [graph_of(i) for i in range(len(inputs))]

        def backward(i: int, graphs: list[tuple[Any, ...]] = graphs) -> Callable[[], Any]:
            return lambda: torch.autograd.grad(*graphs[i], retain_graph=True)

        yield call(op, "cached", backward, home_bytes, direction="backward")


def _dispatch(buffer: Buffer, inputs: Inputs, **sizing: Any) -> Any:
    return dispatch(
        buffer, inputs.x, inputs.topk_idx, inputs.topk_weights, scales=inputs.scales, **sizing
    )
