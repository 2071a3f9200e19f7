"""Time dispatch and combine here, beside plain torch's and what the hardware carries.

Starts its own ranks, or uses torchrun's. Every option that takes several values is measured for
each. On GPUs without any size named: a sweep of less than a minute at T 4096, H 7168, K 8.
GB/s counts what leaves a rank: a token once per other rank that has one of its experts.

    hybrid-ep bench --tokens 1024 4096 --sms 16 24 32 48 --json bench.json --plot bench.png
    hybrid-ep bench --sweep tokens
    hybrid-ep bench --backend torch --group cpu:gloo,cuda:nccl    the torch backend over NCCL
    hybrid-ep bench --layer --shape deepseek-v3 mixtral           a whole MoE layer
    hybrid-ep bench --overlap --sms 16 24 48                      beside matrix products

--layer times forward, backward and a training step (SGD of the router and the experts) of a MoE
layer: on the library, in plain torch over NCCL or gloo, and its experts without communication. A
named shape has as many experts per rank as the model has on 8 ranks; without one, --hidden, --ffn,
--experts and --topk are the sizes.

--overlap times a dispatch and a combine on a stream of high priority beside matrix products on
another stream, on GPUs: each alone, and both at once, where the products run on all SMs or on those
that communication leaves.

The JSON: device, num_gpus, commit, command, ceilings (GB/s: memory_copy_gbps, peer_copy_gbps, and
pull_gbps and push_gbps by the number of SMs), and records: op, backend (all_to_all is the bare one,
nccl or gloo all of it in plain torch), mode, direction, sizing, max_rows (the bound: what the
largest rank needs, rounded up to 128), ranks, tokens, hidden, experts, topk, dtype, skew, align,
weighted, sms (of publish, pull and the sums alike), us_median, us_min, us_max (of the slowest rank
in each iteration), us_fastest_rank (median of the fastest rank), rank_spread_us (medians of the
fastest and of the slowest rank), host_us (of a call among others, where the host does not wait) and
host_us_after_idle (of the timed calls), kernels_us, phases_us (by phase), phase_begins_us (where
each begins in the call) and sms_occupied (how many SMs any kernel of the call ran on, so also
routing's two short ones, which have grids of their own; these four of nvlink alone, from other
calls, which note time stamps; the slowest rank, begins of the earliest one; medians),
rows (largest rank), nvlink_bytes (busiest rank, one direction, mean of the input sets), gbps,
ceiling_gbps (pull for dispatch, push for combine, at these SMs; where there is none, of the peer
copy, or of the bare all_to_all), ceiling_fraction, ratio_to_all_to_all (of time).

The JSON of --layer: device, num_gpus, commit, command, and layers: shape, tokens, hidden,
ffn_hidden, experts, topk, dtype, ranks, weight_at, way (the backend; nccl or gloo: plain torch;
experts: without communication; products: their matrix products alone), pass (forward, backward,
step), sizing, max_rows, sms, us_median, us_min, us_max, us_fastest_rank, communication_share (of
the time, beyond the experts alone), tflops (of the experts' products, per rank), peak_bytes (of
forward and backward, beyond tokens and weights; largest rank), rows (largest rank).

The JSON of --overlap: device, num_gpus, commit, command, and overlaps: ranks, tokens, hidden,
experts, topk, dtype, skew, gemm (M, K, N), gemms (how many), way (the backend; all_to_all: NCCL's
of the same copies, once for dispatch and once for combine), sms (num_sms of the calls), total_sms
(of the GPU), product_sms (all, or rest: the products leave sms free), products_alone_us,
communication_alone_us, communication_us and products_us (ends of both, started at once), both_us
(the later), hidden_part (of the shorter: what costs no time), allowed_part (the most that SM time
allows to hide), hidden_of_allowed. Times are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybrid_ep_cli.options import (
    BACKENDS,
    DTYPES,
    add_align,
    add_commit,
    add_count,
    add_device,
    add_files,
    add_ranks,
)

HELP = "time dispatch and combine on this machine"

GROUPS, UNNAMED = ("gloo", "nccl", "cpu:gloo,cuda:nccl"), "unnamed"
SWEEPS = ("tokens",)
SIZINGS = ("exact", "max_rows")
SHAPES = ("deepseek-v3", "qwen3-235b", "qwen3-30b", "mixtral")
WEIGHT_PLACES = ("combine", "activation")
SIZES = {
    "tokens": "4096",
    "hidden": "1024, on GPUs 7168",
    "experts": "256",
    "topk": "8",
    "sms": "16 32 48",
}


WHAT = {
    "tokens": "tokens per rank in a call",
    "hidden": "elements of a token",
    "experts": "experts over all ranks",
    "topk": "experts of a token",
    "sms": "SMs of each phase",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--sweep",
        choices=SWEEPS,
        help="tokens: 1k to 32k tokens of one shape, and the fixed part of the time; sizes may be "
        "named too (default: no sweep)",
    )
    parser.add_argument(
        "--layer",
        action="store_true",
        help="time a whole MoE layer: forward, backward and step (default: dispatch and combine)",
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        choices=SHAPES,
        help="with --layer: the layers of these models (default: deepseek-v3 on GPUs, else the "
        "sizes)",
    )
    told = "with --layer: inner size of an expert (default: 256)"
    add_count(parser, "ffn", told, nargs="+")
    parser.add_argument(
        "--weight-at",
        choices=WEIGHT_PLACES,
        help="with --layer: where the weights of a token's experts enter (default: combine)",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="time dispatch and combine beside matrix products on another stream (default: alone)",
    )
    told = "with --overlap: sizes of a product (default: 4096 7168 4096)"
    add_count(parser, "gemm", told, nargs=3, metavar=("M", "K", "N"))
    add_count(parser, "gemms", "with --overlap: products in the stream (default: 8)")
    add_ranks(parser)
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="NAME[,NAME]",
        help=f"of {', '.join(BACKENDS)}; one or several (default: auto)",
    )
    add_device(parser)
    parser.add_argument(
        "--group",
        choices=(*GROUPS, UNNAMED),
        default=GROUPS[0],
        help="what init_process_group gets, which carries the torch backend's rows; "
        f"{UNNAMED}: nothing (default: {GROUPS[0]})",
    )
    for name, default in SIZES.items():
        add_count(parser, name, f"{WHAT[name]} (default: {default})", nargs="+")
    parser.add_argument(
        "--dtype",
        nargs="+",
        dest="dtypes",
        choices=DTYPES,
        help="dtypes of dispatch (default: bf16, on GPUs without any size named also fp8)",
    )
    parser.add_argument(
        "--sizing",
        nargs="+",
        default=list(SIZINGS),
        choices=SIZINGS,
        help="exact: the host waits for the number of rows; max_rows: a bound (default: both)",
    )
    parser.add_argument(
        "--skew",
        type=float,
        nargs="+",
        metavar="X",
        help="exponents of a Zipf law of the experts' load (default: 0, which is uniform)",
    )
    add_align(parser)
    parser.add_argument(
        "--weighted", action="store_true", help="combine with weights (default: without)"
    )
    parser.add_argument(
        "--backward",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time the gradients, too (default: they are timed)",
    )
    add_count(parser, "iters", "timed iterations (default: 20)", default=20)
    add_count(parser, "warmup", "iterations before them (default: 5)", default=5)
    add_files(parser, json="the report", plot="it")
    add_commit(parser, "the report")
    parser.add_argument(
        "--details",
        action="store_true",
        help="also print a line per call, with its spread, host time, rate and phases "
        "(default: the medians alone)",
    )
    parser.add_argument(
        "--read",
        type=Path,
        metavar="FILE",
        help="measure nothing: show what --json wrote before (default: measure)",
    )
