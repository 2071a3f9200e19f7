"""How a dispatch across nodes grows: tables of plans and of simulated pipelines.

Weak scaling: every rank keeps its tokens, the nodes grow in number. The shape is DeepSeek-V3's
unless another is given. No measurement has confirmed either (``plan.UNCONFIRMED``): the first is
arithmetic over assumed rates, the second a simulation with assumed times.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hybrid_ep.integers import check_counts, round_up
from hybrid_ep.plan.pipeline_model import (
    Outcome,
    fewest_credits,
    pipeline_of,
    simulate,
)
from hybrid_ep.plan.plan import NETWORK_GBS, NVLINK_GBS, Plan, make_plan
from hybrid_ep.shape import Shape, default_scale_bytes, dtype_name

SCALING_NODES = (1, 2, 4, 8, 16, 32, 64, 128)  # of 8 ranks: 8 to 1,024
SIMULATED_NODES = (2, 4, 8)


def deepseek_v3(**sizes: Any) -> Shape:
    """A Shape of one rank: the sizes given, DeepSeek-V3's for the others."""
    sizes = {"max_tokens": 4096, "hidden": 7168, "num_experts": 256, "topk": 8, **sizes}
    scale_bytes = default_scale_bytes(sizes.get("dtype", torch.bfloat16), sizes["hidden"])
    return Shape(**{"num_ranks": 1, "scale_bytes": scale_bytes, **sizes})


@dataclass(frozen=True)
class WeakScaling:
    """What does not change with the number of nodes.

    Attributes:
        shape: of one rank. Its experts are rounded up to a multiple of the ranks, so that each rank
            has one where there are more ranks.
        ranks_per_node: ranks of a node.
        node_limit: most nodes that a token's experts lie on; None: any.
        nvlink_gbs: GB/s of NVLink, per rank and direction.
        network_gbs: GB/s of a rank's network card and direction.
    """

    shape: Shape
    ranks_per_node: int = 8
    node_limit: int | None = None
    nvlink_gbs: float = NVLINK_GBS
    network_gbs: float = NETWORK_GBS

    def plan(self, num_nodes: int) -> Plan:
        """The plan on so many nodes."""
        check_counts(ranks_per_node=self.ranks_per_node)
        num_ranks = num_nodes * self.ranks_per_node
        shape = replace(
            self.shape,
            num_ranks=num_ranks,
            ranks_per_node=self.ranks_per_node,
            num_experts=round_up(self.shape.num_experts, num_ranks),
        )
        return make_plan(
            shape,
            node_limit=self.node_limit,
            nvlink_gbs=self.nvlink_gbs,
            network_gbs=self.network_gbs,
        )


@dataclass(frozen=True)
class ScalingRow:
    """A modelled dispatch of one rank, expected bytes of one direction.

    Attributes:
        row_bytes: bytes of a token on the wire.
        nodes_of_token: nodes that a token goes to, its own included if it has experts there.
        network_bytes: a token crosses the network once per node.
        once_a_rank_bytes: the same if once per rank.
        once_an_expert_bytes: the same if once per expert.
        nvlink_bytes: through NVLink, where tokens cross the network once per node.
        network_us: floor set by the network.
        once_a_rank_us: the same without deduplication.
        nvlink_us: floor set by NVLink.
        longer: the side that takes longer, "network" or "NVLink".
        balance_gbs: GB/s of a network card at which both take as long; None with one node.
    """

    num_ranks: int
    num_nodes: int
    num_experts: int
    dtype: str
    node_limit: int | None
    row_bytes: int
    nodes_of_token: float
    network_bytes: float
    once_a_rank_bytes: float
    once_an_expert_bytes: float
    nvlink_bytes: float
    network_us: float
    once_a_rank_us: float
    nvlink_us: float
    longer: str
    balance_gbs: float | None


@dataclass(frozen=True)
class SimulatedRow:
    """A simulated dispatch.

    Attributes:
        credits: chunks that may be under way to a peer, all channels together.
        outcome: with these.
        unlimited_us: total time with any number of credits.
        floor_us: the longer of the times that the bytes take on the network and on NVLink.
        serial_us: both, one after the other: what a call without any overlap would take.
        credits_needed: fewest with which unlimited ones save at most 2 percent.
    """

    num_nodes: int
    dtype: str
    node_limit: int | None
    chunk_tokens: int
    chunk_bytes: int
    credits: int
    outcome: Outcome
    unlimited_us: float
    floor_us: float
    serial_us: float
    credits_needed: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "outcome": self.outcome.as_dict()}


def scaling_rows(scaling: WeakScaling, nodes: tuple[int, ...] = SCALING_NODES) -> list[ScalingRow]:
    """The shape on growing numbers of nodes."""
    return [_scaling_row(scaling, num_nodes) for num_nodes in nodes]


def first_network_bound(rows: list[ScalingRow]) -> ScalingRow | None:
    """The first row from which on the network is the longer side in all that follow."""
    first = None
    for row in reversed(rows):
        if row.longer != "network":
            break
        first = row
    return first


def simulated_row(
    scaling: WeakScaling,
    num_nodes: int,
    *,
    chunk_tokens: int,
    credits: int,
    **costs: float,
) -> SimulatedRow:
    """Simulate the dispatch of a shape on so many nodes; the arguments as in ``pipeline_of``."""
    pipeline = pipeline_of(
        scaling.plan(num_nodes),
        credits=credits,
        chunk_tokens=chunk_tokens,
        **costs,
    )
    return SimulatedRow(
        num_nodes=num_nodes,
        dtype=dtype_name(scaling.shape.dtype),
        node_limit=scaling.node_limit,
        chunk_tokens=chunk_tokens,
        chunk_bytes=chunk_tokens * pipeline.record_bytes,
        credits=credits,
        outcome=simulate(pipeline),
        unlimited_us=simulate(replace(pipeline, credits=None)).total_us,
        floor_us=max(pipeline.network_us, pipeline.nvlink_us),
        serial_us=pipeline.network_us + pipeline.nvlink_us,
        credits_needed=fewest_credits(pipeline),
    )


def _scaling_row(scaling: WeakScaling, num_nodes: int) -> ScalingRow:
    plan = scaling.plan(num_nodes)
    phase = plan.dispatch
    network_us, once_a_rank_us, nvlink_us = (
        traffic.expected / gbs / 1e3
        for traffic, gbs in (
            (phase.network, scaling.network_gbs),
            (phase.network_without_dedup, scaling.network_gbs),
            (phase.nvlink, scaling.nvlink_gbs),
        )
    )
    return ScalingRow(
        num_ranks=plan.shape.num_ranks,
        num_nodes=num_nodes,
        num_experts=plan.shape.num_experts,
        dtype=dtype_name(scaling.shape.dtype),
        node_limit=scaling.node_limit,
        row_bytes=phase.row_bytes,
        nodes_of_token=plan.nodes.expected,
        network_bytes=phase.network.expected,
        once_a_rank_bytes=phase.network_without_dedup.expected,
        once_an_expert_bytes=phase.network_once_an_expert.expected,
        nvlink_bytes=phase.nvlink.expected,
        network_us=network_us,
        once_a_rank_us=once_a_rank_us,
        nvlink_us=nvlink_us,
        longer="network" if network_us > nvlink_us else "NVLink",
        balance_gbs=phase.balance_gbs,
    )
