"""What only several nodes have: a job of NVSHMEM, windows, and ranks that pass words on."""

import os

import pytest

from hybrid_ep import Config
from tests import faults, oracle
from tests.cases import Case
from tests.checks import same_bytes
from tests.faults import each_phase
from tests.launch import NETWORK
from tests.ranks import handles, mistakes, sizes

pytestmark = pytest.mark.only_on("nodes", why="it is about several nodes")


# ---- the job


def test_one_job_serves_every_division_into_nodes(world):
    """The ranks stay, and what is a node changes from Buffer to Buffer."""
    for ranks_per_node in (1, 2):
        case = Case("divided").on(4, ranks_per_node)
        expected = oracle.dispatch(case)
        for rank, results in enumerate(world(4).run(handles.many_buffers, case, 2)):
            for rows in results:
                what = f"rows of rank {rank}, {ranks_per_node} ranks per node"
                same_bytes(rows, expected[rank].rows, what)


@pytest.mark.skipif(NETWORK in os.environ, reason="only NVSHMEM itself has one job per process")
def test_a_second_job_is_refused_by_name(world):
    assert world(4).run(handles.other_group) == [
        f"a process takes part in one NVSHMEM job, that of its first Buffer: the ranks were "
        f"[0, 1, 2, 3], this Buffer has {[0, 1] if rank < 2 else [2, 3]}"
        for rank in range(4)
    ]


@pytest.mark.gpus(2)
def test_gpus_with_different_numbers_of_ranks_are_refused(fresh_world):
    for text in fresh_world(3).run(mistakes.build_on_two_gpus):
        assert "NVSHMEM needs the same number of ranks on each GPU in use, got 2 on GPU" in text


# ---- rows of a model's size, through windows of every size: right, and never at a standstill

# channels, tokens of a chunk, chunks of a channel, SMs of each kernel; numbers of tokens
WINDOWS = {
    "one_slot_of_one_token": (1, 1, 1, 3, [130, 33]),
    "slots_of_odd_chunks": (3, 5, 2, 7, [333, 0, 1001]),
    "slots_of_a_warp": (2, 32, 1, 16, [333, 1001]),
    "as_it_is": (8, 8, 4, 32, [4095, 1, 2500]),
}


@pytest.mark.parametrize("num_ranks, ranks_per_node", [(2, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("window", WINDOWS)
def test_any_window(world, window, num_ranks, ranks_per_node):
    channels, chunk_tokens, chunks, num_sms, tokens = WINDOWS[window]
    config = Config(
        network_channels=channels,
        network_chunk_tokens=chunk_tokens,
        network_window_chunks=chunks,
        num_sms_publish=num_sms,
        num_sms_dispatch=num_sms,
        num_sms_combine=num_sms,
        timeout_s=20,
    )
    pool = world(num_ranks)
    for compared in pool.run(sizes.compare_with_torch, tokens, 1, config, ranks_per_node):
        assert compared > sum(tokens)


# ---- faults among four ranks, two on each node


def told_of_no_signal(seen):
    assert "channel" in seen["error"]
    assert "no signal" in seen["error"]


@each_phase
def test_a_peer_that_passes_words_on_stays_away(world, phase):
    # rank 0 hears of rank 3 through rank 1, and yet names rank 1
    faults.stays_away(world(4), phase, {"config": Config(timeout_s=3)}, told_of_no_signal, victim=1)


@pytest.mark.parametrize("phase", ("dispatch", "combine"))
def test_peer_dies_while_others_wait_for_others(fresh_world, phase):
    # of one token, so that nearly everybody waits for somebody who waits
    narrow = Config(
        timeout_s=3, network_channels=1, network_chunk_tokens=1, network_window_chunks=1
    )
    faults.dies(fresh_world(4), phase, {"config": narrow}, told_of_no_signal)
