"""What dispatch and combine must return, in loops over tokens and experts, on one process.

Written from the words of the specification alone; it shares nothing with the library. A row is
known by its source: the rank and token it came from and the expert it is for.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.cases import Case, Inputs

Source = tuple[int, int, int]  # rank, token, expert

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}


@dataclass(frozen=True)
class Expected:
    """What one rank gets from dispatch; ``sources`` has None for padding."""

    rows: Tensor
    weights: Tensor | None
    scales: Tensor | None
    counts: Tensor
    offsets: Tensor
    required_rows: int
    overflow: bool
    sources: list[Source | None]


def max_rows(case: Case) -> int | None:
    """The bound that the case's rule means: the same on all ranks."""
    if case.max_rows is None:
        return None
    fullest = max(len(_sources(case.all_inputs(), rank, case)[0]) for rank in range(case.num_ranks))
    third = fullest // 3 // case.align * case.align
    return {
        "enough": fullest,
        "block_less": fullest - case.align,
        "third": third,
        "zero": 0,
        "more": fullest + 2 * case.align,
    }[case.max_rows]


def dispatch(case: Case, inputs: list[Inputs] | None = None) -> list[Expected]:
    """What each rank gets."""
    inputs = case.all_inputs() if inputs is None else inputs
    bound = max_rows(case)
    return [_receive(inputs, rank, case, bound) for rank in range(case.num_ranks)]


def _sources(inputs: list[Inputs], rank: int, case: Case) -> tuple[list[Source | None], list[int]]:
    """All rows of a rank with their padding, and where each expert's group ends."""
    chosen = [tensors.topk_idx.tolist() for tensors in inputs]
    sources: list[Source | None] = []
    ends = []
    for local_expert in range(case.experts_per_rank):
        expert = rank * case.experts_per_rank + local_expert
        for source_rank, tokens in enumerate(chosen):
            for token, experts in enumerate(tokens):
                if expert in experts:
                    sources.append((source_rank, token, expert))
        while len(sources) % case.align:
            sources.append(None)
        ends.append(len(sources))
    return sources, ends


def _receive(inputs: list[Inputs], rank: int, case: Case, bound: int | None) -> Expected:
    sources, ends = _sources(inputs, rank, case)
    required = len(sources)
    size = required if bound is None else bound
    dropped = [source for source in sources[size:] if source is not None]
    sources = sources[:size] + [None] * (size - required)
    offsets = [0, *(min(end, size) for end in ends)]
    counts = [
        sum(source is not None for source in sources[begin:end])
        for begin, end in itertools.pairwise(offsets)
    ]

    like = inputs[rank]
    rows = like.x.new_zeros(size, like.x.shape[1])
    weights = None if like.weights is None else torch.zeros(size)
    scales = None if like.scales is None else like.scales.new_zeros(size, like.scales.shape[1])
    for row, source in enumerate(sources):
        if source is None:
            continue
        source_rank, token, expert = source
        theirs = inputs[source_rank]
        rows[row] = theirs.x[token]
        if scales is not None:
            scales[row] = theirs.scales[token]
        if weights is not None:
            weights[row] = _weight(theirs, token, expert)
    return Expected(
        rows,
        weights,
        scales,
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(offsets, dtype=torch.int32),
        required,
        bool(dropped),
        sources,
    )


def _weight(inputs: Inputs, token: int, expert: int) -> Tensor:
    """The weights of the slots that name the expert, added in slot order."""
    slots = [s for s, e in enumerate(inputs.topk_idx[token].tolist()) if e == expert]
    return _add([inputs.weights[token, slot] for slot in slots])


