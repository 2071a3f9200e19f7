"""Runs ``hybrid-ep plan``; ``hybrid_ep_cli.plan`` has its options."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from hybrid_ep.backends.cuda.nvshmem import refuse_too_few_sms
from hybrid_ep.config import Config
from hybrid_ep.layout.network_window import Window
from hybrid_ep.output.files import check_report, tell
from hybrid_ep.output.tables import Rows, in_bytes, print_table
from hybrid_ep.plan import scaling_tables
from hybrid_ep.plan.plan import UNCONFIRMED, Phase, Plan, make_plan
from hybrid_ep.plan.random_load import Traffic
from hybrid_ep.plan.scaling import WeakScaling, deepseek_v3
from hybrid_ep.plan.scaling_tables import Pair
from hybrid_ep.shape import DTYPES, Shape, default_scale_bytes, dtype_name

NODE_LIMIT = 4  # DeepSeek-V3's, of the tables of several nodes
SIZES = ("ranks", "tokens", "hidden", "experts", "topk")


def run(args: argparse.Namespace) -> int:
    """Print a plan or the tables of several nodes; ValueError where one breaks a rule."""
    if args.scaling or args.simulate:
        return _several_nodes(args)
    plan = _one_plan(args)
    check_report(args.json)
    gpus = [_in_memory(plan, *gpu) for gpu in args.gpu or args.known_gpus]
    report = {**plan.as_dict(), "gpus": gpus}
    tell(args.json, report, lambda: _print_plan(plan, gpus))
    return 0


def _one_plan(args: argparse.Namespace) -> Plan:
    missing = [f"--{name}" for name in SIZES if getattr(args, name) is None]
    if missing:
        raise ValueError(f"a plan must have its sizes, missing: {', '.join(missing)}")
    dtype, scale_bytes = DTYPES[args.dtype or "bf16"], args.scale_bytes
    if scale_bytes is None:
        scale_bytes = default_scale_bytes(dtype, args.hidden)
    shape = Shape(
        num_ranks=args.ranks,
        ranks_per_node=args.ranks_per_node,
        num_experts=args.experts,
        max_tokens=args.tokens,
        hidden=args.hidden,
        topk=args.topk,
        dtype=dtype,
        scale_bytes=scale_bytes,
    )
    config = _config(args)
    if shape.num_nodes > 1:
        refuse_too_few_sms(config)
    return make_plan(
        shape,
        align=args.align,
        node_limit=args.node_limit,
        config=config,
        **_given(nvlink_gbs=args.nvlink_gbs, network_gbs=args.network_gbs, num_sms=args.sms),
    )


def _config(args: argparse.Namespace) -> Config:
    """The settings meant; ValueError where no Buffer would take them."""
    return Config(
        **_given(
            num_sms_dispatch=args.sms,
            num_sms_combine=args.sms,
            network_channels=args.channels,
            network_chunk_tokens=args.chunk,
            network_window_chunks=args.window,
        )
    )


def _given(**options: Any) -> dict[str, Any]:
    """Those that were typed: the library has the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}


def _several_nodes(args: argparse.Namespace) -> int:
    if args.ranks is not None:
        raise ValueError(
            "--ranks must be left out with --scaling and --simulate, which have numbers of nodes "
            f"of their own, got {args.ranks}"
        )
    if args.gpu is not None:
        raise ValueError("--gpu must be left out with --scaling and --simulate")
    pairs, config = _pairs(args), _config(args)
    check_report(args.json)
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
    tell(args.json, {"status": UNCONFIRMED, **report}, show)
    return 0


def _pairs(args: argparse.Namespace) -> list[Pair]:
    """For each dtype the shape with uniform routing and with a node limit."""
    sizes = _given(
        max_tokens=args.tokens,
        hidden=args.hidden,
        num_experts=args.experts,
        topk=args.topk,
        scale_bytes=args.scale_bytes,
    )
    given = _given(
        ranks_per_node=args.ranks_per_node,
        nvlink_gbs=args.nvlink_gbs,
        network_gbs=args.network_gbs,
    )
    limit = NODE_LIMIT if args.node_limit is None else args.node_limit
    pairs = []
    for dtype in (args.dtype,) if args.dtype else ("bf16", "fp8"):
        scaling = WeakScaling(deepseek_v3(dtype=DTYPES[dtype], **sizes), **given)
        pairs.append((scaling, replace(scaling, node_limit=limit)))
    return pairs


def _in_memory(plan: Plan, name: str, gb: float) -> dict[str, Any]:
    """What the library takes of a GPU's memory: symmetric, a handle, and dispatch's output rows."""
    fixed = plan.symmetric_bytes + plan.handle_bytes
    expected, worst = (fixed + r * plan.row_bytes for r in (plan.rows.expected, plan.rows.worst))
    memory = gb * 1e9
    return {
        "gpu": name,
        "memory_bytes": memory,
        "expected_bytes": expected,
        "worst_bytes": worst,
        "fits_expected": expected <= memory,
        "fits_worst": worst <= memory,
    }


