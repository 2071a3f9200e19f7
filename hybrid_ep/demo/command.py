"""Train a small mixture-of-experts transformer on this machine, communication included.

Starts its own ranks (the GPUs there are, else 4 on the CPU), compares the distributed layer with
plain arithmetic on one process, then trains on text that every machine has: the sources of Python's
standard library, byte by byte. Shows the loss, the share of time that dispatch and combine take,
and the load of the experts. The batch and every seed are the same for any number of ranks and any
backend, so two runs can be compared: --json writes what they did.

    hybrid-ep demo --backend torch --json torch.json --plot torch.png
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from hybrid_ep.buffer import BACKENDS
from hybrid_ep.demo.model import HIDDEN, LAYERS, NUM_EXPERTS, SEQUENCE, TOPK
from hybrid_ep.demo.picture import plot
from hybrid_ep.demo.report import ranks, show_load, summary
from hybrid_ep.demo.text import standard_library_files
from hybrid_ep.demo.training import BATCH, check_and_train
from hybrid_ep.launch import default_num_ranks, run_ranks
from hybrid_ep.output.files import check_matplotlib, check_writable

HELP = "train a small MoE transformer here and show what communication costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``demo``."""
    parser.add_argument("--ranks", type=int, help="processes; default: the GPUs, else 4")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (default 120)")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw loss and load, e.g. a .png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses, times and load")


def run(args: argparse.Namespace) -> int:
    """Check, train, report; returns 0, or 1 where the layer is wrong or the loss did not fall."""
    num_ranks = _checked_ranks(args)
    standard_library_files()  # their absence should show before any process starts
    began = time.monotonic()
    print(
        f"{ranks(num_ranks)}, {LAYERS} layers of {NUM_EXPERTS} experts, top-{TOPK}, hidden "
        f"{HIDDEN}, {BATCH} x {SEQUENCE} bytes a step; starting them",
        flush=True,
    )
    report = run_ranks(check_and_train, num_ranks, args.backend, args.steps, device=args.device)[0]
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    if not report.layer_equal:
        print("demo: the distributed layer differs from one process: not training with it")
        return 1
    show_load(report)
    if args.plot:
        plot(report, args.plot)
        print(f"picture: {args.plot}")
    print(summary(report, time.monotonic() - began))
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
    for flag, path in (("--plot", args.plot), ("--json", args.json)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{flag} must name a file in a folder that exists, got {path}")
        check_writable(flag, path)
    check_matplotlib(args.plot)
    return num_ranks
