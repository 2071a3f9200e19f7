"""What the kernels meet outside the plain case: odd pointers, streams, failures half way."""

import pytest
import torch

from tests.ranks import conditions, mistakes

one_node = pytest.mark.not_on("nodes", why="the copy engine publishes on one node alone")
of_the_gpu = pytest.mark.not_on("nodes", why="the memory is of NVSHMEM's heap, which keeps it")

REFUSED = {
    "a wider dispatch": "bytes of a row, its scales and weights must be at most",
    "wider scales": "bytes of a row, its scales and weights must be at most",
    "a row of 20 bytes": "must be a multiple of 16, got 20",
    "a wider combine": "bytes of a row to be summed must be at most 1024, got 2048",
    "a sum of rows of 20 bytes": "must be a multiple of 16, got 20",
    "too many tokens": "tokens of x must be at most 96, got 97",
    "align": "align times the experts of a rank must be at most 1073741823",
}


def test_scales_at_an_address_that_is_no_multiple_of_4(world):
    world(2).run(conditions.scales_at_any_address)


def test_sizes_that_reach_the_runtime_past_all_rules_are_refused_before_a_launch(world):
    for seen in world(2).run(conditions.refused_by_the_runtime):
        for call, text in REFUSED.items():
            assert seen[call].startswith("ValueError: "), (call, seen[call])
            assert text in seen[call], (call, seen[call])


@pytest.mark.parametrize("num_ranks", (1, 2, 3))
def test_out_of_memory_between_the_parts_of_an_exact_dispatch(world, num_ranks):
    """The rank that ran out of memory raises; all batches hold the values of their own."""
    for rank, seen in enumerate(world(num_ranks).run(conditions.out_of_memory_between_the_parts)):
        assert ("OutOfMemoryError" in seen["raised"]) == (rank == num_ranks - 1)
        assert seen["values"] == [[2.0], [3.0], [1.0]]


@pytest.mark.exclusive
def test_interrupt_while_an_exact_dispatch_waits(world):
    first, *_ = results = world(2).run(conditions.interrupted_while_it_waits_for_the_size)
    assert first["raised"] == "KeyboardInterrupt"
    assert first["waited"] < 1.9, "the interrupt was heard when the peer came, not before"
    assert [seen["values"] for seen in results] == [[2.0]] * 2


@pytest.mark.parametrize("verb", ("pull", "dispatch", "combine"))
def test_a_launch_that_fails_ends_the_buffer_and_peers_hear_who_failed(world, verb):
    first, last = world(2).run(conditions.a_launch_fails, verb)
    assert last["raised"] == "RuntimeError: kernel launch: out of memory"
    for text in last["later"]:
        assert "an earlier call failed half way (RuntimeError: kernel launch: out of" in text
    assert first["raised"].startswith("PeerError: rank 0 waited for rank 1 in ")
    assert "the peer makes no more calls, because it ran out of memory" in first["raised"]
    assert first["later"] == [first["raised"]] * 4
    assert first["waited"] < 20, "the deadline passed before the peer was heard"


def test_another_thread_calls_while_an_exact_dispatch_waits(world):
    seen, _ = world(2).run(conditions.another_thread_calls)
    assert seen.startswith("RuntimeError: another thread is in a call of this Buffer")


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_two_streams_inside_one_capture(world, num_ranks):
    assert world(num_ranks).run(conditions.streams_of_one_capture) == [0] * num_ranks


def test_a_handle_used_on_another_stream_and_dropped(world):
    world(1).run(conditions.a_handle_dropped_after_its_use_on_another_stream)


def test_two_buffers_of_100_sms_launched_in_opposite_order(world):
    world(2).run(conditions.buffers_in_opposite_order, 10)


@one_node
@pytest.mark.parametrize("num_sms", (4, 16, 32, 48))
def test_tokens_published_while_the_routing_waits_for_a_late_peer(world, num_sms):
    world(2).run(conditions.routing_that_ends_late, num_sms, 12)


@of_the_gpu
@pytest.mark.exclusive
@pytest.mark.parametrize("where", ("Runtime", "open_peers"))
def test_a_construction_that_fails_on_one_rank_loses_no_memory(fresh_world, where):
    for seen in fresh_world(2).run(conditions.constructions_that_fail, where, 4):
        assert all("rank 1: no memory left" in text for text in seen["texts"])
        assert seen["held"][-1] - seen["held"][0] < seen["symmetric"] // 2, seen["held"]


@of_the_gpu
@pytest.mark.exclusive
def test_a_restore_that_fails_on_one_rank_loses_no_memory(fresh_world):
    for seen in fresh_world(2).run(conditions.restores_that_fail, 4):
        assert all("rank 1: no memory left" in text for text in seen["texts"])
        assert seen["held"][-1] - seen["held"][0] < seen["symmetric"] // 2, seen["held"]


@of_the_gpu
@pytest.mark.exclusive
def test_the_memory_that_a_dead_peer_mapped_is_given_back(fresh_world):
    outcomes = fresh_world(2).outcomes(conditions.a_peer_died, "")
    assert outcomes[1].exit_code == -9
    seen = outcomes[0].value
    assert outcomes[0].error is None, outcomes[0].error
    # on a shared GPU the peer's part goes as well, which this rank had mapped
    parts = 1 if torch.cuda.device_count() > 1 else 2
    assert seen["freed"] > (parts - 0.5) * seen["symmetric"], seen


@of_the_gpu
@pytest.mark.exclusive
def test_ranks_that_destroy_one_after_the_other_lose_no_memory(fresh_world):
    for seen in fresh_world(2).run(conditions.closed_one_after_the_other):
        assert seen["after"] - seen["before"] < seen["symmetric"], seen


@pytest.mark.parametrize("timeout_s", conditions.NEVER.values(), ids=conditions.NEVER)
def test_a_deadline_of_never_is_never(world, timeout_s):
    assert world(2).run(conditions.late_beyond_any_deadline, timeout_s) == [""] * 2


def test_a_fault_that_warps_of_a_block_see_at_different_times(fresh_world):
    texts, _ = fresh_world(2).run(conditions.deadlines_that_pass_at_any_moment, 12)
    assert len(texts) == 12
    for text in texts:
        assert text.startswith("PeerError: rank 0 waited for rank 1 in "), text


def test_expert_out_of_range(world):
    (text,) = world(1).run(mistakes.expert_out_of_range)
    assert "topk_idx must lie in [-1, num_experts=" in text
    assert "at token 3, top-k slot 1" in text


@pytest.mark.parametrize("max_rows", [None, 256], ids=["exact", "bounded"])
def test_peers_of_a_rank_with_an_unknown_expert_hear_of_it(world, max_rows):
    told = world(3).run(mistakes.unknown_expert_on_rank_1, max_rows, deadline_s=60)
    (own, _) = told.pop(1)
    assert own.startswith("UnknownExpert: topk_idx must lie in [-1, num_experts="), own
    for text, seconds in told:
        assert "waited for rank 1 in " in text, text
        assert "no more calls, because its topk_idx names an expert that does not" in text, text
        assert seconds < mistakes.LONG_S / 2
