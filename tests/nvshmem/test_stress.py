"""Nothing goes wrong once when T, routing, order of calls and speed of ranks change all the time.

HYBRID_EP_STRESS_CALLS makes it longer; 1,000 is what a release is tested with.
"""

import os

import pytest

from tests.nvshmem.shapes import SHAPES
from tests.ranks import stress

CALLS = int(os.environ.get("HYBRID_EP_STRESS_CALLS", "100"))


@pytest.mark.parametrize("shape", ("2x1", "2x2", "3x2"))
def test_any_order_with_delays(world, shape):
    nodes, ranks_per_node = SHAPES[shape]
    compared = world(nodes * ranks_per_node).run(
        stress.run, CALLS, 7, 0.02, ranks_per_node, deadline_s=110
    )
    assert min(compared) > CALLS  # rows were there to be compared
