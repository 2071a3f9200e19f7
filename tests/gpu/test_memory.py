"""Release gives a GPU's memory back while the Buffer lives, restore takes it again."""

import pytest
import torch

from hybrid_ep.layout.buffer_layout import symmetric_regions
from hybrid_ep.shape import Shape
from tests.cases import Case
from tests.ranks import memory

pytestmark = [
    pytest.mark.exclusive,
    pytest.mark.not_on("nodes", why="NVSHMEM keeps what its heap has grown to"),
]
# tens of MB of symmetric memory: allocations are rounded to 2 MiB
CASE = Case("release", tokens=(1000, 771), max_tokens=4096, topk=4, hidden=1024)


def symmetric_bytes(case: Case) -> int:
    return sum(
        symmetric_regions(
            Shape(
                num_ranks=case.num_ranks,
                num_experts=case.num_experts,
                max_tokens=case.max_tokens,
                hidden=case.hidden,
                topk=case.topk,
                dtype=case.dtype,
            )
        ).values()
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_slime_release_gives_back_and_restore_takes(world, num_ranks):
    case = CASE.on(num_ranks)
    results = world(num_ranks).run(memory.release_and_restore, case)
    ranks_of_a_gpu = -(-num_ranks // torch.cuda.device_count())
    ours = symmetric_bytes(case) * ranks_of_a_gpu
    for got in results:
        held = got["held"]
        assert held["before"] - held["released"] >= ours, held
        assert held["restored"] - held["released"] >= ours, held


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_slime_release_every_step(world, num_ranks):
    case = CASE.on(num_ranks)
    for held in world(num_ranks).run(memory.release_many_times, case, 6):
        assert held[-1] - held[1] < symmetric_bytes(case) // 2, held
