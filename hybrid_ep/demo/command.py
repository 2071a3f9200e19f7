"""Runs ``hybrid-ep demo``; ``hybrid_ep_cli.demo`` has its options."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from hybrid_ep.demo.model import HIDDEN, LAYERS, NUM_EXPERTS, SEQUENCE, TOPK
from hybrid_ep.demo.picture import plot
from hybrid_ep.demo.report import Report, ranks, show_load, summary
from hybrid_ep.demo.text import standard_library_files
from hybrid_ep.demo.training import BATCH, check_and_train
from hybrid_ep.launch import default_num_ranks, run_ranks
from hybrid_ep.output.files import check_report, keep, make_room_for_plot, text_beside


def run(args: argparse.Namespace) -> int:
    """Check, train, report; returns 0, or 1 where the layer is wrong or the loss did not fall."""
    num_ranks = _checked_ranks(args)
    standard_library_files()  # their absence should show before any process starts
    began = time.monotonic()
    with text_beside(args.json):
        print(
            f"{ranks(num_ranks)}, {LAYERS} layers of {NUM_EXPERTS} experts, top-{TOPK}, hidden "
            f"{HIDDEN}, {BATCH} x {SEQUENCE} bytes per step; starting them",
            flush=True,
        )
        train = (check_and_train, num_ranks, args.backend, args.steps)
        report = run_ranks(*train, device=args.device)[0]
    keep(args.json, asdict(report))
    with text_beside(args.json):
        return _tell(report, time.monotonic() - began, args.plot)


def _tell(report: Report, seconds: float, picture: Path | None) -> int:
    if not report.layer_equal:
        print("demo: the distributed layer differs from one process: not training with it")
        return 1
    if picture is not None:
        plot(report, picture)
    show_load(report)
    if picture is not None:
        print(f"wrote {picture}")
    print(summary(report, seconds))
    return 0 if report.falling else 1


def _checked_ranks(args: argparse.Namespace) -> int:
    num_ranks = args.ranks
    if num_ranks is None:
        most = 4 if args.device == "cpu" else default_num_ranks()
        num_ranks = max(n for n in range(1, most + 1) if NUM_EXPERTS % n == 0)
    if num_ranks < 1 or NUM_EXPERTS % num_ranks:
        raise ValueError(
            f"--ranks must divide the number of experts, {NUM_EXPERTS}, got {num_ranks}"
        )
    if args.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {args.steps}")
    check_report(args.json)
    make_room_for_plot(args.plot)
    return num_ranks
