"""What matrix products lose beside communication: SMs, memory traffic, or the order of launches?

    PYTHONPATH=. python benchmarks/experiments/overlap_limits.py

One rank on one GPU. Beside dispatch and combine runs, in other iterations, a kernel that occupies
as many SMs for as long and touches no memory: what products lose beside it is lost to scheduling.
Dense products (cuBLAS) and the experts' grouped products (CUTLASS) run on all SMs, or leave SMs
free while communication lasts.
``--trace`` prints start, duration and grid of each kernel of one iteration.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hybrid_ep
from hybrid_ep.bench.clock import Clock
from hybrid_ep.bench.overlap.hiding import allowed, hidden
from hybrid_ep.bench.overlap.products import Products, dense, gemms_beside
from hybrid_ep.bench.overlap.streams import Pair, Streams
from hybrid_ep.launch import run_ranks
from hybrid_ep.moe import grouped_mm

TOKENS, HIDDEN, EXPERTS, TOPK, FFN = 4096, 7168, 64, 8, 2048
OCCUPY = r"""
extern "C" __global__ void __launch_bounds__(1024) occupy(int us) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < us * 1000ll);
}
"""


def run(device: torch.device, sms: list[int], trace: bool) -> None:
    """Print a line for each setting."""
    streams = Streams(Clock(device))
    buffer = hybrid_ep.Buffer(
        hidden=HIDDEN, num_experts=EXPERTS, max_tokens=TOKENS, topk=TOPK, device=device
    )
    x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    weights, topk_idx = torch.rand(TOKENS, EXPERTS, device=device).softmax(dim=1).topk(TOPK)
    out = hybrid_ep.dispatch(buffer, x, topk_idx, weights)
    matrices = torch.randn(EXPERTS, HIDDEN, FFN, device=device).bfloat16()

    def communicate(_: int, *, num_sms: int) -> Any:
        sent = hybrid_ep.dispatch(
            buffer, x, topk_idx, weights, max_rows=TOKENS * TOPK, num_sms=num_sms
        )
        return sent, hybrid_ep.combine(buffer, sent.rows, sent.handle, num_sms=num_sms)

    kernel = torch.cuda._compile_kernel(OCCUPY, "occupy")

    def occupy(_: int, *, num_sms: int, us: float) -> None:
        kernel((num_sms, 1, 1), (1024, 1, 1), (int(us),))

    def product(_: int) -> Tensor:
        return grouped_mm(out.rows, matrices, out.offsets[1:])

    kinds = {
        "dense products": (dense((4096, 7168, 4096), 8, device), 8),
        "grouped products": (Products(product, 3), 3),
    }
    for (name, (products, count)), num_sms in ((k, n) for k in kinds.items() for n in sms):
        talk = functools.partial(communicate, num_sms=num_sms)
        take_turns = functools.partial(streams.take_turns, iters=9, warmup=2)
        rest = functools.partial(products, free_sms=num_sms, beside=count)
        alone, on_all, on_rest = take_turns([Pair(talk), Pair(None, products), Pair(None, rest)])
        beside = gemms_beside(alone.communication_us, on_all.products_us, count)
        rest = functools.partial(products, free_sms=num_sms, beside=beside)
        stand_in = functools.partial(occupy, num_sms=num_sms, us=alone.communication_us)
        told = {
            "communication": Pair(talk, products),
            "idle blocks": Pair(stand_in, products),
            "communication, products on the rest": Pair(talk, rest),
            "idle blocks, products on the rest": Pair(stand_in, rest),
        }
        total = torch.cuda.get_device_properties(device).multi_processor_count
        most = allowed(alone.communication_us, on_all.products_us, num_sms, total)
        print(
            f"{count} {name}: {on_all.products_us:.0f} us, on {total - num_sms} SMs "
            f"{on_rest.products_us:.0f}; communication on {num_sms} SMs "
            f"{alone.communication_us:.0f} us, {most:.2f} may be hidden"
        )
        for what, ends in zip(told, take_turns(list(told.values())), strict=True):
            part = hidden(alone.communication_us, on_all.products_us, ends.both_us)
            print(
                f"    beside {what}: products {ends.products_us:.0f}, other stream "
                f"{ends.communication_us:.0f}, hidden {part:.2f}, {part / most:.2f} of it",
                flush=True,
            )
        if trace:
            for what in ("communication", "communication, products on the rest"):
                print(f"    kernels, {what}:")
                print_kernels(
                    functools.partial(streams.take_turns, [told[what]], iters=1, warmup=0)
                )
    buffer.destroy()


def print_kernels(launch: Callable[[], Any]) -> None:
    """Start, duration and grid of every kernel of a launch."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        launch()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyError):
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    for event in kernels[1:]:
        start = event["ts"] - kernels[0]["ts"] - kernels[0]["dur"]
        grid, name = event["args"]["grid"], event["name"][:60]
        print(f"      {start:8.1f} {event['dur']:8.1f} us {grid} {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sms", type=int, nargs="+", default=[8, 16, 24, 32, 48])
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    run_ranks(run, 1, options.sms, options.trace)
