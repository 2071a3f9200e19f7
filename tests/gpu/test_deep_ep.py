"""HybridEPBuffer in CUDA graphs, and tokens with too many experts, which a GPU finds late."""

import pytest

from tests.ranks import deep_ep

pytestmark = pytest.mark.not_on("nodes", why="it chooses its backend itself: here that is nvlink")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_graph_outlives_the_growth_of_its_buffer(world, num_ranks):
    assert world(num_ranks).run(deep_ep.call, "captured") == [[]] * num_ranks


@pytest.mark.parametrize("non_blocking", [True, False])
def test_a_token_with_more_experts_than_topk(world, non_blocking):
    for told in world(2).run(deep_ep.call, "more_experts_than_topk", non_blocking):
        late, later = told
        assert "a token has 5 experts, more than topk=2, as configured" in later
        assert late == ("" if non_blocking else later)
