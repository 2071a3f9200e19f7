"""Runs ``hybrid-ep bench``; ``hybrid_ep_cli.bench`` has its options."""

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

_UNNAMED = "unnamed"  # of --group
_DEFAULTS: dict[str, Any] = {
    "tokens": (4096,),
    "hidden": (1024,),
    "experts": (256,),
    "topk": (8,),
    "sms": (16, 32, 48),
    "dtypes": ("bf16",),
    "skew": (0.0,),
}


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
    group = None if args.group == _UNNAMED else args.group
    ran = on_ranks(bench.measure, args.ranks, *sweeps, device=args.device, group=group)
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
