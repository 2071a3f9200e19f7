"""Dispatch and combine inside a CUDA graph, replayed with new routing in the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import hybrid_ep
from hybrid_ep.backends import endings
from tests.cases import Case
from tests.checks import same_bytes
from tests.launch import Rank


def warmed_up_and_captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of a step that ran once before, on another stream, and what the step returns."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, step()


def replay(me: Rank, case: Case, seeds: list[int]) -> list[dict[str, torch.Tensor]]:
    """What comes out of the captured calls for the inputs of each seed."""
    buffer = me.buffer(**case.sizes())
    rounds = [replace(case, seed=seed).inputs(me.rank) for seed in seeds]
    x, topk_idx, weights = (
        getattr(rounds[0], name).to(me.device) for name in ("x", "topk_idx", "weights")
    )
    max_rows = me.num_ranks * buffer.max_tokens * buffer.topk

    def step() -> dict[str, torch.Tensor]:
        out = hybrid_ep.dispatch(buffer, x, topk_idx, weights, max_rows=max_rows)
        leaves = [tensor.detach().requires_grad_() for tensor in (out.rows, out.weights)]
        y = hybrid_ep.combine(buffer, leaves[0], out.handle, weights=leaves[1], num_sms=8)
        of_rows, of_weights = torch.autograd.grad(y, leaves, x)
        made = {"rows": out.rows, "weights": out.weights, "counts": out.counts, "y": y.detach()}
        return made | {"gradient of rows": of_rows, "gradient of weights": of_weights}

    graph, captured = warmed_up_and_captured(step)

    results = []
    for inputs in rounds:
        x.copy_(inputs.x)
        topk_idx.copy_(inputs.topk_idx)
        weights.copy_(inputs.weights)
        graph.replay()
        eager = step()  # calls outside the graph go on in between
        for name, tensor in captured.items():
            same_bytes(tensor, eager[name], f"{name} of the replay, beside eager's")
        results.append({name: tensor.cpu() for name, tensor in captured.items()})
    torch.cuda.synchronize()
    buffer.check()
    buffer.destroy()
    return results


def capture_exact(me: Rank, case: Case) -> str:
    """The message of the error that an exact dispatch raises while a graph is captured."""
    buffer = me.buffer(**case.sizes())
    inputs = case.inputs(me.rank)
    x, topk_idx = inputs.x.to(me.device), inputs.topk_idx.to(me.device)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            hybrid_ep.dispatch(buffer, x, topk_idx)
    except ValueError as error:
        return str(error)
    return ""


def end_a_buffer_in_a_capture(me: Rank, case: Case, way: str) -> dict[str, int]:
    """A second Buffer ends while the first one is captured; what is given back later, and when."""
    buffer, other = (me.buffer(**case.sizes()) for _ in range(2))
    inputs = case.inputs(me.rank)
    x, topk_idx = inputs.x.to(me.device), inputs.topk_idx.to(me.device)
    max_rows = me.num_ranks * buffer.max_tokens * buffer.topk

    def step() -> torch.Tensor:
        out = hybrid_ep.dispatch(buffer, x, topk_idx, max_rows=max_rows)
        return hybrid_ep.combine(buffer, out.rows, out.handle)

    expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
        if way == "destroyed":
            other.destroy()
        del other
    seen = {"kept": len(endings._kept)}
    graph.replay()
    torch.cuda.synchronize()
    same_bytes(captured, expected, "y of the replay")
    step()
    seen["kept after a call"] = len(endings._kept)
    torch.cuda.synchronize()
    buffer.destroy()
    return seen
