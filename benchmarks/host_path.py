"""What a call costs the host: microseconds of Python between the user and the kernels.

On a GPU with the nvlink backend, a world of one rank, nothing waits; without one the same Python on
tensors of the CPU, with an extension whose calls return at once. Medians and minima of batches.

    PYTHONPATH=. python benchmarks/host_path.py [--batches N] [--calls N]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import hybrid_ep
from hybrid_ep.ops import verbs
from hybrid_ep.output import tables
from tools.fake_nvlink import Fake, cpu_with

TOKENS, HIDDEN, EXPERTS, TOPK = 64, 128, 16, 8
ROWS = TOKENS * TOPK


def calls(buffer: hybrid_ep.Buffer, gradient: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is timed, by name."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().to(buffer.device)
    topk_idx = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK).indices
    topk_idx = topk_idx.to(buffer.device)
    topk_weights = torch.rand(TOKENS, TOPK, generator=generator).to(buffer.device)
    out = hybrid_ep.dispatch(buffer, x, topk_idx, topk_weights, max_rows=ROWS)
    handle = out.handle
    rows, weights = (t.detach().requires_grad_(gradient) for t in (out.rows, out.weights))
    x, topk_weights = (t.requires_grad_(gradient) for t in (x, topk_weights))

    def fresh(max_rows: int | None = ROWS) -> Any:
        return hybrid_ep.dispatch(buffer, x, topk_idx, topk_weights, max_rows=max_rows)

    def cached() -> Any:
        return hybrid_ep.dispatch(buffer, x, None, topk_weights, handle=handle)

    def combine(weights: torch.Tensor | None = None) -> torch.Tensor:
        return hybrid_ep.combine(buffer, rows, handle, weights=weights)

    yield "dispatch, fresh, max_rows", fresh
    if buffer.device.type == "cpu":  # on a GPU the host waits in it
        yield "dispatch, fresh, exact", lambda: fresh(None)
    yield "dispatch, cached", cached
    yield "combine", combine
    yield "combine, weighted", lambda: combine(weights)
    if not gradient:
        return
    sent, y = cached(), combine()
    sent, leaves = (sent.rows, sent.weights), (x, topk_weights)
    grads = tuple(torch.ones_like(t) for t in sent)

    def backward(outputs: Any, leaves: Any, grads: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

    yield "dispatch, backward", backward(sent, leaves, grads)
    yield "combine, backward", backward((y,), (rows,), (torch.ones_like(y),))


def microseconds(call: Callable[[], Any], batches: int, calls: int) -> list[float]:
    """Of one call, for each batch; a GPU catches up between the batches."""
    took = []
    for batch in range(batches + 1):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if batch > 0:
            took.append((time.perf_counter() - begin) / calls * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=15)
    parser.add_argument("--calls", type=int, default=50, help="of a batch")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    ways = {"at once": (False, False), "gradient": (True, False), "as ops": (True, True)}
    found: dict[str, dict[str, str]] = {}
    with contextlib.nullcontext() if on_gpu else cpu_with(Fake(num_rows=ROWS)):
        buffer = hybrid_ep.Buffer(
            hidden=HIDDEN, num_experts=EXPERTS, max_tokens=TOKENS, topk=TOPK, backend="nvlink"
        )
        for way, (gradient, ops) in ways.items():
            watched = mock.patch.object(verbs, "watched", lambda *tensors: True)
            with watched if ops else contextlib.nullcontext():
                for name, call in calls(buffer, gradient):
                    took = microseconds(call, args.batches, args.calls)
                    told = f"{statistics.median(took):.1f} ({min(took):.1f})"
                    found.setdefault(name, {})[way] = told
        buffer.destroy()
    where = torch.cuda.get_device_name() if on_gpu else "no GPU: the Python alone"
    rows = [[name, *(by_way.get(way, "-") for way in ways)] for name, by_way in found.items()]
    tables.print_table(
        f"us of the host a call, median (least); {where}", ("call", *ways), rows, texts=1
    )


if __name__ == "__main__":
    main()
