"""How random routing loads ranks and links: expected and worst, exactly, in rows.

Each token draws its distinct experts uniformly at random. With a limit of L nodes, a token first
draws L of the N nodes, then its K experts among the L * E/N there, uniformly each time. It reaches
a given rank (or node) of m experts if the node is drawn and any of the m is:

    L/N * (1 - C(L * E/N - m, K) / C(L * E/N, K))

and all expected traffic is tokens times the ranks (or nodes) concerned times that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid_ep.integers import round_up
from hybrid_ep.shape import Shape


@dataclass(frozen=True)
class Spread:
    """A quantity that depends on the routing."""

    expected: float
    worst: int


@dataclass(frozen=True)
class Traffic:
    """Rows, or bytes, of a rank through one kind of link; ``expected`` holds for each direction."""

    expected: float
    worst_sent: int
    worst_received: int

    def scaled(self, row_bytes: int) -> Traffic:
        """Traffic counted in rows -> in bytes."""
        return Traffic(
            self.expected * row_bytes, self.worst_sent * row_bytes, self.worst_received * row_bytes
        )

    def reversed(self) -> Traffic:
        """The same rows on their way home."""
        return Traffic(self.expected, self.worst_received, self.worst_sent)


@dataclass(frozen=True)
class Load:
    """What a dispatch brings to one rank and sends over its links, in rows.

    Attributes:
        copies: ranks that a token goes to, its own included.
        nodes: likewise.
        rows: rows that dispatch returns on one rank, padding included.
        nvlink: rows through NVLink, a rank's own copies excluded.
        network: through the rank's network card; a token crosses once per remote node.
        network_without_dedup: the same if it crossed once per remote rank.
        network_once_an_expert: the same if it crossed once per remote expert.
    """

    copies: Spread
    nodes: Spread
    rows: Spread
    nvlink: Traffic
    network: Traffic
    network_without_dedup: Traffic
    network_once_an_expert: Traffic

    @property
    def links(self) -> tuple[Traffic, ...]:
        """The four kinds of traffic, in the order above."""
        return (
            self.nvlink,
            self.network,
            self.network_without_dedup,
            self.network_once_an_expert,
        )


def random_load(shape: Shape, *, nodes_allowed: int, align: int) -> Load:
    """The load of one rank.

    Args:
        shape: sizes; every rank dispatches ``max_tokens``, of ``topk`` distinct experts each.
        nodes_allowed: nodes on which the experts of a token may lie.
        align: each expert's group of rows is padded to a multiple of this.

    Returns:
        Load: in rows.
    """
    # a token reaches a given rank (node) if its node is among the allowed and an expert is drawn
    num_ranks, num_nodes, ranks_per_node = shape.num_ranks, shape.num_nodes, shape.ranks_per_node
    num_experts, num_local_experts = shape.num_experts, shape.num_local_experts
    tokens, topk = shape.max_tokens, shape.topk
    reachable = num_experts // num_nodes * nodes_allowed
    node_share = nodes_allowed / num_nodes
    on_rank = node_share * _hit_probability(reachable, num_local_experts, topk)
    on_node = node_share * _hit_probability(reachable, num_experts // num_nodes, topk)
    copies = Spread(num_ranks * on_rank, min(topk, nodes_allowed * ranks_per_node))
    nodes = Spread(num_nodes * on_node, min(topk, nodes_allowed))
    rows = Spread(
        num_local_experts * _expected_group(num_ranks * tokens, topk / num_experts, align),
        worst_rows(num_ranks, num_local_experts, tokens, topk, align),
    )

    # rows that cross links: within a node a rank pulls what its local peers and their rails have
    peers, remote_nodes = ranks_per_node - 1, num_nodes - 1
    remote_ranks = num_ranks - ranks_per_node
    nvlink = Traffic(
        tokens * num_nodes * peers * on_rank,
        tokens * num_nodes * min(topk, peers),
        tokens * num_nodes * peers,
    )
    network = Traffic(
        tokens * remote_nodes * on_node,
        tokens * min(nodes.worst, remote_nodes),
        tokens * remote_nodes,
    )
    network_without_dedup = Traffic(
        tokens * remote_ranks * on_rank,
        tokens * min(copies.worst, remote_ranks),
        tokens * remote_ranks,
    )
    network_once_an_expert = Traffic(
        tokens * topk * remote_nodes / num_nodes,  # of nodes alike, by either routing
        tokens * min(topk, min(nodes_allowed, remote_nodes) * num_experts // num_nodes),
        tokens * remote_ranks * min(topk, num_local_experts),
    )
    return Load(
        copies=copies,
        nodes=nodes,
        rows=rows,
        nvlink=nvlink,
        network=network,
        network_without_dedup=network_without_dedup,
        network_once_an_expert=network_once_an_expert,
    )


def worst_rows(
    num_ranks: int, num_local_experts: int, max_tokens: int, topk: int, align: int
) -> int:
    """Most rows that dispatch can return on one rank; reached when all tokens choose its experts.

    Args:
        num_ranks: ranks that send.
        num_local_experts: experts of the rank.
        max_tokens: tokens of each of the ranks.
        topk: experts of a token.
        align: padding of each expert's group.

    Returns:
        int: rows, padding included.
    """
    copies = num_ranks * max_tokens
    unpadded = copies * min(topk, num_local_experts)
    groups = min(
        # all groups one row above a multiple of align; then full groups; then one row a group
        (unpadded + num_local_experts * (align - 1)) // align,
        num_local_experts * -(-copies // align),
        unpadded,
    )
    return groups * align


def _hit_probability(num_experts: int, num_owned: int, topk: int) -> float:
    """Chance that at least one of ``topk`` distinct experts is among the ``num_owned``."""
    return 1 - math.comb(num_experts - num_owned, topk) / math.comb(num_experts, topk)


def _expected_group(num_tokens: int, chance: float, align: int) -> float:
    """Mean rows of an expert, padded to ``align``, that each token chooses with this chance."""
    mean = num_tokens * chance
    if align == 1:
        return mean
    if chance == 1:
        return float(round_up(num_tokens, align))
    reach = 12 * (math.sqrt(mean) + 1)  # what lies further out has no weight in a float
    sizes = range(max(0, int(mean - reach)), min(num_tokens, int(mean + reach)) + 1)
    return sum(round_up(n, align) * _binomial(num_tokens, chance, n) for n in sizes)


def _binomial(trials: int, chance: float, hits: int) -> float:
    misses = trials - hits
    log_ways = math.lgamma(trials + 1) - math.lgamma(hits + 1) - math.lgamma(misses + 1)
    return math.exp(log_ways + hits * math.log(chance) + misses * math.log1p(-chance))
