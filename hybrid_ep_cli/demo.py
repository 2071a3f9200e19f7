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

from hybrid_ep_cli.options import add_backend, add_count, add_device, add_files, add_ranks

HELP = "train a small MoE transformer here and show what communication costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_ranks(parser)
    add_count(parser, "steps", "optimizer steps (default: 120)", default=120)
    add_backend(parser)
    add_device(parser)
    add_files(parser, json="losses, times and load", plot="loss and load")
