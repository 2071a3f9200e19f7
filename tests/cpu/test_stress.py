"""Calls in changing order on ranks of changing speed: mori#93, #80, DeepEP#682."""

import pytest

from tests.ranks import stress


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_order_with_delays(world, num_ranks):
    compared = world(num_ranks).run(stress.run, 100, 7, 0.01)
    assert min(compared) > 100  # rows were there to be compared
