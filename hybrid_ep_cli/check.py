"""Check on this machine that dispatch and combine do what they promise.

Starts its own ranks, or uses torchrun's. One line a property; the last line counts them. The line
of one that fails says on which ranks and what was seen there; then the exit code is 1.

    hybrid-ep check
    torchrun --nproc-per-node 8 -m hybrid_ep check
"""

from __future__ import annotations

import argparse

from hybrid_ep_cli.options import BACKENDS, add_device, add_ranks

HELP = "check dispatch and combine on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_ranks(parser)
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    add_device(parser)
    parser.add_argument("--ranks-per-node", type=int, help="default: all ranks are one node")
