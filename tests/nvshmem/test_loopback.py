"""What the kernels of several nodes do by themselves: plain stores in the place of NVSHMEM."""

import pytest

from tests.checks import check_combine, check_dispatch, check_gradients
from tests.nvshmem.shapes import on_shapes
from tests.nvshmem.test_verbs import LONG, ONCE
from tests.ranks import loopback

CASES = [ONCE["plain"], ONCE["one_rank_without_tokens"], LONG[0]]


@pytest.mark.parametrize("case", on_shapes(CASES, ("2x1", "2x2", "4x1")))
def test_dispatch(world, case):
    check_dispatch(world(case.num_ranks), case, loopback.dispatch)


@pytest.mark.parametrize("case", on_shapes(CASES, ("2x1", "2x2", "4x1")))
def test_combine(world, case):
    check_combine(world(case.num_ranks), case, loopback.combine)


@pytest.mark.parametrize("case", on_shapes(CASES, ("2x1", "2x2")))
def test_gradients(world, case):
    check_gradients(world(case.num_ranks), case, loopback.gradients)
