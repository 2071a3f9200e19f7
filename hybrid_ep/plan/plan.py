"""What a configuration needs, before any GPU is asked: memory, traffic, lower bounds of time.

Pure arithmetic, so it answers for 1,024 ranks on a laptop. "Expected" is the mean over routings
that draw each token's distinct experts uniformly at random, exactly (hypergeometric, no sampling);
"worst" is the most that any routing can cause. The bounds are floors set by bytes and by measured
rates (two H200 joined by NVLink): a phase cannot be faster, and may well be slower. Of several
nodes nothing was measured: a plan of them says so (``UNCONFIRMED``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hybrid_ep.backends.torch_layout import Layout as TorchLayout
from hybrid_ep.config import Config
from hybrid_ep.layout.buffer_layout import symmetric_regions
from hybrid_ep.layout.handle_layout import handle_bytes
from hybrid_ep.layout.network_window import Window, network_window
from hybrid_ep.layout.nodes_layout import nodes_handle_bytes, nodes_regions
from hybrid_ep.layout.record_layout import record_bytes
from hybrid_ep.limits import ROW_ALIGN, as_integer, beyond, check_counts, round_up
from hybrid_ep.plan.random_load import Spread, Traffic, random_load
from hybrid_ep.topology import Topology

# Said with every figure of several nodes, in tables and JSON, until a measurement confirms them.
UNCONFIRMED = (
    "Several nodes: a model that no measurement has confirmed, since no network was available."
)

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}

NVLINK_GBS = 330.0  # pull, both directions at once, any number of SMs from 16
NETWORK_GBS = 50.0  # assumed: one 400 Gbit/s card per rank
# docs/performance.md, experiments 5, 18 and 20
SM_OUTPUT_GBS = 62.0  # what one SM sends: its stores, 32 bytes a clock
LOAD_SHARE = 0.25  # of its bytes: what a load's requests take of that
SM_SUMS_GBS = 66.0  # rows that one SM adds
HBM_GBS = 4140.0  # a copy on the device, read and write counted


@dataclass(frozen=True)
class Bound:
    """A floor of a phase's time: ``num_bytes`` at ``gbs`` take ``us``; from expected bytes."""

    limit: str
    num_bytes: float
    gbs: float
    us: float


@dataclass(frozen=True)
class Phase:
    """Dispatch or combine of one call.

    Attributes:
        row_bytes: bytes that a copy takes on the wire.
        nvlink: through NVLink, a rank's own copies excluded.
        network: through the rank's network card; a token crosses once per remote node.
        network_without_dedup: the same if it crossed once per remote rank.
        network_once_an_expert: the same if it crossed once per remote expert.
        bounds: the floors of its time, all of them.
    """

    row_bytes: int
    nvlink: Traffic
    network: Traffic
    network_without_dedup: Traffic
    network_once_an_expert: Traffic
    bounds: tuple[Bound, ...]

    @property
    def dominant(self) -> Bound:
        """The bound that is highest."""
        return max(self.bounds, key=lambda bound: bound.us)

    @property
    def balance_gbs(self) -> float | None:
        """GB/s of a network card that would take as long as NVLink; None where either is idle.

        A slower card makes the network the longer side, a faster one NVLink.
        """
        us = {bound.limit: bound.us for bound in self.bounds}
        if not us.get("network") or not us["NVLink"]:
            return None
        return self.network.expected / us["NVLink"] / 1e3


