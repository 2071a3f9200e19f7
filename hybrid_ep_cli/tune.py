"""Find numbers of SMs and a slice for a shape on the GPUs here, and write them as a Config.

Experimental: tested with made-up times and on the CPU; it has not run on a GPU yet.

Starts its own ranks, or uses torchrun's. Each setting is timed in turns with the default Config, as
`bench` times the fresh calls of exact size; x default is the median of its time over the default's.

  fastest   the least time within the budget; of equal ones (but for noise) the fewest SMs
  fewest    the fewest SMs that take at most --within times the least time

    hybrid-ep tune --tokens 4096 --hidden 7168 --experts 256 --topk 8 --out config.json

Then hybrid_ep.Buffer(..., config="config.json"), the same file on every rank.

The JSON of --json: device, num_gpus, commit, command, ranks, the shape, the goal, complete (the
search came to its end within the time), config, confirmed (dispatch and combine with the choice,
measured once more) and measured, whose records hold op, num_sms_publish, num_sms_dispatch,
num_sms_combine, slice_bytes, sms (the op is given), us_median, us_min, us_max (of the slowest
rank in each iteration), default_us_median, ratio_to_default and noise (of the ratio).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybrid_ep_cli.options import DTYPES, add_commit, add_count, add_files, add_ranks

HELP = "find SM counts and slices for a shape on these GPUs (experimental)"

SIZES = {
    "tokens": "tokens per rank in one call",
    "hidden": "elements of a token",
    "experts": "experts over all ranks",
    "topk": "distinct experts of a token",
}
AIMS = ("fastest", "fewest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_ranks(parser)
    for name, what in SIZES.items():
        add_count(parser, name, f"{what} (required)", required=True)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="dtype of dispatch (default: bf16)"
    )
    add_count(parser, "max-sms", "most SMs of a phase (default: 48)", default=48)
    parser.add_argument(
        "--aim", choices=AIMS, default="fastest", help="what to look for (default: fastest)"
    )
    parser.add_argument(
        "--within",
        type=float,
        default=1.05,
        metavar="X",
        help="with --aim fewest: at most X times the least time (default: 1.05)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="no new setting is tried after S seconds (default: 60)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="write the Config (required)"
    )
    add_files(parser, json="what was measured")
    add_commit(parser, "the files")
