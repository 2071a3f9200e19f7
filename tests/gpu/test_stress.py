"""Nothing goes wrong once when T, routing, order of calls and speed of ranks change all the time.

HYBRID_EP_STRESS_CALLS makes it longer; 2,000 is what a release is tested with.
"""

import os

import pytest

from tests.ranks import stress

CALLS = int(os.environ.get("HYBRID_EP_STRESS_CALLS", "200"))


@pytest.mark.parametrize("num_ranks", (2, 3))
def test_any_order_with_delays(world, num_ranks):
    compared = world(num_ranks).run(stress.run, CALLS, 7, 0.02, deadline_s=110)
    assert min(compared) > CALLS  # rows were there to be compared
