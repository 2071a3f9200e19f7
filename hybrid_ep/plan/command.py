"""Memory, traffic and lower bounds of time of a configuration; needs no GPU and no other rank.

Expected values are means over routings that draw each token's experts uniformly at random; worst
values hold for any routing. kB, MB and GB are 1e3, 1e6 and 1e9 bytes.

  hybrid-ep plan --ranks 64 --ranks-per-node 8 --tokens 4096 --hidden 7168 --experts 256 --topk 8
  hybrid-ep plan --scaling     dispatch of DeepSeek-V3 on 8 to 1,024 ranks: bytes, floors of time
  hybrid-ep plan --simulate    its chunks across 2, 4 and 8 nodes: time, overlap, credits needed

These two take the sizes given and DeepSeek-V3's for the others, in bf16 and in fp8 (with a scale of
4 bytes for 128 values), with uniform routing and with a node limit (4). No network was
there to measure the nvshmem backend on: what they say of it is a model that awaits comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_ep.config import Config
from hybrid_ep.layout.network_window import Window
from hybrid_ep.output.tables import Rows, in_bytes, print_table
from hybrid_ep.plan import pipeline_model, scaling_tables
from hybrid_ep.plan import plan as plans
from hybrid_ep.plan.plan import Phase, Plan, make_plan
from hybrid_ep.plan.random_load import Traffic
from hybrid_ep.plan.scaling import Shape
from hybrid_ep.plan.scaling_tables import Pair

HELP = "memory, traffic and lower bounds of time of a configuration, without a GPU"

STDOUT = "-"
NODE_LIMIT = 4  # DeepSeek-V3's, of the tables of several nodes
SIZES = ("ranks", "tokens", "hidden", "experts", "topk")
SIZES_HELP = (
    "ranks of the group",
    "tokens of a rank in one call",
    "elements of a token",
    "experts over all ranks",
    "distinct experts of a token",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    tables = parser.add_argument_group("tables of several nodes, in place of one plan")
    tables.add_argument(
        "--scaling", action="store_true", help="traffic of dispatch on 1 to 128 nodes (of 8 ranks)"
    )
    tables.add_argument(
        "--simulate",
        action="store_true",
        help="model the chunks across 2, 4 and 8 nodes; not yet compared with a measurement",
    )
    sizes = parser.add_argument_group("sizes, the first five required for one plan")
    for name, what in zip(SIZES, SIZES_HELP, strict=True):
        sizes.add_argument(f"--{name}", type=int, help=what)
    sizes.add_argument(
        "--ranks-per-node", type=int, help="ranks of a node (default: all; 8 in the tables)"
    )
    sizes.add_argument("--dtype", choices=plans.ITEMSIZE, help="of dispatch (default: bf16)")
    sizes.add_argument("--scale-bytes", type=int, help="bytes of scales per token (default: 0)")
    sizes.add_argument("--align", type=int, default=1, help="pad each expert's rows to a multiple")
    sizes.add_argument("--node-limit", type=int, help="most nodes that a token's experts lie on")
    window = parser.add_argument_group("settings of Config, for several nodes")
    window.add_argument(
        "--channels",
        type=int,
        default=Config.network_channels,
        help="network_channels: queue pairs to each rail peer",
    )
    window.add_argument(
        "--chunk",
        type=int,
        default=Config.network_chunk_tokens,
        help="network_chunk_tokens: tokens sent with one signal",
    )
    window.add_argument(
        "--window",
        type=int,
        default=Config.network_window_chunks,
        help="network_window_chunks: chunks under way at once",
    )
    rates = parser.add_argument_group("rates, per rank and direction")
    rates.add_argument("--nvlink-gbs", type=float, default=plans.NVLINK_GBS, metavar="GB/S")
    rates.add_argument("--network-gbs", type=float, default=plans.NETWORK_GBS, metavar="GB/S")
    for name, us, what in (
        ("network-latency", pipeline_model.NETWORK_LATENCY_US, "latency of the network"),
        ("nvlink-latency", pipeline_model.NVLINK_LATENCY_US, "latency of NVLink"),
        ("put", pipeline_model.PUT_US, "time of the network card per put and signal"),
        ("pass-on", pipeline_model.PASS_ON_US, "time until a node's other ranks hear of a chunk"),
    ):
        rates.add_argument(
            f"--{name}-us",
            type=float,
            default=us,
            metavar="US",
            help=f"for --simulate: {what}; an assumption (default: {us:g})",
        )
    rates.add_argument("--sms", type=int, default=Config.num_sms_dispatch, help="SMs of a phase")
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the plan as JSON to FILE; without FILE to stdout, instead of the tables",
    )


def run(args: argparse.Namespace) -> int:
    """Print a plan or the tables of several nodes; ValueError where one breaks a rule."""
    if args.scaling or args.simulate:
        return _several_nodes(args)
    plan = _one_plan(args)
    return _tell(args.json, plan.as_dict(), lambda: _print_plan(plan))


def _one_plan(args: argparse.Namespace) -> Plan:
    missing = [f"--{name}" for name in SIZES if getattr(args, name) is None]
    if missing:
        raise ValueError(f"a plan must have its sizes, missing: {', '.join(missing)}")
    return make_plan(
        num_ranks=args.ranks,
        ranks_per_node=args.ranks_per_node,
        max_tokens=args.tokens,
        hidden=args.hidden,
        num_experts=args.experts,
        topk=args.topk,
        dtype=args.dtype or "bf16",
        scale_bytes=args.scale_bytes or 0,
        align=args.align,
        nvlink_gbs=args.nvlink_gbs,
        network_gbs=args.network_gbs,
        num_sms=args.sms,
        node_limit=args.node_limit,
        config=_config(args),
    )


def _config(args: argparse.Namespace) -> Config:
    """The settings meant; ValueError where no Buffer would take them."""
    return Config(
        network_channels=args.channels,
        network_chunk_tokens=args.chunk,
        network_window_chunks=args.window,
    )


def _several_nodes(args: argparse.Namespace) -> int:
    if args.ranks is not None:
        raise ValueError(
            "--ranks must be left out with --scaling and --simulate, which have numbers of nodes "
            f"of their own, got {args.ranks}"
        )
    pairs, config = _pairs(args), _config(args)
    tables = {}
    if args.scaling:
        tables["scaling"] = scaling_tables.Scaling.of(pairs)
    if args.simulate:
        tables["simulation"] = scaling_tables.Simulation.of(
            pairs,
            chunk_tokens=config.network_chunk_tokens,
            credits=config.network_channels * config.network_window_chunks,
            network_latency_us=args.network_latency_us,
            nvlink_latency_us=args.nvlink_latency_us,
            put_us=args.put_us,
            pass_on_us=args.pass_on_us,
        )

    def show() -> None:
        for table in tables.values():
            table.show()

    report = {name: table.as_dict() for name, table in tables.items()}
    return _tell(args.json, {"status": scaling_tables.STATUS, **report}, show)


def _pairs(args: argparse.Namespace) -> list[Pair]:
    """For each dtype the shape with uniform routing and with a node limit."""
    options = {
        "ranks_per_node": args.ranks_per_node,
        "max_tokens": args.tokens,
        "hidden": args.hidden,
        "num_experts": args.experts,
        "topk": args.topk,
        "nvlink_gbs": args.nvlink_gbs,
        "network_gbs": args.network_gbs,
    }
    given = {name: value for name, value in options.items() if value is not None}
    limit = NODE_LIMIT if args.node_limit is None else args.node_limit
    pairs = []
    for dtype in (args.dtype,) if args.dtype else ("bf16", "fp8"):
        shape = Shape(dtype=dtype, scale_bytes=args.scale_bytes, **given)
        pairs.append((shape, replace(shape, node_limit=limit)))
    return pairs


def _tell(target: str | None, report: dict[str, Any], show: Callable[[], None]) -> int:
    """Show tables, or write JSON to stdout in their place, or both if the JSON goes to a file."""
    text = json.dumps(report, indent=2) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
        return 0
    show()
    if target is not None:
        try:
            Path(target).write_text(text)
        except OSError as error:
            raise ValueError(f"--json must name a file that can be written: {error}") from error
        print(f"written to {target}")
    return 0


def _print_plan(plan: Plan) -> None:
    limit = "" if plan.node_limit is None else f", at most {plan.node_limit} nodes a token"
    scales = f" and {plan.scale_bytes} bytes of scales" if plan.scale_bytes else ""
    print(
        f"{_count(plan.num_ranks, 'rank')} in {_count(plan.num_nodes, 'node')} of "
        f"{plan.ranks_per_node}, {plan.num_experts:,} experts "
        f"({plan.num_experts // plan.num_ranks:,} a rank), top-{plan.topk}{limit}\n"
        f"{plan.max_tokens:,} tokens a rank and call, hidden {plan.hidden:,} in {plan.dtype}"
        f"{scales}\n"
        "per rank; kB, MB, GB = 1e3, 1e6, 1e9 bytes; expected: experts drawn uniformly at random\n"
    )
    print_table("memory", ("what", "size", "note"), _memory(plan))
    print_table("fan-out", ("what", "expected", "worst"), _fan_out(plan))
    for name, phase in (("dispatch", plan.dispatch), ("combine", plan.combine)):
        print_table(
            f"{name}: traffic of a call, {phase.row_bytes:,} bytes a row on the wire",
            ("link", "expected, each way", "worst sent", "worst received"),
            _traffic(plan, phase),
        )
        print_table(
            f"{name}: floors of its time, from the expected bytes",
            ("limit", "bytes", "rate", "at least"),
            _floors(phase),
        )
        if phase.balance_gbs is not None:
            print(
                f"With a network card of {phase.balance_gbs:,.0f} GB/s both sides would take as "
                "long: below, the network is the longer\none, above, NVLink.\n"
            )
    if plan.beyond:
        backend = "nvlink" if plan.num_nodes == 1 else "nvshmem"
        print(f"The {backend} backend cannot run this: {'; '.join(plan.beyond)}.")
    if plan.window is not None:
        print_table("network", ("what", "size", "note"), _window(plan.window))


def _memory(plan: Plan) -> Rows:
    notes = {
        "outbox": "tokens that others pull, 2 calls",
        "routing_inbox": "the peers' top-k, 2 calls",
        "inbox": "sums of other ranks that come home",
        "calls": "which verb each rank makes",
        "sum_flags": "which of them have come",
        "value_inbox": "gradients of weights that come home",
        "relay_window": "tokens from rail peers, until my node has pulled them",
        "push_window": "sums of my node's ranks, on their way to rail peers",
        "push_values": "gradients of weights beside them",
        "outgoing": "sums of my node, until they are at home",
        "home_window": "sums of each node for my tokens",
        "slot_flags": "which slot of a window is full, read or free",
        "push_free_flags": "and of the push window",
        "pushed_flags": "which sums my node's ranks have pushed",
        "summed_flags": "which sums of other nodes have come",
        "rail_flags": "whose routing has come, and whom rail peers waited for in vain",
    }
    backend = "nvshmem" if plan.num_nodes > 1 else "nvlink"
    return [
        *(
            (name.replace("_", " "), in_bytes(size), notes.get(name, ""))
            for name, size in plan.regions.items()
        ),
        ("symmetric memory", in_bytes(plan.symmetric_bytes), f"sum of the above ({backend})"),
        ("live handle", in_bytes(plan.handle_bytes), f"each, {backend} backend"),
        ("live handle", in_bytes(plan.torch_layout_bytes), "each, torch backend"),
        (
            "output rows",
            in_bytes(plan.rows.expected * plan.row_bytes),
            f"expected; worst {in_bytes(plan.rows.worst * plan.row_bytes)}",
        ),
        (
            "a push design",
            in_bytes(plan.push_bytes),
            "its receive buffer, tokens x ranks; not ours",
        ),
    ]


def _window(window: Window) -> Rows:
    return [
        ("queue pairs", f"{window.queue_pairs:,}", f"{window.channels} to each rail peer"),
        (
            "queue depth",
            f"{window.queue_depth:,}",
            f"for {window.entries:,} entries; the tokens of a call do not matter",
        ),
    ]


def _fan_out(plan: Plan) -> Rows:
    return [
        ("ranks a token goes to", f"{plan.copies.expected:.3f}", f"{plan.copies.worst:,}"),
        ("nodes a token goes to", f"{plan.nodes.expected:.3f}", f"{plan.nodes.worst:,}"),
        ("rows of dispatch's output", f"{plan.rows.expected:,.0f}", f"{plan.rows.worst:,}"),
    ]


def _traffic(plan: Plan, phase: Phase) -> Rows:
    def row(link: str, traffic: Traffic) -> tuple[str, ...]:
        volumes = (traffic.expected, traffic.worst_sent, traffic.worst_received)
        return (link, *map(in_bytes, volumes))

    rows = [row("NVLink", phase.nvlink)]
    if plan.num_nodes > 1:
        rows.append(row("network, once a node", phase.network))
        rows.append(row("network if once a rank", phase.network_without_dedup))
        rows.append(row("network if once an expert", phase.network_once_an_expert))
    return rows


def _floors(phase: Phase) -> Rows:
    return [
        (
            bound.limit,
            in_bytes(bound.num_bytes),
            f"{bound.gbs:,.0f} GB/s",
            f"{bound.us:,.0f} us" + (" <- dominates" if bound == phase.dominant else ""),
        )
        for bound in phase.bounds
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
