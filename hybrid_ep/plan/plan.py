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

from hybrid_ep.backends.torch.layout import Layout as TorchLayout
from hybrid_ep.config import Config
from hybrid_ep.integers import check_counts
from hybrid_ep.layout.buffer_layout import symmetric_regions
from hybrid_ep.layout.handle_layout import handle_bytes
from hybrid_ep.layout.network_window import Window, network_window
from hybrid_ep.layout.nodes_layout import nodes_handle_bytes, nodes_regions
from hybrid_ep.plan.random_load import Spread, Traffic, random_load
from hybrid_ep.shape import Shape, dtype_name

# Said with every figure of several nodes, in tables and JSON, until a measurement confirms them.
UNCONFIRMED = (
    "Several nodes: a model that no measurement has confirmed, since no network was available."
)

NVLINK_GBS = 330.0  # pull, both directions at once, any number of SMs from 16
NETWORK_GBS = 50.0  # assumed: one 400 Gbit/s card per rank
# docs/lab/05-what-an-sm-can-store.md, 18-..., 20-what-an-sm-can-send.md
SM_OUTPUT_GBS = 62.0  # what one SM sends: its stores, 32 bytes per clock
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
        shape: sizes.
        align: each expert's group of rows is padded to a multiple of it.
        num_sms: SMs that a phase runs on.
        node_limit: most nodes that a token's experts lie on; None: any.
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

    shape: Shape
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
    def status(self) -> str | None:
        """``UNCONFIRMED`` with several nodes; None with one, whose rates were measured."""
        return UNCONFIRMED if self.shape.num_nodes > 1 else None

    @property
    def symmetric_bytes(self) -> int:
        """Symmetric memory of one rank."""
        return sum(self.regions.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields, nested ones too, and what follows from them."""
        result = asdict(self)
        sizes = {**result.pop("shape"), "dtype": dtype_name(self.shape.dtype)}
        for name in ("dispatch", "combine"):
            result[name]["dominant"] = getattr(self, name).dominant.limit
            result[name]["balance_gbs"] = getattr(self, name).balance_gbs
        result |= {"num_nodes": self.shape.num_nodes, "symmetric_bytes": self.symmetric_bytes}
        return {"status": self.status, **sizes, **result}


def make_plan(
    shape: Shape,
    *,
    align: int = 1,
    nvlink_gbs: float = NVLINK_GBS,
    network_gbs: float = NETWORK_GBS,
    num_sms: int = Config.num_sms_dispatch,
    node_limit: int | None = None,
    config: Config | None = None,
) -> Plan:
    """Compute the plan of one rank.

    Args:
        shape: sizes; ``max_tokens`` are what every rank dispatches, and ``topk`` distinct experts
            of a token. Combine moves at least 2 bytes per value.
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
    num_nodes = shape.num_nodes
    nodes_allowed = num_nodes if node_limit is None else node_limit
    check_counts(align=align, num_sms=num_sms, node_limit=nodes_allowed)
    nodes_allowed = min(nodes_allowed, num_nodes)
    shape.refuse_unaligned()
    reachable = shape.num_experts // num_nodes * nodes_allowed
    if shape.topk > reachable:
        raise ValueError(
            f"topk must be at most the experts of node_limit={nodes_allowed} nodes, {reachable}, "
            f"got {shape.topk}"
        )
    for name, gbs in (("nvlink_gbs", nvlink_gbs), ("network_gbs", network_gbs)):
        if not 0 < gbs < float("inf"):
            raise ValueError(f"{name} must be positive, got {gbs!r}")

    tokens, row_bytes = shape.max_tokens, shape.token_bytes
    load = random_load(shape, nodes_allowed=nodes_allowed, align=align)
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
    added = (rows.expected + copies * (1 - 1 / shape.num_ranks)) * shape.sum_bytes
    return Plan(
        shape=shape,
        align=align,
        num_sms=num_sms,
        node_limit=node_limit,
        regions=symmetric_regions(shape) if num_nodes == 1 else nodes_regions(shape, config),
        handle_bytes=handle_bytes(shape) if num_nodes == 1 else nodes_handle_bytes(shape),
        torch_layout_bytes=4 * TorchLayout.size(shape),
        push_bytes=tokens * shape.num_ranks * row_bytes,
        copies=load.copies,
        nodes=load.nodes,
        rows=rows,
        row_bytes=row_bytes,
        dispatch=phase(load.links, shape.record_bytes, dispatch_bounds),
        combine=phase(
            tuple(link.reversed() for link in load.links),
            shape.inbox_row_bytes,
            [_bound("SM sums", added, SM_SUMS_GBS * num_sms)],
        ),
        beyond=shape.beyond("nvlink" if num_nodes == 1 else "nvshmem"),
        window=None if num_nodes == 1 else network_window(config, num_nodes=num_nodes),
    )


def tokens_by_sms(num_sms: int, num_tokens: int) -> int:
    """How many tokens of a dispatch SMs publish, if the size is not exact and no graph holds it.

    The copy engine publishes the others. ``tokens_by_sms`` of csrc/copy_engine.h is its twin.
    """
    if num_sms > 32 or num_tokens < 2048:
        return num_tokens
    return 512 if num_sms > 16 else 0


def _bound(limit: str, num_bytes: float, gbs: float) -> Bound:
    return Bound(limit, num_bytes, gbs, num_bytes / gbs / 1e3)
