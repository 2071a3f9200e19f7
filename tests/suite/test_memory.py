"""Memory given back and taken again by release() and restore(), and none that grows with T * E.

What a GPU gets back is tested in tests/gpu/test_memory.py.
"""

import pytest
import torch

import hybrid_ep
from tests.cases import Case
from tests.checks import same_bytes
from tests.ranks import memory

CASE = Case("release", tokens=(20, 13), topk=3)
RELEASED = "this hybrid_ep.Buffer was released: restore() brings it back, on all ranks"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_slime_release_and_restore(world, num_ranks):
    results = world(num_ranks).run(memory.release_and_restore, CASE.on(num_ranks))
    for rank, got in enumerate(results):
        assert got["refused"] == dict.fromkeys(got["refused"], RELEASED)
        assert "released" in got["described"]
        assert got["same id"]
        for name, (now, before) in got["pairs"].items():
            same_bytes(now, before, f"{name} on rank {rank}")
        assert got["after destroy"] == ["this hybrid_ep.Buffer was destroyed"] * 2


on_the_cpu = pytest.mark.only_on("torch_cpu", why="the memory that ranks share is the host's there")


@on_the_cpu
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_nothing_shared_is_mapped_while_released(world, num_ranks):
    for got in world(num_ranks).run(memory.release_and_restore, CASE.on(num_ranks)):
        held = got["held"]
        assert held["released"] == 0, "what the ranks share is still mapped"
        assert (held["before"] > 0) == (num_ranks > 1)


@on_the_cpu
def test_slime_release_every_step(world):
    for held in world(2).run(memory.release_many_times, CASE, 5):
        assert held == [0] * 5


def test_slime_a_failure_is_raised_by_release_on_all_ranks(world):
    first, second = world(2).run(memory.release_after_a_failure, CASE)
    assert first == ["rank 0 waited for rank 1 in combine (call 7): made up"] * 3
    assert second == [f"a call on rank 0 failed: {first[0]}"] * 3


def test_slime_a_compiled_graph_goes_on_after_restore(alone):
    buffer = alone.buffer(**CASE.on(1).sizes())
    x, topk_idx, weights, _ = CASE.on(1).leaves(0, alone.device, needs_grad=False)

    def layer(x: torch.Tensor) -> torch.Tensor:
        out = hybrid_ep.dispatch(buffer, x, topk_idx, weights, max_rows=64)
        return hybrid_ep.combine(buffer, out.rows, out.handle, weights=out.weights)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    before = compiled(x)
    buffer.release()
    with pytest.raises(RuntimeError, match="was released"):
        compiled(x)
    buffer.restore()
    same_bytes(compiled(x), before, "y after the restore")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.not_on("nvlink", "nodes", why="their route makes the layout and nothing else")
@pytest.mark.parametrize("experts_per_rank", [8, 512])
def test_DeepEP_716_routing_makes_no_map_of_tokens_by_experts(world, experts_per_rank):
    """It would have a byte for each token of all ranks and each expert: up to 4 MB here."""
    case = Case("map", tokens=(2048,), topk=2, experts_per_rank=experts_per_rank, hidden=8)
    tokens, slots = 2 * 2048, 2
    for largest in world(2).run(memory.largest_of_routing, case):
        assert largest >= tokens * slots, "nothing was seen"
        # the layout and a few int64 a slot, whatever the number of experts
        assert largest <= 64 * tokens * slots
