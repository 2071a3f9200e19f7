"""Times of fresh, cached and bounded dispatch and of combine on two GPUs, by number of SMs.

    PYTHONPATH=. python3 benchmarks/call_times.py

Call to call with CUDA events, inputs in rotation; the slowest rank of each call, then the median
and the least over the calls.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.launch import run_ranks

TOKENS, HIDDEN, TOPK = 4096, 7168, 8
INPUTS, WARMUP, CALLS = 4, 4, 20


def measure(device: torch.device, experts: int, sms: int) -> dict[str, str]:
    rank = dist.get_rank()
    buffer = hybrid_ep.Buffer(
        hidden=HIDDEN,
        num_experts=experts,
        max_tokens=TOKENS,
        topk=TOPK,
        device=device,
        backend="nvlink",
        config=hybrid_ep.Config(
            num_sms_publish=sms, num_sms_dispatch=sms, num_sms_combine=sms, timeout_s=10
        ),
    )
    draw = torch.Generator(device=device).manual_seed(rank)
    x = [
        torch.randn((TOKENS, HIDDEN), device=device, generator=draw).bfloat16()
        for _ in range(INPUTS)
    ]
    topk_idx = [
        torch.rand((TOKENS, experts), device=device, generator=draw).topk(TOPK).indices
        for _ in range(INPUTS)
    ]
    weights = torch.rand((TOKENS, TOPK), device=device, generator=draw)
    handle = hybrid_ep.dispatch(buffer, x[0], topk_idx[0], weights).handle
    bound = TOKENS * TOPK * 6 // 5  # a fifth more rows than a balanced load needs

    modes = {
        "exact": lambda i: hybrid_ep.dispatch(buffer, x[i], topk_idx[i], weights),
        "max_rows": lambda i: hybrid_ep.dispatch(
            buffer, x[i], topk_idx[i], weights, max_rows=bound
        ),
        "cached": lambda i: hybrid_ep.dispatch(buffer, x[i], topk_weights=weights, handle=handle),
    }
    results = {}
    for name, dispatch in modes.items():
        marks = []
        for call in range(WARMUP + CALLS):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            events[0].record()
            out = dispatch(call % INPUTS)
            events[1].record()
            hybrid_ep.combine(buffer, out.rows, out.handle)
            events[2].record()
            marks.append(events)
        torch.cuda.synchronize()
        buffer.check()
        mine = [(a.elapsed_time(b) * 1e3, b.elapsed_time(c) * 1e3) for a, b, c in marks[WARMUP:]]
        everybody = buffer.gather(mine)
        for place, verb in enumerate(("dispatch", "combine")):
            slowest = [max(times[place] for times in call) for call in zip(*everybody, strict=True)]
            results[f"{name} {verb}"] = f"{statistics.median(slowest):.0f} ({min(slowest):.0f})"
    buffer.gather(None)
    buffer.destroy()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--sms", type=int, nargs="+", default=[16, 32, 48])
    args = parser.parse_args()
    for experts in args.experts:
        for sms in args.sms:
            results = run_ranks(measure, args.ranks, experts, sms)[0]
            times = ", ".join(f"{name} {time}" for name, time in results.items())
            print(f"E {experts}, {sms} SMs, us: {times}", flush=True)


if __name__ == "__main__":
    main()
