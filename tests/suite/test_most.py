"""dispatch(most=): a token with more experts than slots is an error on every rank, at once."""

import pytest

from tests.ranks import most
from tests.targets import SAME_OPS

of_one_node = pytest.mark.not_on("nodes", why=SAME_OPS)
FEW = [[1, 2, 0, 2], [2] * 17, [], [1]]
ONE = [[1, 2, 0, 2], [2] * 16 + [5], [], [1]]
SEVERAL = [[1, 3], [2, 5, 2], [], [4]]
ALL = [[3], [3], [3], [3]]


def guilty(counts):
    """What a rank may name: a rank with such tokens, and the most experts of one of them."""
    return {(rank, max(each)) for rank, each in enumerate(counts) if max(each, default=0) > 2}


@pytest.mark.parametrize(
    ("as_ops", "max_rows"), [(False, None), (False, 400), (True, None)], ids=["exact", "400", "ops"]
)
@pytest.mark.parametrize(
    ("counts", "topk"),
    [
        pytest.param(ONE[:1] + ONE[1:2], 2, id="one_of_two"),
        pytest.param(ONE, 2, id="one_of_four"),
        pytest.param(SEVERAL, 2, id="several"),
        pytest.param(ALL, 2, id="all_alike"),
        pytest.param([[0, 3]], 2, id="alone"),
        # which the Buffer would have slots for
        pytest.param(SEVERAL[:2], 5, id="narrow_routing"),
    ],
)
def test_every_rank_hears_of_a_token_with_too_many_experts(world, counts, topk, as_ops, max_rows):
    pool = world(len(counts))
    named = guilty(counts)
    for first, second, third in pool.run(most.refused, counts, topk, max_rows, as_ops):
        assert first in named and second in named
        if pool.target.has_kernels:
            assert first == second == third, "a fault is for good"
        else:
            assert isinstance(third, int), "nothing was sent, so the ranks are in step"


@pytest.mark.not_on("torch_cpu", "torch_gpu", why="there the call itself raises")
@pytest.mark.parametrize("counts", [ONE[:2], ONE], ids=["2_ranks", "4_ranks"])
def test_a_grouped_product_behind_a_refused_dispatch_finds_no_rows(world, counts):
    for numbers in world(len(counts)).run(most.left_behind, counts):
        assert all(value == 0 for each in numbers for value in each), numbers


@pytest.mark.parametrize(
    ("way", "num_ranks"),
    [("eager", 1), ("eager", 2), ("eager", 4), pytest.param("compiled", 2, marks=of_one_node)],
)
@pytest.mark.parametrize("max_rows", [None, 400])
def test_where_all_have_room_nothing_changes(world, num_ranks, max_rows, way):
    assert world(num_ranks).run(most.accepted, FEW[:num_ranks], max_rows, way) == [True] * num_ranks
