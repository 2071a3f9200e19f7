"""Check on this machine that dispatch and combine do what they promise.

Starts its own ranks, or uses torchrun's. One line a property; the last line counts them. The line
of one that fails says on which ranks and what was seen there; then the exit code is 1.

    hybrid-ep check
    torchrun --nproc-per-node 8 -m hybrid_ep check
"""

from __future__ import annotations

import argparse
import functools

import torch

from hybrid_ep import check
from hybrid_ep.buffer import BACKENDS
from hybrid_ep.launch import on_ranks, ranks_here
from hybrid_ep.topology import Topology

HELP = "check dispatch and combine on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--ranks", type=int, help="default: the GPUs, else 4")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--ranks-per-node", type=int, help="default: all ranks are one node")


def run(args: argparse.Namespace) -> int:
    """Check and print; 1 if a property fails, ValueError where an option breaks a rule."""
    num_ranks = ranks_here(args.ranks)
    Topology(0, num_ranks, num_ranks if args.ranks_per_node is None else args.ranks_per_node)
    ran = on_ranks(_on_rank, args.ranks, args.backend, args.ranks_per_node, device=args.device)
    return 0 if ran.values[0].ok else 1


def _on_rank(device: torch.device, backend: str, ranks_per_node: int | None) -> check.CheckResult:
    return check.run(
        backend=backend,
        device=device,
        ranks_per_node=ranks_per_node,
        report=functools.partial(print, flush=True),
    )
