"""What combine must return: the sum in the stated order, the fp64 sum, and a bound between them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep.check.case import EXPERTS_PER_RANK, TOPK, Case
from hybrid_ep.check.expected_rows import Row, kept_rows, row_weight
from hybrid_ep.group import Topology


class Sums(NamedTuple):
    """Sums of a rank's tokens, ``[T, H]`` each.

    Attributes:
        ordered: in the case's dtype, equal to what combine returns to the last bit.
        exact: in float64.
        bound: of the difference between ``exact`` and a sum with the stated roundings.
    """

    ordered: Tensor
    exact: Tensor
    bound: Tensor


def expected_sums(case: Case, topology: Topology, *, weighted: bool) -> Sums:
    """The sums over the experts' outputs, at home on ``topology.rank``.

    Args:
        case: whose ``outputs_of`` are summed.
        topology: the ranks; each node rounds once.
        weighted: whether rows are weighted.
    """
    rank = topology.rank
    shape = (case.num_tokens[rank], case.hidden)
    kept = None if case.max_rows is None else kept_rows(case)
    exact, size = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    home = _OrderedSum(shape, case.dtype)
    for node in range(topology.num_nodes):
        of_node = _OrderedSum(shape, case.dtype)
        for local in range(topology.ranks_per_node):
            of_rank = _OrderedSum(shape, case.dtype)
            first = (node * topology.ranks_per_node + local) * EXPERTS_PER_RANK
            for expert in range(first, first + EXPERTS_PER_RANK):
                token = _tokens_of(case, rank, expert, kept)
                term, wide = _terms(case, rank, token, expert, weighted=weighted)
                of_rank.add(token, term)
                exact.index_add_(0, token, wide)
                size.index_add_(0, token, wide.abs())
            of_node.add(of_rank.touched, of_rank.rounded())
        home.add(of_node.touched, of_node.rounded())
    # each rounding errs by half an eps of what it rounds, each product and sum by 2**-24
    roundings = 2 if topology.num_nodes == 1 else 3
    half_eps = torch.finfo(case.dtype).eps / 2
    bound = size * (roundings * half_eps + 4 * TOPK * 2.0**-24) * 1.02
    ordered = torch.zeros(shape)
    ordered[home.touched] = home.rounded()
    return Sums(ordered.to(case.dtype), exact, bound)


def _tokens_of(case: Case, rank: int, expert: int, kept: set[Row] | None) -> Tensor:
    """int64 ``[N]``: the rank's tokens that have a row of this expert."""
    token = (case.topk_idx[rank] == expert).any(dim=1).nonzero().flatten()
    if kept is None:
        return token
    return token[
        torch.tensor([(rank, t, expert) in kept for t in token.tolist()], dtype=torch.bool)
    ]


def _terms(
    case: Case, rank: int, token: Tensor, expert: int, *, weighted: bool
) -> tuple[Tensor, Tensor]:
    """What an expert adds to these tokens, ``[N, H]`` in float32 and in float64."""
    key = (torch.full_like(token, rank), token, torch.full_like(token, expert))
    rows = case.outputs_of(*key)
    if not weighted:
        return rows.float(), rows.double()
    values = [row_weight(case, rank, t, expert) for t in token.tolist()]
    weight = torch.tensor(values, dtype=torch.float32).unsqueeze(1)
    return rows.float() * weight, rows.double() * weight.double()


class _OrderedSum:
    """Sums in fp32 that begin with their first term and are rounded to a dtype at their end."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._total = torch.zeros(shape)
        self._begun = torch.zeros(shape[0], dtype=torch.bool)

    @property
    def touched(self) -> Tensor:
        return self._begun.nonzero().flatten()

    def add(self, token: Tensor, term: Tensor) -> None:
        begun = self._begun[token].unsqueeze(1)
        self._total[token] = torch.where(begun, self._total[token] + term, term)
        self._begun[token] = True

    def rounded(self) -> Tensor:
        """Of the tokens touched."""
        return self._total[self._begun].to(self._dtype).float()
