"""With max_rows a CUDA graph holds dispatch and combine, and each replay routes anew."""

import pytest

from tests.gpu.test_graphs import CASE, check_replay
from tests.nvshmem.shapes import on


@pytest.mark.parametrize("shape", ("2x1", "2x2"))
def test_replay_with_new_routing(world, shape):
    case = on(CASE, shape)
    check_replay(world(case.num_ranks), case)
