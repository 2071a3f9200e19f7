#!/usr/bin/env python3
"""Times dispatch and combine of GPUs of one host as nodes of their own, beside nvlink.

NVSHMEM then puts over NVLink, by the SMs, which stands in for a network. A line of JSON for each
setting; with --trace also a Chrome trace of one call, and how far its phases overlap.

    python benchmarks/nodes.py --ranks 2 --trace trace.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.launch import run_ranks
from hybrid_ep.trace import SPANS, Event

WARM_UP, CALLS = 3, 15
# channels, SMs of dispatch and of combine
SETTINGS = ((8, 32, 32), (24, 56, 64), (48, 96, 96))


def median_us(call, buffer: hybrid_ep.Buffer) -> float:
    """Of the slowest rank, ranks starting together; the call alone on the GPU."""
    times = []
    for _ in range(WARM_UP + CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(1_000_000)  # so that the host is ahead
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(map(max, zip(*buffer.gather(times[WARM_UP:]), strict=True)))


def measure(
    device: torch.device, shape: argparse.Namespace, backend: str, config: hybrid_ep.Config
) -> dict[str, Any]:
    ranks = dist.get_world_size()
    buffer = hybrid_ep.Buffer(
        hidden=shape.hidden,
        num_experts=shape.experts,
        max_tokens=shape.tokens,
        topk=shape.topk,
        backend=backend,
        ranks_per_node=ranks if backend == "nvlink" else shape.ranks_per_node,
        config=config,
    )
    draw = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(shape.tokens, shape.hidden, generator=draw).bfloat16().to(device)
    scores = torch.rand(shape.tokens, shape.experts, generator=draw)
    topk_idx = scores.argsort(dim=1)[:, : shape.topk].to(device)
    exact = hybrid_ep.dispatch(buffer, x, topk_idx)
    max_rows = max(buffer.gather(len(exact.rows)))  # so that no tail has to be zeroed
    del exact
    out = hybrid_ep.dispatch(buffer, x, topk_idx, max_rows=max_rows)
    report = {
        "backend": backend,
        **asdict(config),
        "dispatch_us": median_us(
            lambda: hybrid_ep.dispatch(buffer, x, topk_idx, max_rows=max_rows), buffer
        ),
        "cached_us": median_us(lambda: hybrid_ep.dispatch(buffer, x, handle=out.handle), buffer),
        "combine_us": median_us(lambda: hybrid_ep.combine(buffer, out.rows, out.handle), buffer),
    }
    if config.trace:
        buffer.gather(buffer.verbs.take_trace())  # what the timing left
        hybrid_ep.dispatch(buffer, x, handle=out.handle)
        hybrid_ep.combine(buffer, out.rows, out.handle)
        report["spans_us"] = spans([Event(*e) for e in buffer.verbs.take_trace()])
        hybrid_ep.dispatch(buffer, x, handle=out.handle)
        hybrid_ep.combine(buffer, out.rows, out.handle)
        buffer.write_trace(shape.trace)
    buffer.destroy()
    return report


def spans(events: list[Event]) -> dict[str, list[float]]:
    """When the first block began a phase and the last one ended it, from the first event on."""
    begin = min(event.begin_ns for event in events)
    return {
        SPANS[span][1]: [
            round((pick(getattr(e, f"{edge}_ns") for e in events if e.span == span) - begin) / 1e3)
            for edge, pick in (("begin", min), ("end", max))
        ]
        for span in sorted({event.span for event in events})
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("ranks", 2), ("ranks-per-node", 1), ("tokens", 4096), ("hidden", 7168)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("experts", 16), ("topk", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--trace", help="file of a Chrome trace of the last setting")
    shape = parser.parse_args()
    runs = [("nvlink", hybrid_ep.Config(num_sms_dispatch=48, num_sms_combine=48))]
    runs += [
        (
            "nvshmem",
            hybrid_ep.Config(
                network_channels=channels, num_sms_dispatch=dispatch, num_sms_combine=combine
            ),
        )
        for channels, dispatch, combine in SETTINGS
    ]
    if shape.trace is not None:
        runs.append(("nvshmem", replace(runs[-1][1], trace=True)))
    for backend, config in runs:
        report = run_ranks(measure, shape.ranks, shape, backend, config)[0]
        print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
