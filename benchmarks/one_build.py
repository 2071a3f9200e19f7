"""Times of one build, to be compared with another one's in the same call on the same machine.

Two ranks, nvlink; us from call to call, the slowest rank, median of 24 calls; JSON on the last
line.
PYTHONPATH names the build, so alternate between two trees and compare medians of the ratios:

    for i in 1 2 3 4 5; do
        PYTHONPATH=../old python benchmarks/one_build.py >> old.jsonl
        PYTHONPATH=. python benchmarks/one_build.py >> new.jsonl
    done
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.launch import run_ranks

HIDDEN, EXPERTS, CALLS = 7168, 16, 24
FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
SHAPES = {  # SMs, top-k, tokens, dtype, scales per token
    "E16, 48 SMs": (48, 8, 4096, BF16, 0),
    "E16, 32 SMs": (32, 8, 4096, BF16, 0),
    "E16, 16 SMs": (16, 8, 4096, BF16, 0),
    "K1, 48 SMs": (48, 1, 32768, BF16, 0),
    "fp8, 48 SMs": (48, 8, 4096, FP8, HIDDEN // 128),
}


def time_calls(call: Callable[[], Any]) -> float:
    for _ in range(4):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)]
    of_ranks = [0.0] * dist.get_world_size()
    dist.all_gather_object(of_ranks, statistics.median(times))
    return max(of_ranks)


def time_shape(
    device: torch.device, sms: int, topk: int, tokens: int, dtype: torch.dtype, num_scales: int
) -> dict[str, float]:
    config = hybrid_ep.Config(
        num_sms_publish=32, num_sms_dispatch=sms, num_sms_combine=sms, timeout_s=30
    )
    sizes = {"hidden": HIDDEN, "num_experts": EXPERTS, "max_tokens": tokens, "topk": topk}
    buffer = hybrid_ep.Buffer(**sizes, device=device, backend="nvlink", config=config)
    draw = torch.Generator(device=device).manual_seed(dist.get_rank())
    x = torch.randn(tokens, HIDDEN, device=device, generator=draw).to(dtype)
    scales = torch.rand(tokens, num_scales, device=device, generator=draw) if num_scales else None
    topk_idx = torch.rand(tokens, EXPERTS, device=device, generator=draw).topk(topk).indices
    weights = torch.rand(tokens, topk, device=device, generator=draw)
    bound = tokens * topk * 9 // 8

    def dispatch(topk_idx: torch.Tensor | None = topk_idx, **how: Any) -> Any:
        return hybrid_ep.dispatch(buffer, x, topk_idx, weights, scales=scales, **how)

    handle = dispatch(max_rows=bound).handle
    times = {
        "max_rows": time_calls(lambda: dispatch(max_rows=bound)),
        "exact": time_calls(dispatch),
        "cached": time_calls(lambda: dispatch(None, handle=handle)),
    }
    if dtype != FP8:
        rows = torch.randn(bound, HIDDEN, device=device).to(dtype)
        of_rows = torch.rand(bound, device=device)
        times["combine"] = time_calls(lambda: hybrid_ep.combine(buffer, rows, handle))
        times["combine, weighted"] = time_calls(
            lambda: hybrid_ep.combine(buffer, rows, handle, weights=of_rows)
        )
    torch.cuda.synchronize()
    dist.barrier()
    buffer.destroy()
    dist.barrier()
    return times


def time_all(device: torch.device) -> dict[str, float]:
    times = {}
    for name, shape in SHAPES.items():
        for call, us in time_shape(device, *shape).items():
            times[f"{name}: {call}"] = us
    return times


if __name__ == "__main__":
    print(json.dumps(run_ranks(time_all, 2)[0]))
