"""Calls in changing order on ranks of changing speed: mori#93, #80, DeepEP#682.

HYBRID_EP_STRESS_CALLS makes it longer; 2,000 is what a release is tested with.
"""

import os

import pytest

from tests.ranks import stress

CALLS = int(os.environ.get("HYBRID_EP_STRESS_CALLS", "100"))
of_one_node = pytest.mark.not_on("nodes", why="3 ranks and more are harder")
of_nodes = pytest.mark.only_on("nodes", why="nodes of two ranks")


@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(2, marks=of_one_node),
        3,
        pytest.param(4, marks=of_nodes),
        pytest.param(6, marks=of_nodes),
    ],
)
def test_any_order_with_delays(world, num_ranks):
    compared = world(num_ranks).run(stress.run, CALLS, 7, 0.02, deadline_s=110)
    assert min(compared) > CALLS  # rows were there to be compared
