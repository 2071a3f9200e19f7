"""Memory, traffic and lower bounds of time of a configuration; needs no GPU and no other rank.

Expected values are means over routings that draw each token's experts uniformly at random; worst
values hold for any routing. kB, MB and GB are 1e3, 1e6 and 1e9 bytes.

  hybrid-ep plan --ranks 64 --ranks-per-node 8 --tokens 4096 --hidden 7168 --experts 256 --topk 8
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hybrid_ep import network_window
from hybrid_ep import plan as plans
from hybrid_ep.config import Config
from hybrid_ep.network_window import Window
from hybrid_ep.plan import Phase, Plan, Traffic, make_plan

HELP = "memory, traffic and lower bounds of time of a configuration, without a GPU"

STDOUT = "-"
Rows = Sequence[Sequence[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--ranks", type=int, required=True, help="ranks of the group")
    sizes.add_argument("--ranks-per-node", type=int, help="ranks of a node (default: one node)")
    sizes.add_argument("--tokens", type=int, required=True, help="tokens of a rank in one call")
    sizes.add_argument("--hidden", type=int, required=True, help="elements of a token")
    sizes.add_argument("--experts", type=int, required=True, help="experts over all ranks")
    sizes.add_argument("--topk", type=int, required=True, help="distinct experts of a token")
    sizes.add_argument("--dtype", choices=plans.ITEMSIZE, default="bf16", help="of dispatch")
    sizes.add_argument("--scale-bytes", type=int, default=0, help="bytes of scales per token")
    sizes.add_argument("--align", type=int, default=1, help="pad each expert's rows to a multiple")
    sizes.add_argument("--node-limit", type=int, help="most nodes that a token's experts lie on")
    window = parser.add_argument_group("windows of the network, for several nodes")
    window.add_argument(
        "--channels",
        type=int,
        default=network_window.NETWORK_CHANNELS,
        help="queue pairs to each rail peer",
    )
    window.add_argument(
        "--chunk",
        type=int,
        default=network_window.NETWORK_CHUNK_TOKENS,
        help="tokens sent with one signal",
    )
    window.add_argument(
        "--window",
        type=int,
        default=network_window.NETWORK_WINDOW_CHUNKS,
        help="chunks under way at once",
    )
    rates = parser.add_argument_group("rates, per rank and direction")
    rates.add_argument("--nvlink-gbs", type=float, default=plans.NVLINK_GBS, metavar="GB/S")
    rates.add_argument("--network-gbs", type=float, default=plans.NETWORK_GBS, metavar="GB/S")
    rates.add_argument("--sms", type=int, default=Config.num_sms_dispatch, help="SMs of a phase")
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the plan as JSON to FILE; without FILE to stdout, instead of the tables",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan; ValueError where it breaks a rule."""
    plan = make_plan(
        num_ranks=args.ranks,
        ranks_per_node=args.ranks_per_node,
        max_tokens=args.tokens,
        hidden=args.hidden,
        num_experts=args.experts,
        topk=args.topk,
        dtype=args.dtype,
        scale_bytes=args.scale_bytes,
        align=args.align,
        nvlink_gbs=args.nvlink_gbs,
        network_gbs=args.network_gbs,
        num_sms=args.sms,
        node_limit=args.node_limit,
        channels=args.channels,
        chunk_tokens=args.chunk,
        window_chunks=args.window,
    )
    text = json.dumps(plan.as_dict(), indent=2) + "\n"
    if args.json == STDOUT:
        sys.stdout.write(text)
        return 0
    _print_plan(plan)
    if args.json is not None:
        try:
            Path(args.json).write_text(text)
        except OSError as error:
            raise ValueError(f"--json must name a file that can be written: {error}") from error
        print(f"written to {args.json}")
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
    if plan.beyond_nvlink:
        print(f"The nvlink backend cannot run this: {'; '.join(plan.beyond_nvlink)}.")
    if plan.window is not None:
        print_table("network, as designed", ("what", "size", "note"), _window(plan.window))
        print(
            "Several nodes: symmetric memory is the part within a node; the network backend, whose "
            "windows\nwould add to it, is not part of this version."
        )


def _memory(plan: Plan) -> Rows:
    notes = {
        "outbox": "tokens that others pull, 2 calls",
        "routing_inbox": "the peers' top-k, 2 calls",
        "inbox": "reduced rows that come home",
        "value_inbox": "gradients of weights that come home",
        "flags": "",
    }
    one_node = " (nvlink, one node)" if plan.num_nodes > 1 else " (nvlink)"
    return [
        *(
            (name.replace("_", " "), _bytes(size), notes.get(name, ""))
            for name, size in plan.regions.items()
        ),
        ("symmetric memory", _bytes(plan.symmetric_bytes), f"sum of the above{one_node}"),
        ("live handle", _bytes(plan.handle_bytes), "each, nvlink backend"),
        ("live handle", _bytes(plan.torch_layout_bytes), "each, torch backend"),
        (
            "output rows",
            _bytes(plan.rows.expected * plan.row_bytes),
            f"expected; worst {_bytes(plan.rows.worst * plan.row_bytes)}",
        ),
        ("a push design", _bytes(plan.push_bytes), "its receive buffer, tokens x ranks; not ours"),
    ]


def _window(window: Window) -> Rows:
    return [
        ("queue pairs", f"{window.queue_pairs:,}", f"{window.channels} to each rail peer"),
        (
            "queue depth",
            f"{window.queue_depth:,}",
            f"for {window.entries:,} entries; the tokens of a call do not matter",
        ),
        ("windows", _bytes(window.num_bytes), "what is under way to a rank"),
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
        return (link, *map(_bytes, volumes))

    rows = [row("NVLink", phase.nvlink)]
    if plan.num_nodes > 1:
        rows.append(row("network, once a node", phase.network))
        rows.append(row("network if once a rank", phase.network_without_dedup))
    return rows


def _floors(phase: Phase) -> Rows:
    return [
        (
            bound.limit,
            _bytes(bound.num_bytes),
            f"{bound.gbs:,.0f} GB/s",
            f"{bound.us:,.0f} us" + (" <- dominates" if bound == phase.dominant else ""),
        )
        for bound in phase.bounds
    ]


def print_table(title: str, header: Sequence[str], rows: Rows) -> None:
    """Print a table: by rich where that is installed and a person looks on, else as plain text."""
    if sys.stdout.isatty():
        try:
            _print_rich(title, header, rows)
            return
        except ImportError:
            pass
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    print(title)
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())
    print()


def _print_rich(title: str, header: Sequence[str], rows: Rows) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f} B"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