@dataclass(frozen=True)
class Plan:
    """What one rank needs and moves; made by ``make_plan``.

    Attributes:
        regions: symmetric memory by region, bytes.
        handle_bytes: a live handle's layout on the nvlink backend, of several nodes on nvshmem.
        torch_layout_bytes: the same on the torch backend.
        push_bytes: the receive buffer of a library that pushes (tokens x ranks rows), to compare.
        copies: ranks that a token goes to, its own included; nodes: likewise.
        rows: rows that dispatch returns on one rank, padding included.
        row_bytes: bytes of such a row with its scales.
        beyond: the limits of that backend that the shape exceeds; empty if it fits.
        window: what is under way over the network; None with one node.
    """

    num_ranks: int
    ranks_per_node: int
    max_tokens: int
    hidden: int
    num_experts: int
    topk: int
    dtype: str
    scale_bytes: int
    align: int
    num_sms: int
    node_limit: int | None
    regions: dict[str, int]
    handle_bytes: int
    torch_layout_bytes: int
    push_bytes: int
    copies: Spread
    nodes: Spread
    rows: Spread
    row_bytes: int
    dispatch: Phase
    combine: Phase
    beyond: list[str]
    window: Window | None

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.num_ranks // self.ranks_per_node

    @property
    def status(self) -> str | None:
        """``UNCONFIRMED`` with several nodes; None with one, whose rates were measured."""
        return UNCONFIRMED if self.num_nodes > 1 else None

    @property
    def symmetric_bytes(self) -> int:
        """Symmetric memory of one rank."""
        return sum(self.regions.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields, nested ones too, and what follows from them."""
        result = {"status": self.status, **asdict(self)}
        for name in ("dispatch", "combine"):
            result[name]["dominant"] = getattr(self, name).dominant.limit
            result[name]["balance_gbs"] = getattr(self, name).balance_gbs
        return {**result, "num_nodes": self.num_nodes, "symmetric_bytes": self.symmetric_bytes}


def make_plan(
    *,
    num_ranks: int,
    max_tokens: int,
    hidden: int,
    num_experts: int,
    topk: int,
    ranks_per_node: int | None = None,
    dtype: str = "bf16",
    scale_bytes: int = 0,
    align: int = 1,
    nvlink_gbs: float = NVLINK_GBS,
    network_gbs: float = NETWORK_GBS,
    num_sms: int = Config.num_sms_dispatch,
    node_limit: int | None = None,
    config: Config | None = None,
) -> Plan:
    """Compute the plan of one rank.

    Args:
        num_ranks: ranks of the group.
        max_tokens: T, tokens that every rank dispatches.
        hidden: H, elements of a token.
        num_experts: E, over all ranks.
        topk: K, distinct experts of a token.
        ranks_per_node: ranks of a node; None for one node.
        dtype: payload of dispatch: bf16, fp16, fp32 or fp8. Combine moves at least 2 bytes a value.
        scale_bytes: bytes of scales per token.
        align: each expert's group of rows is padded to a multiple of this.
        nvlink_gbs: GB/s (1e9 bytes) of NVLink, per rank and direction.
        network_gbs: GB/s of a rank's network card and direction.
        num_sms: SMs that a phase runs on.
        node_limit: a token's experts lie on at most this many nodes (DeepSeek-V3: 4); None: any.
        config: of the Buffer; only its settings of the network are looked at. None: the defaults.

    Returns:
        Plan: in bytes, rows and microseconds.

    Raises:
        ValueError: a value breaks a rule; the text has both.
    """
    config = Config() if config is None else config
    ranks_per_node = num_ranks if ranks_per_node is None else ranks_per_node
    check_counts(
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        max_tokens=max_tokens,
        hidden=hidden,
        num_experts=num_experts,
        topk=topk,
        align=align,
        num_sms=num_sms,
    )
    num_nodes = Topology(0, num_ranks, ranks_per_node).num_nodes
    nodes_allowed = num_nodes if node_limit is None else node_limit
    check_counts(node_limit=nodes_allowed)
    nodes_allowed = min(nodes_allowed, num_nodes)
    _check_sizes(num_ranks, hidden, num_experts, topk, dtype, scale_bytes)
    reachable = num_experts // num_nodes * nodes_allowed
    if topk > reachable:
        raise ValueError(
            f"topk must be at most the experts of node_limit={nodes_allowed} nodes, {reachable}, "
            f"got {topk}"
        )
    for name, gbs in (("nvlink_gbs", nvlink_gbs), ("network_gbs", network_gbs)):
        if not 0 < gbs < float("inf"):
            raise ValueError(f"{name} must be positive, got {gbs!r}")

    itemsize, tokens = ITEMSIZE[dtype], max_tokens
    num_local_experts = num_experts // num_ranks
    row_bytes = hidden * itemsize + scale_bytes
    sum_bytes = hidden * max(2, itemsize)
    record = record_bytes(hidden=hidden, topk=topk, itemsize=itemsize, scale_bytes=scale_bytes)

    load = random_load(
        num_nodes=num_nodes,
        nodes_allowed=nodes_allowed,
        ranks_per_node=ranks_per_node,
        num_experts=num_experts,
        topk=topk,
        max_tokens=tokens,
        align=align,
    )
    rows = load.rows

    def phase(links: tuple[Traffic, ...], wire_bytes: int, bounds: list[Bound]) -> Phase:
        nvlink, network, once_a_rank, once_an_expert = (link.scaled(wire_bytes) for link in links)
        bounds = [_bound("NVLink", nvlink.expected, nvlink_gbs), *bounds]
        if num_nodes > 1:
            bounds.append(_bound("network", network.expected, network_gbs))
        return Phase(wire_bytes, nvlink, network, once_a_rank, once_an_expert, tuple(bounds))

    # a token is read and written to publish it, each copy is read once and written to all its rows
    copies = tokens * load.copies.expected
    by_sms = tokens_by_sms(num_sms, tokens) if num_nodes == 1 else tokens
    sent = by_sms + rows.expected + LOAD_SHARE * (by_sms + copies)
    dispatch_bounds = [
        _bound("SM output", sent * row_bytes, SM_OUTPUT_GBS * num_sms),
        _bound("memory", (2 * tokens + rows.expected + copies) * row_bytes, HBM_GBS),
    ]
    # experts' rows are added where they are, the sums of other ranks at home
    added = (rows.expected + copies * (1 - 1 / num_ranks)) * sum_bytes
    return Plan(
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        max_tokens=tokens,
        hidden=hidden,
        num_experts=num_experts,
        topk=topk,
        dtype=dtype,
        scale_bytes=scale_bytes,
        align=align,
        num_sms=num_sms,
        node_limit=node_limit,
        regions=_regions(
            num_nodes,
            ranks_per_node=ranks_per_node,
            num_local_experts=num_local_experts,
            max_tokens=tokens,
            hidden=hidden,
            topk=topk,
            itemsize=itemsize,
            scale_bytes=scale_bytes,
            chunk_tokens=config.network_chunk_tokens,
            window=config.network_channels * config.network_window_chunks,
        ),
        handle_bytes=_handle_bytes(
            num_nodes,
            ranks_per_node=ranks_per_node,
            num_local_experts=num_local_experts,
            max_tokens=tokens,
            topk=topk,
        ),
        torch_layout_bytes=4 * TorchLayout.size(num_ranks, tokens, topk),
        push_bytes=tokens * num_ranks * row_bytes,
        copies=load.copies,
        nodes=load.nodes,
        rows=rows,
        row_bytes=row_bytes,
        dispatch=phase(load.links, record, dispatch_bounds),
        combine=phase(
            tuple(link.reversed() for link in load.links),
            round_up(sum_bytes, 16),
            [_bound("SM sums", added, SM_SUMS_GBS * num_sms)],
        ),
        beyond=beyond(
            "nvlink" if num_nodes == 1 else "nvshmem",
            num_nodes=num_nodes,
            ranks_per_node=ranks_per_node,
            max_tokens=tokens,
            topk=topk,
            num_experts=num_experts,
            row_bytes=hidden * itemsize,
            scale_bytes=scale_bytes,
        ),
        window=None if num_nodes == 1 else network_window(config, num_nodes=num_nodes),
    )


def tokens_by_sms(num_sms: int, num_tokens: int) -> int:
    """How many tokens of a dispatch SMs publish, if the size is not exact and no graph holds it.

    The copy engine publishes the others. ``tokens_by_sms`` of csrc/copy_engine.h is its twin.
    """
    if num_sms > 32 or num_tokens < 2048:
        return num_tokens
    return 512 if num_sms > 16 else 0


def _regions(
    num_nodes: int, *, ranks_per_node: int, chunk_tokens: int, window: int, **sizes: int
) -> dict[str, int]:
    if num_nodes == 1:
        return symmetric_regions(ranks_per_node=ranks_per_node, **sizes)
    return nodes_regions(
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        chunk_tokens=chunk_tokens,
        window=window,
        **sizes,
    )


def _handle_bytes(num_nodes: int, *, ranks_per_node: int, **sizes: int) -> int:
    if num_nodes == 1:
        return handle_bytes(num_ranks=ranks_per_node, **sizes)
    return nodes_handle_bytes(num_nodes=num_nodes, ranks_per_node=ranks_per_node, **sizes)


def _bound(limit: str, num_bytes: float, gbs: float) -> Bound:
    return Bound(limit, num_bytes, gbs, num_bytes / gbs / 1e3)


def _check_sizes(
    num_ranks: int, hidden: int, num_experts: int, topk: int, dtype: str, scale_bytes: int
) -> None:
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be divisible by the number of ranks, got num_experts={num_experts} "
            f"with {num_ranks} ranks"
        )
    if topk > num_experts:
        raise ValueError(f"topk must be at most num_experts={num_experts}, got {topk}")
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype must be one of {', '.join(ITEMSIZE)}, got {dtype!r}")
    as_integer("scale_bytes", scale_bytes, 0)
    row_bytes = hidden * ITEMSIZE[dtype]
    if row_bytes % ROW_ALIGN:
        raise ValueError(
            f"rows must be a multiple of {ROW_ALIGN} bytes, got {row_bytes} (hidden={hidden}, "
            f"{dtype})"
        )
