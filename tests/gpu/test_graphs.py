"""With max_rows a CUDA graph holds dispatch and combine, and each replay routes anew."""

from dataclasses import replace

import pytest
import torch

from tests import oracle
from tests.cases import Case
from tests.ranks import graphs, most

CASE = Case("graph", tokens=(64, 50, 33), topk=4, hidden=512, dtype=torch.float16)
MANY_TOKENS = replace(CASE, name="many_tokens", tokens=(2500, 2049, 33))
on_one_node = pytest.mark.not_on(
    "nodes", why="until it is captured the copy engine publishes tokens, on one node alone"
)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(CASE.on(ranks), id=f"{ranks}-few_tokens") for ranks in (1, 2, 3, 4)),
        *(
            pytest.param(MANY_TOKENS.on(ranks), id=f"{ranks}-many_tokens", marks=on_one_node)
            for ranks in (1, 2, 3)
        ),
    ],
)
def test_replay_with_new_routing(world, case):
    pool = world(case.num_ranks)
    seeds = [1, 2, 3]
    results = pool.run(graphs.replay, case, seeds)
    for place, seed in enumerate(seeds):
        for rank, want in enumerate(oracle.dispatch(replace(case, seed=seed))):
            got = results[rank][place]
            rows = len(want.rows)
            assert torch.equal(got["counts"], want.counts)
            assert torch.equal(got["rows"][:rows].view(torch.int16), want.rows.view(torch.int16))
            assert not got["rows"][rows:].any()


def test_exact_size_cannot_be_captured(world):
    for text in world(1).run(graphs.capture_exact, CASE.on(1)):
        assert "max_rows" in text


@pytest.mark.parametrize("counts", [[[3]], [[2, 1], [1, 5]], [[4], [], [3]]], ids=len)
def test_a_replay_with_a_token_of_too_many_experts_is_a_fault_on_every_rank(world, counts):
    for told in world(len(counts)).run(most.refused_in_a_graph, counts):
        assert told[0] == ""
        for text in told[1:]:
            assert "experts, more than its topk_idx has columns" in text
            assert "cannot be used any more" in text


@pytest.mark.parametrize("way", ["dropped", "destroyed"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_Buffer_that_ends_in_a_capture_leaves_it_whole(world, num_ranks, way):
    for seen in world(num_ranks).run(graphs.end_a_buffer_in_a_capture, CASE.on(num_ranks), way):
        assert seen == {"kept": 1, "kept after a call": 0}
