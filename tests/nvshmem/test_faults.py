"""A peer on another node that dies, stays away or does something else: an error that names it."""

import pytest

from hybrid_ep import Config
from tests import faults
from tests.conftest import num_gpus
from tests.faults import each_phase
from tests.gpu.test_faults import IMPATIENT, OTHER_CALLS, told_of
from tests.ranks import mistakes

# ranks, ranks of a node; the last rank is the one at fault
SHAPES = {"2x1": (2, 1), "3x1": (3, 1), "2x2": (4, 2)}


@pytest.fixture(params=SHAPES)
def shape(request):
    ranks, gpus = SHAPES[request.param][0], num_gpus()
    if ranks > gpus and ranks % gpus:
        pytest.skip(f"NVSHMEM needs equally many ranks on each GPU, these are {ranks} on {gpus}")
    return request.param


def divided(shape):
    # longer than elsewhere: the first Buffer makes a round trip while kernels are being loaded
    return {**IMPATIENT, "config": Config(timeout_s=3), "ranks_per_node": SHAPES[shape][1]}


@each_phase
def test_peer_stays_away(fresh_world, phase, shape):
    pool = fresh_world(SHAPES[shape][0])
    faults.stays_away(pool, phase, divided(shape), told_of("no signal"))


@each_phase
def test_peer_dies(fresh_world, phase, shape):
    pool = fresh_world(SHAPES[shape][0])
    faults.dies(pool, phase, divided(shape), told_of("no signal"))


@each_phase
def test_a_peer_that_passes_words_on_stays_away(fresh_world, phase):
    # rank 0 hears of rank 3 through rank 1, and yet names rank 1
    faults.stays_away(fresh_world(4), phase, divided("2x2"), told_of("no signal"), victim=1)


@pytest.mark.parametrize("phase", ("dispatch", "combine"))
def test_peer_dies_while_others_wait_for_others(fresh_world, phase):
    # of one token, so that nearly everybody waits for somebody who waits
    narrow = Config(
        timeout_s=3, network_channels=1, network_chunk_tokens=1, network_window_chunks=1
    )
    faults.dies(fresh_world(4), phase, {**divided("2x2"), "config": narrow}, told_of("no signal"))


@pytest.mark.parametrize("theirs, last, reason", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_peer_makes_another_call(fresh_world, theirs, last, reason):
    faults.makes_another_call(fresh_world(2), theirs, last, divided("2x1"), told_of(reason))


def test_expert_out_of_range(fresh_world):
    (text,) = fresh_world(1).run(mistakes.expert_out_of_range)
    assert "topk_idx must lie in [-1, num_experts=" in text
    assert "at token 3, slot 1" in text


@pytest.mark.gpus(2)
def test_three_ranks_on_two_gpus_are_refused(fresh_world):
    if num_gpus() != 2:
        pytest.skip(f"three ranks share {num_gpus()} GPUs evenly")
    for text in fresh_world(3).run(mistakes.build, {"ranks_per_node": 1}):
        assert "NVSHMEM needs the same number of ranks on each GPU in use, got 2 on GPU" in text
