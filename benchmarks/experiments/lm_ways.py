"""examples/lm with each overlap, sizing and number of free SMs, in one process per rank.

    torchrun --nproc-per-node RANKS benchmarks/experiments/lm_ways.py [--layers N] [--preset NAME]

PYTHONPATH must name the repository.
For each: tokens per second of all ranks (median of the timed steps), what part of a step the GPU
computes, and how long the kernels of a step would take one after the other, hybrid_ep's among them.
The last three are of one more step under torch's profiler, which makes the host slower.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from examples.lm.options import PRESETS, Options
from examples.lm.trainer import Trainer
from hybrid_ep.output.tables import print_table

WARM_UP, TIMED = 2, 4
OURS = ("hybrid_ep", "nccl")  # in the names of kernels that move tokens
HEAD = ("overlap", "room", "SMs left free", "tokens/s", "GPU busy", "kernels ms", "of them moving")
RUNS = [
    {"overlap": overlap, "room": room, "leave_free": free}
    for room in (None, 1.1)
    for overlap, free in (("none", 0), ("shared", 0), ("shared", 32), ("halves", 0), ("halves", 32))
    if not (room is None and free)
]


def measure(options: Options, device: torch.device) -> tuple[str, ...]:
    trainer = Trainer(options, device)
    try:
        for _ in range(WARM_UP):
            trainer.step()
        seconds = [_seconds(trainer) for _ in range(TIMED)]
        tokens = options.sizes.batch * options.sizes.sequence / statistics.median(seconds)
        return f"{tokens:,.0f}", *_kernels(trainer)
    finally:
        trainer.close()


def _seconds(trainer: Trainer) -> float:
    _wait(trainer.device)
    began = time.perf_counter()
    trainer.step()
    _wait(trainer.device)
    return time.perf_counter() - began


def _kernels(trainer: Trainer) -> tuple[str, ...]:
    if trainer.device.type != "cuda":
        return ("-",) * 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds = _seconds(trainer)
    spans = sorted(_spans(profile))
    busy, end = 0.0, 0.0
    for begin, until, _ in spans:
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    total = sum(until - begin for begin, until, _ in spans)
    moving = sum(until - begin for begin, until, name in spans if any(o in name for o in OURS))
    return f"{busy / 1e6 / seconds:.0%}", f"{total / 1e3:.0f}", f"{moving / 1e3:.0f}"


def _spans(profile: Any) -> list[tuple[float, float, str]]:
    """Begin and end in us, and the name."""
    return [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--preset", choices=PRESETS, default="h200x2")
    args = parser.parse_args()
    device, group = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, group = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(group)
    sizes = replace(PRESETS[args.preset], layers=args.layers)
    rows = []
    for run in RUNS:
        if device.type != "cuda":
            run = {**run, "leave_free": 0}
        told = measure(Options(sizes=sizes, **run), device)
        first = run["overlap"], str(run["room"] or "exact"), str(run["leave_free"])
        rows.append((*first, *told))
        if dist.get_rank() == 0:
            print("  ".join(rows[-1]), flush=True)
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        title = f"examples.lm, {args.layers} layers, {dist.get_world_size()} rank(s), {name}"
        print_table(title, HEAD, rows, texts=3, keys=3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
