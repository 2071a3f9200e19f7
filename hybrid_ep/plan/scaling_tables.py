"""The tables of ``plan --scaling`` and ``plan --simulate``, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybrid_ep.config import MAX_CHUNK_TOKENS
from hybrid_ep.output.tables import in_bytes, print_table
from hybrid_ep.plan.plan import UNCONFIRMED
from hybrid_ep.plan.scaling import (
    SIMULATED_NODES,
    ScalingRow,
    SimulatedRow,
    WeakScaling,
    first_network_bound,
    scaling_rows,
    simulated_row,
)

Pair = tuple[WeakScaling, WeakScaling]  # of one dtype: with uniform routing, with a node limit

CHUNK_SWEEP = (2, 8, MAX_CHUNK_TOKENS)  # tokens, on the fewest nodes, where the sides are closest


@dataclass(frozen=True)
class Scaling:
    """Weak scaling; a list of rows for each dtype and routing."""

    pairs: Sequence[Pair]
    tables: list[list[ScalingRow]]

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Scaling:
        """The tables of these shapes."""
        return cls(pairs, [scaling_rows(scaling) for pair in pairs for scaling in pair])

    def as_dict(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [asdict(row) for table in self.tables for row in table]

    def show(self) -> None:
        """Print them."""
        scaling = self.pairs[0][0]
        print(
            f"weak scaling of dispatch: {_sizes(scaling)},\n"
            f"network {scaling.network_gbs:g} GB/s, NVLink {scaling.nvlink_gbs:g} GB/s; expected "
            "bytes per rank, each way, and the floors\nthat they set. A token crosses the network "
            "once per node; the columns once per rank and once\nper expert say what it would be "
            "without deduplication. Even at: the rate of a network card with\nwhich network and "
            "NVLink take equally long. The routing with a limit draws the nodes uniformly,\nthen "
            "experts within them. Combine carries the same copies back, in bf16 or wider. MB, GB = "
            "1e6,\n1e9 bytes.\n"
        )
        for table in self.tables:
            _print_scaling(table)
        self._print_more_ranks_than_experts()
        print(f"{UNCONFIRMED}\n")

    def _print_more_ranks_than_experts(self) -> None:
        experts = self.pairs[0][0].shape.num_experts
        if any(row.num_experts != experts for row in self.tables[0]):
            print(
                f"Every rank needs as many experts as the others, so there are more than {experts} "
                "where the column says so.\n"
                f"Groups of at most {experts} ranks, side by side, keep the figures of one group.\n"
            )


@dataclass(frozen=True)
class Simulation:
    """The chunk pipeline on some nodes, and with chunks of some sizes."""

    pairs: Sequence[Pair]
    rows: list[SimulatedRow]
    chunk_sweep: list[SimulatedRow]
    costs: dict[str, float]  # arguments of pipeline_of, in us

    @classmethod
    def of(
        cls,
        pairs: Sequence[Pair],
        *,
        chunk_tokens: int,
        credits: int,
        **costs: float,
    ) -> Simulation:
        """Simulate these shapes; a node limit that does not bind is left out."""
        rows = [
            simulated_row(scaling, nodes, chunk_tokens=chunk_tokens, credits=credits, **costs)
            for pair in pairs
            for scaling in pair
            for nodes in SIMULATED_NODES
            if scaling.node_limit is None or scaling.node_limit < nodes
        ]
        sweep = [
            simulated_row(
                pairs[0][0], SIMULATED_NODES[0], chunk_tokens=tokens, credits=credits, **costs
            )
            for tokens in CHUNK_SWEEP
        ]
        return cls(pairs, rows, sweep, costs)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.costs,
            "rows": [row.as_dict() for row in self.rows],
            "chunk_sweep": [row.as_dict() for row in self.chunk_sweep],
        }

    def show(self) -> None:
        """Print them."""
        scaling, first = self.pairs[0][0], self.rows[0]
        print(
            f"dispatch across nodes, simulated: {_sizes(scaling)},\n"
            f"network {scaling.network_gbs:g} GB/s and {self.costs['network_latency_us']:g} us, "
            f"NVLink {scaling.nvlink_gbs:g} GB/s and {self.costs['nvlink_latency_us']:g} us, "
            f"{self.costs['put_us']:g} us of the card per put and signal,\n"
            f"{self.costs['pass_on_us']:g} us to pass an arrival on (these times are assumed). "
            "A token on its way holds its\nplace at the rail peer until it is pulled there. "
            "Overlap: the share of the shorter side's work that\nhides behind the longer side's. "
            "Credits: chunks under way to a rail peer; needed: the fewest that\nreach 98 % of the "
            "speed of any number.\n"
        )
        print_table(
            f"model: chunks of {first.chunk_tokens:,} tokens, {first.credits:,} credits",
            (
                *("dtype", "routing", "nodes", "floor", "time", "no overlap", "overlap"),
                *("network busy", "NVLink busy", "credits needed"),
            ),
            [_simulated(row) for row in self.rows],
            texts=2,
            keys=3,
        )
        sweep = self.chunk_sweep[0]
        print_table(
            f"model: size of a chunk, {sweep.dtype}, {sweep.num_nodes} nodes, "
            f"{sweep.credits:,} credits",
            ("tokens", "time", "overlap", "credits needed", "their windows, per peer"),
            [_sweep(row) for row in self.chunk_sweep],
        )
        print(f"{UNCONFIRMED}\n")


def _print_scaling(table: list[ScalingRow]) -> None:
    first = table[0]
    print_table(
        f"model: {first.dtype}, {first.row_bytes:,} bytes per row, {_routing(first.node_limit)}",
        (
            *(
                "ranks",
                "experts",
                "nodes per token",
                "network MB",
                "once per rank",
                "once per expert",
            ),
            *("NVLink MB", "network us", "once per rank", "NVLink us", "longer", "even at GB/s"),
        ),
        [_scaling(row) for row in table],
        texts=0,
        keys=2,
    )
    bound = first_network_bound(table)
    if bound is None:
        print(f"NVLink is the longer side on {table[-1].num_ranks:,} ranks.\n")
    else:
        print(f"The network is the longer side from {bound.num_ranks:,} ranks on.\n")


def _scaling(row: ScalingRow) -> tuple[str, ...]:
    sizes = (
        row.network_bytes,
        row.once_a_rank_bytes,
        row.once_an_expert_bytes,
        row.nvlink_bytes,
    )
    return (
        f"{row.num_ranks:,}",
        f"{row.num_experts:,}",
        f"{row.nodes_of_token:.2f}",
        *(f"{size / 1e6:.1f}" for size in sizes),
        *(f"{us:,.0f}" for us in (row.network_us, row.once_a_rank_us, row.nvlink_us)),
        row.longer,
        "-" if row.balance_gbs is None else f"{row.balance_gbs:,.0f}",
    )


def _simulated(row: SimulatedRow) -> tuple[str, ...]:
    outcome = row.outcome
    return (
        row.dtype,
        _routing(row.node_limit),
        f"{row.num_nodes:,}",
        *(f"{us:,.0f} us" for us in (row.floor_us, outcome.total_us, row.serial_us)),
        *(
            f"{share:.1%}"
            for share in (
                outcome.overlap,
                outcome.network_utilisation,
                outcome.nvlink_utilisation,
            )
        ),
        f"{row.credits_needed:,}",
    )


def _sweep(row: SimulatedRow) -> tuple[str, ...]:
    return (
        f"{row.chunk_tokens:,}",
        f"{row.outcome.total_us:,.0f} us",
        f"{row.outcome.overlap:.1%}",
        f"{row.credits_needed:,}",
        in_bytes(row.credits_needed * row.chunk_bytes),
    )


def _routing(node_limit: int | None) -> str:
    return "uniform" if node_limit is None else f"at most {node_limit} nodes"


def _sizes(scaling: WeakScaling) -> str:
    shape = scaling.shape
    return (
        f"nodes of {scaling.ranks_per_node}, {shape.max_tokens:,} tokens per rank, hidden "
        f"{shape.hidden:,}, {shape.num_experts:,} experts, top-{shape.topk}"
    )
