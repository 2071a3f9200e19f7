"""HybridEPBuffer beside plain torch: every call, its backward, growth, and what it learns."""

import pytest

from tests.ranks import deep_ep

pytestmark = pytest.mark.not_on(
    "torch_gpu", "nodes", why="it chooses its backend itself: on one host with GPUs that is nvlink"
)
RANKS = (2, 4)


def run(world, num_ranks, name, *args):
    return world(num_ranks).run(deep_ep.call, name, *args)


@pytest.mark.parametrize("pad", [1, 16])
@pytest.mark.parametrize("routing", ["map", "indices", "indices and probs"])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_round_trip(world, num_ranks, routing, pad):
    assert run(world, num_ranks, "round_trip", routing, pad) == [[]] * num_ranks


@pytest.mark.parametrize("pad", [1, 8])
@pytest.mark.parametrize("room", ["enough", "more", "less"])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_number_of_rows_without_a_wait(world, num_ranks, room, pad):
    assert run(world, num_ranks, "budget", room, pad) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", ["handles", "gradients", "fp8", "repeated_indices"])
def test_beside_plain_torch(world, num_ranks, name):
    assert run(world, num_ranks, name) == [[]] * num_ranks


@pytest.mark.not_on("nvlink", why="virtual nodes on one host are for the torch backend here")
@pytest.mark.parametrize("routing", ["map", "indices"])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_without_permute(world, num_ranks, routing):
    assert run(world, num_ranks, "without_permute", routing) == [[]] * num_ranks


LEARNT = "a token has 5 experts, more than topk=4, learnt from the first routing map"


@pytest.mark.parametrize(
    ("maps", "topk", "says"),
    [
        pytest.param([[[1], [3]], [[4], [1]], [[0], [5]]], None, [4, 4, LEARNT], id="rounded_up"),
        pytest.param([[[0], []], [[1], [1]], [[2], [0]]], None, [1, 1, "has 2"], id="nothing_yet"),
        pytest.param([[[5], [1]], [[6], [6]]], None, [6, 6], id="at_most_all_experts"),
        pytest.param([[[1], [1]], [[3], [2]], [[1], [4]]], 3, [3, 3, "as conf"], id="configured"),
        pytest.param([[[1], [1]]], 100, [6], id="configured_beyond_the_experts"),
    ],
)
def test_the_number_of_experts_is_learnt(world, maps, topk, says):
    for told in run(world, 2, "topk_of_maps", maps, topk):
        assert len(told) == len(says)
        for got, wanted in zip(told, says, strict=True):
            assert wanted in got if isinstance(wanted, str) else got == wanted, told


def test_indices_tell_their_number(world):
    assert run(world, 2, "more_indices") == [[1, 3, 3]] * 2


@pytest.mark.parametrize(
    ("max_tokens", "first", "then"),
    [(None, 11, 128), (100, 100, 100), (64, 64, "most the configured max_tokens=64 tokens, got 7")],
)
def test_sizes(world, max_tokens, first, then):
    for rank, told in enumerate(run(world, 2, "sizes", max_tokens)):
        assert told["at first"] == first
        got = told["then"]
        assert then in got if isinstance(then, str) else got == then
        assert told["place"] == (rank, rank, 0, 1)


@pytest.mark.not_on("nvlink", why="nvlink serves one node")
@pytest.mark.parametrize(
    ("variable", "argument", "ranks"), [("", None, 4), ("", 2, 2), ("1", 2, 1), ("72", None, 4)]
)
def test_ranks_of_a_node(world, variable, argument, ranks):
    for rank, told in enumerate(run(world, 4, "domain", variable, argument)):
        assert told["ranks"] == ranks
        assert told["nodes"] == (4 // ranks, 4 // ranks)
        assert told["node"] == (rank // ranks, rank // ranks)
        assert told["local"] == (rank % ranks, rank % ranks)


def test_mistakes(world):
    for told in run(world, 2, "mistakes"):
        assert told.pop() == "True"
        for got, wanted in zip(
            told,
            (
                "ValueError: non_blocking needs num_permuted_tokens",
                "ValueError: dispatch_with_permute needs routing_map, topk_idx and",
                "ValueError: dispatch_with_permute needs routing_map, topk_idx and",
                "ValueError: num_permuted_tokens must be that of the handle",
                "TypeError: handle must be one of dispatch_with_permute, got one of type tuple",
                "TypeError: handle must be one of dispatch_with_permute, got one of type None",
                "ValueError: dispatch needs routing_map",
                "ValueError: combine needs the handle of its dispatch, got None",
            ),
            strict=True,
        ):
            assert got.startswith(wanted), got
