"""Memory, traffic and lower bounds of time of a configuration; needs no GPU and no other rank.

Expected values are means over routings that draw each token's experts uniformly at random; worst
values hold for any routing. kB, MB, GB and TB are 1e3, 1e6, 1e9 and 1e12 bytes.

  hybrid-ep plan --ranks 64 --ranks-per-node 8 --tokens 4096 --hidden 7168 --experts 256 --topk 8
  hybrid-ep plan --scaling     dispatch of DeepSeek-V3 on 8 to 1,024 ranks: bytes, floors of time
  hybrid-ep plan --simulate    its chunks across 2, 4 and 8 nodes: time, overlap, credits needed

These two take the sizes given and DeepSeek-V3's for the others, in bf16 and in fp8 (with a scale of
4 bytes for 128 values), with uniform routing and with a node limit (4). No network was available
to measure several nodes on: what is said of them is a model, and the output says so.
"""

from __future__ import annotations

import argparse

from hybrid_ep_cli.options import DTYPES, add_align, add_count, add_files

HELP = "memory, traffic and lower bounds of time of a configuration, without a GPU"

SIZES = {
    "ranks": ("ranks of the group", "8 to 1,024"),
    "tokens": ("tokens per rank in one call", "4096"),
    "hidden": ("elements of a token", "7168"),
    "experts": ("experts over all ranks", "256"),
    "topk": ("distinct experts of a token", "8"),
}
WINDOW = {
    "channels": "network_channels: queue pairs to each rail peer (default: 8)",
    "chunk": "network_chunk_tokens: tokens sent with one signal (default: 8)",
    "window": "network_window_chunks: chunks under way at once (default: 4)",
}
# GB (1e9 bytes) of memory, as in NVIDIA's data sheets; those that the kernels run on
GPUS = {"h100": 80.0, "h200": 141.0, "b200": 180.0, "gb200": 186.0}
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
        "--scaling",
        action="store_true",
        help="traffic of dispatch on 1 to 128 nodes of 8 ranks; a model (default: one plan)",
    )
    tables.add_argument(
        "--simulate",
        action="store_true",
        help="chunks across 2, 4 and 8 nodes; a model that no measurement has confirmed (default: "
        "one plan)",
    )
    sizes = parser.add_argument_group("sizes, the first five required for one plan")
    for name, (what, default) in SIZES.items():
        add_count(sizes, name, f"{what} (default in the tables: {default})")
    add_count(sizes, "ranks-per-node", "ranks of a node (default: all; in the tables 8)")
    sizes.add_argument(
        "--dtype", choices=DTYPES, help="dtype of dispatch (default: bf16; in the tables also fp8)"
    )
    told = "bytes of scales per token (default: a float32 for each 128 values of fp8, else 0)"
    add_count(sizes, "scale-bytes", told)
    add_align(sizes)
    told = "most nodes that a token's experts lie on (default: any; in the tables also 4)"
    add_count(sizes, "node-limit", told)
    sizes.add_argument(
        "--gpu",
        type=memory_of_gpu,
        nargs="+",
        metavar="NAME",
        help=f"say whether the plan fits in the memory of these GPUs: {', '.join(GPUS)}, or its GB "
        "of 1e9 bytes (default: those with a name)",
    )
    window = parser.add_argument_group("settings of Config, for several nodes")
    for name, what in WINDOW.items():
        add_count(window, name, what)
    rates = parser.add_argument_group("rates, per rank and direction")
    rates.add_argument(
        "--nvlink-gbs",
        type=float,
        metavar="GB/S",
        help="rate of NVLink; the default was measured between two H200 (default: 330)",
    )
    rates.add_argument(
        "--network-gbs",
        type=float,
        metavar="GB/S",
        help="rate of the network card of a rank; an assumption (default: 50)",
    )
    for name, (us, what) in ASSUMED_US.items():
        rates.add_argument(
            f"--{name}-us",
            type=float,
            default=us,
            metavar="US",
            help=f"for --simulate: {what}; an assumption (default: {us:g})",
        )
    add_count(rates, "sms", "SMs of a phase (default: 32)")
    add_files(parser, json="the plan")
    parser.set_defaults(known_gpus=tuple(map(memory_of_gpu, GPUS)))


def memory_of_gpu(name: str) -> tuple[str, float]:
    """A GPU by its name, or by its memory in GB: what to call it, and GB."""
    if name.lower() in GPUS:
        return name.upper(), GPUS[name.lower()]
    try:
        gb = float(name)
    except ValueError:
        gb = 0.0
    if not 0 < gb < float("inf"):
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(GPUS)}, or a number of GB, got {name}"
        )
    return f"a GPU of {gb:g} GB", gb
