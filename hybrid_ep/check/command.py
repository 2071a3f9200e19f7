"""Runs ``hybrid-ep check``; ``hybrid_ep_cli.check`` has its options."""

from __future__ import annotations

import argparse
import functools

import torch

from hybrid_ep import check
from hybrid_ep.check.case import shape_of
from hybrid_ep.launch import on_ranks, ranks_here


def run(args: argparse.Namespace) -> int:
    """Check and print; 1 if a property fails, ValueError where an option breaks a rule."""
    num_ranks = ranks_here(args.ranks)
    shape_of(num_ranks, args.ranks_per_node)  # a rule is broken before any rank is started
    ran = on_ranks(_on_rank, args.ranks, args.backend, args.ranks_per_node, device=args.device)
    return 0 if ran.values[0].ok else 1


def _on_rank(device: torch.device, backend: str, ranks_per_node: int | None) -> check.CheckResult:
    return check.run(
        backend=backend,
        device=device,
        ranks_per_node=ranks_per_node,
        report=functools.partial(print, flush=True),
    )
