"""The same over networks that ranks of one host do not take: plain stores, and NVSHMEM's puts."""

from functools import partial

import pytest

from tests.checks import check_combine, check_dispatch, check_gradients
from tests.nvshmem.shapes import on_shapes
from tests.nvshmem.test_verbs import LONG, ONCE
from tests.ranks import networks

CASES = [ONCE["plain"], ONCE["one_rank_without_tokens"], LONG[0]]
each_network = pytest.mark.parametrize("network", networks.NETWORKS)


@each_network
@pytest.mark.parametrize("case", on_shapes(CASES, ("2x1", "2x2", "4x1")))
def test_dispatch(world, case, network):
    check_dispatch(world(case.num_ranks), case, partial(networks.dispatch, network=network))


@each_network
@pytest.mark.parametrize("case", on_shapes(CASES, ("2x1", "2x2", "4x1")))
def test_combine(world, case, network):
    check_combine(world(case.num_ranks), case, partial(networks.combine, network=network))


@each_network
@pytest.mark.parametrize("case", on_shapes(CASES, ("2x1", "2x2")))
def test_gradients(world, case, network):
    check_gradients(world(case.num_ranks), case, partial(networks.gradients, network=network))