def _print_plan(plan: Plan, gpus: list[dict[str, Any]]) -> None:
    shape, dtype = plan.shape, dtype_name(plan.shape.dtype)
    limit = "" if plan.node_limit is None else f", at most {plan.node_limit} nodes per token"
    scales = f" and {shape.scale_bytes} bytes of scales" if shape.scale_bytes else ""
    print(
        f"{_count(shape.num_ranks, 'rank')} in {_count(shape.num_nodes, 'node')} of "
        f"{shape.ranks_per_node}, {shape.num_experts:,} experts "
        f"({shape.num_local_experts:,} per rank), top-{shape.topk}{limit}\n"
        f"{shape.max_tokens:,} tokens per rank and call, hidden {shape.hidden:,} in {dtype}"
        f"{scales}\n"
        "per rank; kB, MB, GB = 1e3, 1e6, 1e9 bytes; expected: experts drawn uniformly at random\n"
    )
    if plan.status:
        print(f"{plan.status}\n")
    model = "model: " if plan.status else ""
    print_table("memory", ("what", "size", "note"), _memory(plan))
    print_table(
        "in the memory of a GPU: symmetric memory, a live handle and the output rows of a dispatch",
        ("GPU", "memory", "with expected rows", "with the worst rows"),
        [_fits(gpu) for gpu in gpus],
    )
    print_table("fan-out", ("what", "expected", "worst"), _fan_out(plan))
    for name, phase in (("dispatch", plan.dispatch), ("combine", plan.combine)):
        print_table(
            f"{model}{name}: traffic of a call, {phase.row_bytes:,} bytes per row on the wire",
            ("link", "expected, each way", "worst sent", "worst received"),
            _traffic(plan, phase),
        )
        print_table(
            f"{model}{name}: floors of its time, from the expected bytes",
            ("limit", "bytes", "rate", "at least"),
            _floors(phase),
        )
        if phase.balance_gbs is not None:
            print(
                f"With a network card of {phase.balance_gbs:,.0f} GB/s both sides would take as "
                "long: below, the network is the longer\none, above, NVLink.\n"
            )
    if plan.beyond:
        backend = "nvlink" if plan.shape.num_nodes == 1 else "nvshmem"
        print(f"The {backend} backend cannot run this: {'; '.join(plan.beyond)}.")
    if plan.window is not None:
        print_table("network", ("what", "size", "note"), _window(plan.window))


def _memory(plan: Plan) -> Rows:
    notes = {
        "outbox": "tokens that others pull, 2 calls",
        "routing_inbox": "the peers' top-k, 2 calls",
        "inbox": "sums that other ranks return",
        "calls": "which verb each rank makes",
        "sum_flags": "which sums have arrived",
        "value_inbox": "gradients of weights that other ranks return",
        "relay_window": "tokens from rail peers, until my node has pulled them",
        "push_window": "sums of my node's ranks, on their way to rail peers",
        "push_values": "gradients of weights beside them",
        "outgoing": "sums of my node, until they are at home",
        "home_window": "sums of each node for my tokens",
        "slot_flags": "which slot of a window is full, read or free",
        "push_free_flags": "and of the push window",
        "pushed_flags": "which sums my node's ranks have pushed",
        "summed_flags": "which sums of other nodes have arrived",
        "rail_flags": "whose routing has come, and whom rail peers waited for in vain",
    }
    backend = "nvshmem" if plan.shape.num_nodes > 1 else "nvlink"
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
            "for comparison: a receive buffer of tokens x ranks rows",
        ),
    ]


def _fits(gpu: dict[str, Any]) -> tuple[str, ...]:
    def told(name: str) -> str:
        fits = "fits" if gpu[f"fits_{name}"] else "does not fit"
        share = gpu[f"{name}_bytes"] / gpu["memory_bytes"]
        return f"{fits}: {in_bytes(gpu[f'{name}_bytes'])}, {share:.1%}"

    return gpu["gpu"], in_bytes(gpu["memory_bytes"]), told("expected"), told("worst")


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
        ("ranks per token", f"{plan.copies.expected:.3f}", f"{plan.copies.worst:,}"),
        ("nodes per token", f"{plan.nodes.expected:.3f}", f"{plan.nodes.worst:,}"),
        ("rows of dispatch's output", f"{plan.rows.expected:,.0f}", f"{plan.rows.worst:,}"),
    ]


def _traffic(plan: Plan, phase: Phase) -> Rows:
    def row(link: str, traffic: Traffic) -> tuple[str, ...]:
        volumes = (traffic.expected, traffic.worst_sent, traffic.worst_received)
        return (link, *map(in_bytes, volumes))

    rows = [row("NVLink", phase.nvlink)]
    if plan.shape.num_nodes > 1:
        rows.append(row("network, once per node", phase.network))
        rows.append(row("network if once per rank", phase.network_without_dedup))
        rows.append(row("network if once per expert", phase.network_once_an_expert))
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
