"""Check on this machine that dispatch and combine do what they promise.

Starts its own ranks, or uses torchrun's. One line per property; the last line counts them. The line
of one that fails says on which ranks and what was seen there; then the exit code is 1.

    hybrid-ep check
    torchrun --nproc-per-node 8 -m hybrid_ep check
"""

from __future__ import annotations

import argparse

from hybrid_ep_cli.options import add_backend, add_count, add_device, add_ranks

HELP = "check dispatch and combine on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_ranks(parser)
    add_backend(parser)
    add_device(parser)
    told = "ranks of a node, a divisor of the number of ranks (default: all ranks of a host)"
    add_count(parser, "ranks-per-node", told)
