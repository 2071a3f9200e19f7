"""Dispatch bit by bit, combine bit by bit and within a bound of fp64, gradients: every case."""

from tests.cases import CASES, params
from tests.checks import check_combine, check_dispatch, check_gradients


@params(CASES)
def test_dispatch(world, case):
    check_dispatch(world(case.num_ranks), case)


@params(CASES)
def test_combine(world, case):
    check_combine(world(case.num_ranks), case)


@params(case for case in CASES if case.dtype.itemsize > 1 and case.weights)
def test_gradients(world, case):
    check_gradients(world(case.num_ranks), case)
