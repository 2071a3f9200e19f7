"""Time dispatch and combine here, beside the bare all_to_all_single of the same bytes.

Starts its own ranks, or uses torchrun's. Every option that takes several values is measured for
each. GB/s counts what leaves a rank: a token once per other rank that has one of its experts.

    hybrid-ep bench --tokens 1024 4096 --sms 16 24 32 48 --json bench.json --plot charts

The JSON: device, num_gpus, torch, commit, command, ceilings (GB/s of plain copies), skipped, and
records: op, backend, mode, direction, sizing, max_rows, ranks, tokens, hidden, experts, topk,
dtype, skew, sms, us_median, us_min, us_max (of the slowest rank in each iteration), nvlink_bytes
(busiest rank, one direction, mean of the input sets), gbps, ceiling_fraction (of the peer copy, or
of the bare all_to_all where no two GPUs can copy), ratio_to_all_to_all (of time).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from hybrid_ep import bench, bench_report
from hybrid_ep.launch import on_ranks, ranks_here

HELP = "time dispatch and combine on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--ranks", type=int, help="default: the GPUs, else 4")
    parser.add_argument("--backend", default="auto", help="one of auto, torch, nvlink; or B,B")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    sizes = {
        "tokens": [4096],
        "hidden": [7168 if on_gpu else 1024],
        "experts": [256],
        "topk": [8],
        "sms": [16, 24, 32, 48],
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default, metavar="N")
    parser.add_argument("--dtype", nargs="+", default=["bf16"], choices=tuple(bench.DTYPES))
    parser.add_argument("--sizing", nargs="+", default=list(bench.SIZINGS), choices=bench.SIZINGS)
    parser.add_argument(
        "--skew", type=float, default=0.0, help="exponent of a Zipf law of the experts' load"
    )
    parser.add_argument("--align", type=int, default=1)
    parser.add_argument("--weighted", action="store_true", help="combine with weights")
    parser.add_argument("--no-backward", action="store_true", help="leave the gradients out")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for."""
    options = bench.Options(
        backends=tuple(args.backend.split(",")),
        tokens=tuple(args.tokens),
        hidden=tuple(args.hidden),
        experts=tuple(args.experts),
        topk=tuple(args.topk),
        dtypes=tuple(args.dtype),
        sms=tuple(args.sms),
        sizings=tuple(args.sizing),
        skew=args.skew,
        align=args.align,
        weighted=args.weighted,
        backward=not args.no_backward,
        iters=args.iters,
        warmup=args.warmup,
    )
    options.check(ranks_here(args.ranks))
    try:
        ran = on_ranks(bench.measure, args.ranks, options, device=args.device)
    except RuntimeError as error:
        print(f"hybrid-ep bench: {error}", file=sys.stderr)
        return 1
    if not ran.speaks:
        return 0
    report = {**bench.describe_machine(args.device, len(ran.values)), **ran.values[0]}
    bench_report.print_table(report)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot is not None:
        for path in bench_report.plot(report, args.plot):
            print(f"wrote {path}")
    return 0
