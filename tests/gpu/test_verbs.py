"""The cases of the torch backend, bit by bit, on the GPUs there are: ranks share them in turn."""

import dataclasses

import pytest

from tests.cases import CASES
from tests.checks import check_combine, check_dispatch, check_gradients

NUM_RANKS = (1, 2, 3, 4, 8)
FEW_RANKS = NUM_RANKS[:3]  # ranks that share a GPU take turns, which is slow
ONE_NODE = [dataclasses.replace(case, ranks_per_node=None) for case in CASES]


def on_ranks(cases, all_num_ranks=NUM_RANKS):
    """Every case on every number of ranks that has experts enough for distinct choices."""
    cases = list(cases)
    return [
        pytest.param(case.on(num_ranks), id=f"{num_ranks}-{case.name}")
        for num_ranks in all_num_ranks
        for case in cases
        if case.num_slots <= case.on(num_ranks).num_experts or case.routing == "duplicates"
    ]


@pytest.mark.parametrize("case", on_ranks(ONE_NODE))
def test_dispatch(world, case):
    check_dispatch(world(case.num_ranks), case)


@pytest.mark.parametrize("case", on_ranks(ONE_NODE))
def test_combine(world, case):
    check_combine(world(case.num_ranks), case)


# gradients are the same two kernels: more ranks would show nothing that these do not
@pytest.mark.parametrize(
    "case", on_ranks((c for c in ONE_NODE if c.dtype.itemsize > 1 and c.weights), FEW_RANKS)
)
def test_gradients(world, case):
    check_gradients(world(case.num_ranks), case)