def _add(terms: list[Tensor]) -> Tensor:
    """In order; a sum of one term is that term."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def combine(
    case: Case, expected: list[Expected], rows: list[Tensor], weights: list[Tensor] | None = None
) -> list[Tensor]:
    """Each rank's y, bit by bit: fp32 sums, rounded where the specification says."""
    dtype = rows[0].dtype

    def rank_sum(rank: int, row_indices: list[int]) -> Tensor:
        terms = [rows[rank][row].float() for row in row_indices]
        if weights is not None:
            factors = [weights[rank][row] for row in row_indices]
            terms = [term * factor for term, factor in zip(terms, factors, strict=True)]
        return _add(terms).to(dtype)

    per_node = case.ranks_per_node or case.num_ranks
    many_nodes = per_node < case.num_ranks

    def home_sum(found: dict[int, list[int]]) -> Tensor:
        nodes: dict[int, list[Tensor]] = {}
        for rank in sorted(found):
            nodes.setdefault(rank // per_node, []).append(rank_sum(rank, found[rank]).float())
        sums = [_add(nodes[node]).to(dtype) for node in sorted(nodes)]
        return _add([s.float() for s in sums]).to(dtype) if many_nodes else sums[0]

    return _at_home(case, expected, rows, home_sum)


def combine_fp64(
    case: Case, expected: list[Expected], rows: list[Tensor], weights: list[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """The exact sums, and the sums of the absolute values, which bound the error."""

    def terms(found: dict[int, list[int]]) -> list[Tensor]:
        return [
            rows[rank][row].double() * (1.0 if weights is None else weights[rank][row].double())
            for rank, row_indices in found.items()
            for row in row_indices
        ]

    wide = [r.double() for r in rows]
    exact = _at_home(case, expected, wide, lambda found: _add(terms(found)))
    sizes = _at_home(case, expected, wide, lambda found: _add([t.abs() for t in terms(found)]))
    return exact, sizes


def error_bound(case: Case, dtype: torch.dtype, size: Tensor) -> Tensor:
    """How far y may lie from the exact sum, ``size`` being the sum of the absolute values.

    Each term is multiplied and added at most K + R + nodes times in fp32 and rounded to the dtype
    of rows two or three times; below the smallest normal number a rounding is absolute.
    """
    roundings = 2 if case.ranks_per_node in (None, case.num_ranks) else 3
    in_fp32 = case.num_slots + 2 * case.num_ranks + 1
    growth = (1 + UNIT_ROUNDOFF[dtype]) ** roundings * (1 + 2.0**-24) ** in_fp32 - 1
    return growth * size + (case.num_ranks + roundings) * SMALLEST[dtype]


def _at_home(case: Case, expected: list[Expected], rows: list[Tensor], reduce) -> list[Tensor]:
    """``reduce`` over {rank: its rows of the token in expert order} for each token of each rank."""
    y = []
    found_by_token: dict[tuple[int, int], dict[int, list[int]]] = {}
    for rank, receiver in enumerate(expected):
        for row, source in enumerate(receiver.sources):
            if source is not None:
                found = found_by_token.setdefault(source[:2], {})
                found.setdefault(rank, []).append(row)
    for rank in range(case.num_ranks):
        mine = rows[0].new_zeros(case.num_tokens(rank), case.hidden)
        for token in range(case.num_tokens(rank)):
            if (rank, token) in found_by_token:
                mine[token] = reduce(found_by_token[rank, token])
        y.append(mine)
    return y


def slot_values(case: Case, expected: list[Expected], values: list[Tensor]) -> list[Tensor]:
    """``[T, K]`` for each rank: the value of the row that a slot's token has for its expert."""
    home = [torch.zeros(case.num_tokens(r), case.num_slots) for r in range(case.num_ranks)]
    chosen = [tensors.topk_idx.tolist() for tensors in case.all_inputs()]
    for rank, receiver in enumerate(expected):
        for row, source in enumerate(receiver.sources):
            if source is None:
                continue
            source_rank, token, expert = source
            for slot, choice in enumerate(chosen[source_rank][token]):
                if choice == expert:
                    home[source_rank][token, slot] = values[rank][row]
    return home
