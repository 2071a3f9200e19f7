"""The torch backend on GPUs beside the NCCL way of plain torch, for each way to name NCCL.

    PYTHONPATH=. python benchmarks/over_nccl.py [--ranks N] [--json FILE]

Times are those of `hybrid-ep bench`: us, the slowest rank, median; T 4096, H 7168, E 16, K 8, bf16.
A rank alone sends itself its rows, in both, so on one GPU all is timed but the link. The aims: a
fresh dispatch of exact size in at most 1.3 times the NCCL way's time, a combine in at most 2 times.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep.backends.torch.carrier import Carrier, serving_backend
from hybrid_ep.backends.torch.collectives import Collectives
from hybrid_ep.bench.baselines import bare_calls, plain_calls
from hybrid_ep.bench.calls import library_calls, make_buffer
from hybrid_ep.bench.clock import Clock
from hybrid_ep.bench.inputs import NUM_INPUTS, CopyCounts, make_inputs
from hybrid_ep.bench.options import Options
from hybrid_ep.buffer import Buffer
from hybrid_ep.config import Config
from hybrid_ep.launch import default_num_ranks, run_ranks
from hybrid_ep.output.tables import print_table

WAYS = {"nccl": "nccl", "cpu:gloo,cuda:nccl": "cpu:gloo,cuda:nccl", "nothing named": None}
TRANSPOSE = {"dispatch": "combine", "combine": "dispatch"}
AIMS = {"dispatch": 1.3, "combine": 2.0}
HEAD = ("init_process_group", "op", "mode", "direction", "torch us", "NCCL way us", "ratio", "aim")


def send_to_itself(buffer: Buffer) -> None:
    """Make a Buffer of one rank exchange all that it otherwise would not."""
    backend = buffer.communicator.verbs
    backend._transport.carrier = Carrier("nccl")
    group = buffer.communicator.group
    backend._exchange = Collectives(group, buffer.config.timeout_s)
    backend._calls.exchange = backend._exchange


def measure(device: torch.device, options: Options) -> list[dict[str, Any]]:
    (load,) = options.loads(dist.get_world_size())
    clock = Clock(device)
    if serving_backend(dist.group.WORLD, device) != "nccl":
        raise RuntimeError(f"NCCL must serve {device}, got {dist.get_backend_config()}")
    inputs = [make_inputs(load, dist.get_rank(), index, device) for index in range(NUM_INPUTS)]
    copy_counts = CopyCounts(load, inputs)
    buffer = make_buffer(load, device, "torch", Config())
    if dist.get_world_size() == 1:
        send_to_itself(buffer)
    calls = [
        *bare_calls(load, copy_counts, clock.carrier, device),
        *plain_calls(load, inputs, copy_counts, clock.carrier),
        *library_calls(buffer, load, inputs, "exact", copy_counts, options),
    ]
    clock.take_turns(calls, iters=options.iters, warmup=options.warmup)
    dist.barrier()
    buffer.destroy()
    return [
        {
            "backend": call.backend,
            "op": call.op,
            "mode": call.mode,
            "direction": call.direction,
            "us": statistics.median(call.us),
            "us_min": min(call.us),
            "us_max": max(call.us),
        }
        for call in calls
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, default=min(gpus, default_num_ranks()))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not 1 <= args.ranks <= gpus:
        parser.error(f"--ranks must be from 1 to the {gpus} GPUs here, got {args.ranks}")
    options = Options(
        backends=("torch",),
        tokens=(args.tokens,),
        hidden=(args.hidden,),
        experts=(16,),
        topk=(8,),
        iters=args.iters,
    )
    rows, reports = [], {}
    for way, group in WAYS.items():
        report = reports[way] = run_ranks(measure, args.ranks, options, group=group)[0]
        plain = {each["op"]: each["us"] for each in report if each["backend"] == "nccl"}
        for each in report:
            if each["backend"] != "torch":
                continue
            is_backward = each["direction"] == "backward"  # the other op, then
            like = each["op"] if not is_backward else TRANSPOSE[each["op"]]
            ratio = each["us"] / plain[like]
            is_aimed_at = each["mode"] == "fresh"
            aim = AIMS[each["op"]] if is_aimed_at else None
            told = "-" if aim is None else f"{aim} {'met' if ratio <= aim else 'MISSED'}"
            texts = way, each["op"], each["mode"], each["direction"]
            rows.append((*texts, f"{each['us']:.0f}", f"{plain[like]:.0f}", f"{ratio:.2f}", told))
    title = f"torch backend over NCCL, {args.ranks} x {torch.cuda.get_device_name(0)}"
    print_table(title, HEAD, rows, texts=4)
    if args.json:
        args.json.write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    main()
