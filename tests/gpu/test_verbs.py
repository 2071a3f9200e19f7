"""The cases of the torch backend, bit by bit, on the GPUs there are: ranks share them in turn."""

import dataclasses

import pytest

from tests.cases import CASES
from tests.checks import check_combine, check_dispatch, check_gradients

NUM_RANKS = (1, 2, 3, 4, 8)
ONE_NODE = [dataclasses.replace(case, ranks_per_node=None) for case in CASES]
SUMMED = [case for case in ONE_NODE if case.dtype.itemsize > 1 and case.weights]


@pytest.mark.parametrize("case", ONE_NODE, ids=str)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_dispatch(world, case, num_ranks):
    check_dispatch(world(num_ranks), case.on(num_ranks))


@pytest.mark.parametrize("case", ONE_NODE, ids=str)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_combine(world, case, num_ranks):
    check_combine(world(num_ranks), case.on(num_ranks))


@pytest.mark.parametrize("case", SUMMED, ids=str)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_gradients(world, case, num_ranks):
    check_gradients(world(num_ranks), case.on(num_ranks))
