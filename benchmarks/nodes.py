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
from hybrid_ep.backends.cuda.trace import SPANS, Event
from hybrid_ep.launch import run_ranks

WARM_UP, CALLS = 2, 10
PATIENCE_S = 8
SHOWN = (
    "network_channels",
    "network_chunk_tokens",
    "network_window_chunks",
    "num_sms_dispatch",
    "num_sms_combine",
)
# channels, tokens of a chunk, chunks of a channel under way, SMs of dispatch and of combine
SETTINGS = ((8, 8, 4, 32, 32), (8, 8, 4, 48, 48), (16, 8, 4, 48, 48), (32, 8, 4, 80, 80))
NVLINK_SMS = (32, 48)


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
    everybody = buffer.communicator.group.gather(times[WARM_UP:])
    return statistics.median(map(max, zip(*everybody, strict=True)))


def measure_all(
    device: torch.device, shape: argparse.Namespace, runs: list[tuple[str, hybrid_ep.Config]]
) -> None:
    """Each setting in turn; rank 0 prints what came of it at once."""
    draw = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(shape.tokens, shape.hidden, generator=draw, device=device).bfloat16()
    scores = torch.rand(shape.tokens, shape.experts, generator=draw, device=device)
    topk_idx = scores.argsort(dim=1)[:, : shape.topk].contiguous()
    for backend, config in runs:
        tell(f"{backend}, {config.network_channels} channels")
        report = measure(shape, backend, config, x, topk_idx)
        tell(json.dumps(report))


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def measure(
    shape: argparse.Namespace,
    backend: str,
    config: hybrid_ep.Config,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
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
    group, verbs = buffer.communicator.group, buffer.communicator.verbs
    exact = hybrid_ep.dispatch(buffer, x, topk_idx)
    max_rows = max(group.gather(len(exact.rows)))  # so that no tail has to be zeroed
    tell(f"  {max_rows} rows")
    del exact
    out = hybrid_ep.dispatch(buffer, x, topk_idx, max_rows=max_rows)
    report = {
        "backend": backend,
        **{name: value for name, value in asdict(config).items() if name in SHOWN},
        "dispatch_us": median_us(
            lambda: hybrid_ep.dispatch(buffer, x, topk_idx, max_rows=max_rows), buffer
        ),
        "cached_us": median_us(lambda: hybrid_ep.dispatch(buffer, x, handle=out.handle), buffer),
        "combine_us": median_us(lambda: hybrid_ep.combine(buffer, out.rows, out.handle), buffer),
    }
    if config.trace:
        group.gather(verbs.take_trace() and None)  # what the timing left
        report["spans_us"] = spans(one_call(buffer, x, out))
        group.gather(None)
        one_call(buffer, x, out, keep=True)
        buffer.write_trace(shape.trace)
    buffer.check()
    buffer.destroy()
    return report


def one_call(
    buffer: hybrid_ep.Buffer, x: torch.Tensor, out: hybrid_ep.Dispatched, keep: bool = False
) -> list[Event]:
    hybrid_ep.dispatch(buffer, x, handle=out.handle)
    hybrid_ep.combine(buffer, out.rows, out.handle)
    return [] if keep else [Event(*event) for event in buffer.communicator.verbs.take_trace()]


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
    common = hybrid_ep.Config(timeout_s=PATIENCE_S)
    runs = [
        (
            "nvshmem",
            replace(
                common,
                network_channels=channels,
                network_chunk_tokens=chunk,
                network_window_chunks=window,
                num_sms_dispatch=dispatch,
                num_sms_combine=combine,
            ),
        )
        for channels, chunk, window, dispatch, combine in SETTINGS
    ]
    if shape.trace is not None:
        runs.append(("nvshmem", replace(runs[-1][1], trace=True)))
    for sms in NVLINK_SMS:
        runs.append(("nvlink", replace(common, num_sms_dispatch=sms, num_sms_combine=sms)))
    run_ranks(measure_all, shape.ranks, shape, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
