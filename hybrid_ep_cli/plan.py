"""Memory, traffic and lower bounds of time of a configuration; needs no GPU and no other rank.

Expected values are means over routings that draw each token's experts uniformly at random; worst
values hold for any routing. kB, MB and GB are 1e3, 1e6 and 1e9 bytes.

  hybrid-ep plan --ranks 64 --ranks-per-node 8 --tokens 4096 --hidden 7168 --experts 256 --topk 8
  hybrid-ep plan --scaling     dispatch of DeepSeek-V3 on 8 to 1,024 ranks: bytes, floors of time
  hybrid-ep plan --simulate    its chunks across 2, 4 and 8 nodes: time, overlap, credits needed

These two take the sizes given and DeepSeek-V3's for the others, in bf16 and in fp8 (with a scale of
4 bytes for 128 values), with uniform routing and with a node limit (4). No network was available
to measure several nodes on: what is said of them is a model, and the output says so.
"""

from __future__ import annotations

import argparse

from hybrid_ep_cli.options import DTYPES

HELP = "memory, traffic and lower bounds of time of a configuration, without a GPU"

SIZES = {
    "ranks": "ranks of the group",
    "tokens": "tokens of a rank in one call",
    "hidden": "elements of a token",
    "experts": "experts over all ranks",
    "topk": "distinct experts of a token",
}
ASSUMED_US = {
    "network-latency": (5.0, "latency of the network"),
    "nvlink-latency": (2.0, "latency of NVLink"),
    "put": (0.1, "time of the network card per put and signal"),
    "pass-on": (2.0, "time until a node's other ranks hear of a chunk"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    tables = parser.add_argument_group("tables of several nodes, in place of one plan")
    tables.add_argument(
        "--scaling", action="store_true", help="traffic of dispatch on 1 to 128 nodes (of 8 ranks)"
    )
    tables.add_argument(
        "--simulate",
        action="store_true",
        help="model the chunks across 2, 4 and 8 nodes; no measurement has confirmed the model",
    )
    sizes = parser.add_argument_group("sizes, the first five required for one plan")
    for name, what in SIZES.items():
        sizes.add_argument(f"--{name}", type=int, help=what)
    sizes.add_argument(
        "--ranks-per-node", type=int, help="ranks of a node (default: all; 8 in the tables)"
    )
    sizes.add_argument("--dtype", choices=DTYPES, help="of dispatch (default: bf16)")
    sizes.add_argument(
        "--scale-bytes",
        type=int,
        help="bytes of scales per token (default: a float32 for each 128 values of fp8, else 0)",
    )
    sizes.add_argument("--align", type=int, default=1, help="pad each expert's rows to a multiple")
    sizes.add_argument("--node-limit", type=int, help="most nodes that a token's experts lie on")
    window = parser.add_argument_group("settings of Config, for several nodes")
    window.add_argument(
        "--channels",
        type=int,
        help="network_channels: queue pairs to each rail peer",
    )
    window.add_argument(
        "--chunk",
        type=int,
        help="network_chunk_tokens: tokens sent with one signal",
    )
    window.add_argument(
        "--window",
        type=int,
        help="network_window_chunks: chunks under way at once",
    )
    rates = parser.add_argument_group("rates, per rank and direction")
    rates.add_argument("--nvlink-gbs", type=float, metavar="GB/S")
    rates.add_argument("--network-gbs", type=float, metavar="GB/S")
    for name, (us, what) in ASSUMED_US.items():
        rates.add_argument(
            f"--{name}-us",
            type=float,
            default=us,
            metavar="US",
            help=f"for --simulate: {what}; an assumption (default: {us:g})",
        )
    rates.add_argument("--sms", type=int, help="SMs of a phase")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the plan as JSON to FILE; without FILE to stdout, instead of the tables",
    )
