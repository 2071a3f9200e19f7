"""Time dispatch and combine here, beside plain torch's and what the hardware carries.

Starts its own ranks, or uses torchrun's. Every option that takes several values is measured for
each. On GPUs without any size named: a sweep of less than a minute at T 4096, H 7168, K 8.
GB/s counts what leaves a rank: a token once per other rank that has one of its experts.

    hybrid-ep bench --tokens 1024 4096 --sms 16 24 32 48 --json bench.json --plot bench.png
    hybrid-ep bench --sweep tokens

The JSON: device, num_gpus, commit, command, ceilings (GB/s: memory_copy_gbps, peer_copy_gbps, and
pull_gbps and push_gbps by the number of SMs), and records: op, backend (all_to_all is the bare one,
nccl or gloo all of it in plain torch), mode, direction, sizing, max_rows (the bound: what the
largest rank needs, rounded up to 128), ranks, tokens, hidden, experts, topk, dtype, skew, align,
weighted, sms (of publish, pull and the sums alike), us_median, us_min, us_max (of the slowest rank
in each iteration), us_fastest_rank (median of the fastest rank), rank_spread_us (medians of the
fastest and of the slowest rank), host_us (of a call among others, where the host does not wait) and
host_us_after_idle (of the timed calls), kernels_us, phases_us (by phase) and sms_occupied (how many
SMs any kernel of the call ran on, so also routing's two short ones, which have grids of their own;
these three of nvlink alone, from other calls, which note time stamps; the slowest rank, medians),
rows (largest rank), nvlink_bytes (busiest rank, one direction, mean of the input sets), gbps,
ceiling_gbps (pull for dispatch, push for combine, at these SMs; where there is none, of the peer
copy, or of the bare all_to_all), ceiling_fraction, ratio_to_all_to_all (of time).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybrid_ep import bench
from hybrid_ep.bench.charts import plot
from hybrid_ep.bench.records import describe_machine
from hybrid_ep.bench.table import print_table
from hybrid_ep.launch import on_ranks, ranks_here
from hybrid_ep.output.files import check_matplotlib, make_room

HELP = "time dispatch and combine on this machine"

_DEFAULTS: dict[str, Any] = {
    "tokens": (4096,),
    "hidden": (1024,),
    "experts": (256,),
    "topk": (8,),
    "sms": (16, 32, 48),
    "dtypes": ("bf16",),
    "skew": (0.0,),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--sweep",
        choices=tuple(bench.SWEEPS),
        help="tokens: 1k to 32k of one shape, and what is fixed in a call; sizes may be named too",
    )
    parser.add_argument("--ranks", type=int, help="default: the GPUs, else 4")
    parser.add_argument("--backend", default="auto", help="one of auto, torch, nvlink; or B,B")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    for name in ("tokens", "hidden", "experts", "topk", "sms"):
        told = " ".join(map(str, _DEFAULTS[name]))
        parser.add_argument(
            f"--{name}",
            type=int,
            nargs="+",
            metavar="N",
            help=f"default {told}" + (", on GPUs 7168" if name == "hidden" else ""),
        )
    parser.add_argument("--dtype", nargs="+", dest="dtypes", choices=tuple(bench.DTYPES))
    parser.add_argument("--sizing", nargs="+", default=list(bench.SIZINGS), choices=bench.SIZINGS)
    parser.add_argument(
        "--skew",
        type=float,
        nargs="+",
        metavar="X",
        help="exponents of a Zipf law of the experts' load; default 0, uniform",
    )
    parser.add_argument("--align", type=int, default=1)
    parser.add_argument("--weighted", action="store_true", help="combine with weights")
    parser.add_argument(
        "--backward",
        action=argparse.BooleanOptionalAction,
        help="time the gradients; default: where sizes are named, or without a GPU; not in a sweep",
    )
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it, with matplotlib")
    parser.add_argument("--commit", help="of the code, for the report; default: what git says")
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="measure nothing: show what --json wrote before"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for."""
    if args.read is not None:
        report = _read(args.read)
        make_room("--json", args.json)
        _tell(args, report, [])
        return 0
    sweeps = _sweeps(args)
    for options in sweeps:
        options.check(ranks_here(args.ranks))
    make_room("--json", args.json)
    make_room("--plot", args.plot)
    check_matplotlib(args.plot)
    ran = on_ranks(bench.measure, args.ranks, *sweeps, device=args.device)
    measured = ran.values[0]
    if not measured["records"]:
        if ran.speaks:
            print(f"hybrid-ep bench: {'; '.join(measured['skipped'])}", file=sys.stderr)
        return 1
    if not ran.speaks:
        return 0
    machine = describe_machine(args.device, len(ran.values), args.commit)
    report = {**machine, **measured}
    _tell(args, report, report.pop("skipped"))
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--read must name a file that --json wrote: {error}") from None
    known = ("records", "ceilings", "device", "num_gpus", "commit")
    if not isinstance(report, dict) or not all(key in report for key in known):
        raise ValueError(f"--read must name a file that --json wrote, got {path}")
    return report


def _tell(args: argparse.Namespace, report: dict[str, Any], skipped: list[str]) -> None:
    print_table(report, skipped)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot is not None:
        drawn = plot(report, args.plot)
        print(f"wrote {args.plot}" if drawn else "nothing to plot: no SMs or tokens were swept")


def _sweeps(args: argparse.Namespace) -> tuple[bench.Options, ...]:
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    asked = {name: tuple(given) for name in _DEFAULTS if (given := getattr(args, name)) is not None}
    sizes = {**_DEFAULTS, **bench.SWEEPS.get(args.sweep, {}), **asked}
    if on_gpu and "hidden" not in asked:
        sizes["hidden"] = (7168,)
    options = bench.Options(
        backends=tuple(args.backend.split(",")),
        **sizes,
        sizings=tuple(args.sizing),
        align=args.align,
        weighted=args.weighted,
        iters=args.iters,
        warmup=args.warmup,
    )
    backward = False if args.sweep and args.backward is None else args.backward
    sweeps = bench.gpu_sweeps(options) if on_gpu and not (asked or args.sweep) else (options,)
    if backward is not None:
        sweeps = tuple(replace(each, backward=backward) for each in sweeps)
    return sweeps
