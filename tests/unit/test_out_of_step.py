"""Calls of the torch backend that stop or meet others' messages: a fault, and never data."""

import functools
import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hybrid_ep import PeerError
from hybrid_ep.backends.torch import host_memory
from hybrid_ep.backends.torch.messages import Messages, tag_of
from hybrid_ep.backends.turns import Turn
from hybrid_ep.group import Group
from tests import faults
from tests.checks import same_bytes, same_results
from tests.faults import PHASES
from tests.ranks import mistakes, out_of_step
from tests.ranks.out_of_step import CASE

two_or_three = pytest.mark.parametrize("num_ranks", [2, 3])


@pytest.fixture
def plain(world):
    """What all verbs give of a case where nothing goes wrong, by rank."""
    return lambda case=CASE: world(case.num_ranks).run(out_of_step.plain, case)


# ---- a peer that died before the call


@pytest.mark.parametrize("phase", PHASES)
@two_or_three
def test_peer_dead_before_the_call_is_a_peer_error(fresh_world, phase, num_ranks):
    pool = fresh_world(num_ranks)
    theirs = functools.partial(out_of_step.after_the_death, verb=PHASES[phase])
    outcomes = pool.outcomes(
        mistakes.fault, theirs, out_of_step.tell_and_die, {"config": out_of_step.with_deadline(20)}
    )
    faults.check_named(outcomes, phase, lambda seen: None)
    assert outcomes[-1].exit_code == -9


# ---- a call that stops: where a rank raises, and at which call of that function

MODULE = "hybrid_ep.backends.torch.backend"
CALLS = "hybrid_ep.backends.torch.agreement:Calls"
FRESH = "hybrid_ep.backends.torch.fresh:Fresh"
MEMORY = "hybrid_ep.backends.torch.host_memory"
MESSAGES = "hybrid_ep.backends.torch.messages:Messages"

STOPPED = {
    "between_route_and_dispatch": (
        mistakes.route,
        (FRESH, "assign_rows", 1),
        "KeyboardInterrupt",
        True,
    ),
    "route_by_messages": (mistakes.route, (MESSAGES, "gather", 1), "MemoryError", False),
    "dispatch_by_messages": (mistakes.dispatch, (MESSAGES, "send", 1), "RuntimeError", False),
    "combine_before_sums_go_home": (
        mistakes.combine,
        (MODULE, "sum_in_order", 1),
        "OutOfMemoryError",
        True,
    ),
    "starting_the_second_message": (
        mistakes.combine,
        ("torch.distributed", "isend", 1),
        "OutOfMemoryError",
        True,
    ),
    "waiting_for_a_message": (
        mistakes.combine,
        (MESSAGES, "_deadline", 2),
        "KeyboardInterrupt",
        True,
    ),
    "published_and_not_told": (mistakes.dispatch, (CALLS, "tell", 1), "MemoryError", True),
    "making_shared_memory": (
        mistakes.dispatch_of_wider_rows,
        (MEMORY, "_make_memory", 1),
        "KeyboardInterrupt",
        True,
    ),
}


@pytest.mark.parametrize("verb, place, cause, shares", STOPPED.values(), ids=STOPPED)
def test_a_call_that_stops_between_messages_is_the_last(fresh_world, verb, place, cause, shares):
    first, peer = fresh_world(2).run(out_of_step.stop, verb, place, cause, shares)
    assert first["first"][0] == cause
    (kind, text), *others = first["later"]
    assert kind == "RuntimeError"
    assert text.startswith("an earlier call stopped between its messages, in ")
    assert f"because of {cause}" in text
    assert others == [(kind, text)] * 2
    assert peer["first"][0] == "PeerError"
    assert peer["peer"] == 0


IN_STEP = {
    "dispatch_before_its_messages": ("nothing", (MODULE, "as_words", 1), True),
    "agreement_before_its_messages": ("nothing", (CALLS, "tell", 1), False),
    "sizes_before_its_messages": ("nothing", ("torch", "tensor", 1), False),
    "route_after_its_messages": ("route", (FRESH, "assign_rows", 1), True),
    "dispatch_after_its_messages": ("dispatch", ("torch", "index_select", 2), False),
    "combine_after_its_messages": ("combine", (MODULE, "sum_at_home", 1), True),
}


@pytest.mark.parametrize("cause", ["MemoryError", "RuntimeError"])
@pytest.mark.parametrize("verb, place, shares", IN_STEP.values(), ids=IN_STEP)
def test_a_call_that_stops_with_no_message_under_way_is_not(world, verb, place, shares, cause):
    for rank, seen in enumerate(world(2).run(out_of_step.stop_in_step, verb, place, cause, shares)):
        assert seen["error"] == (cause if rank == 0 else "NoneType")
        same_results(seen["after"], seen["before"], f"rank {rank}")


# ---- no shared memory


@pytest.mark.parametrize("on_rank", [0, 1])
@pytest.mark.parametrize("obstacle", out_of_step.OBSTACLES)
def test_no_shared_memory_on_one_rank_is_messages_on_all(world, plain, obstacle, on_rank):
    if on_rank == 1 and obstacle in ("small_files", "no_memfd", "no_size", "no_second_memory"):
        on_rank = 0  # only rank 0 makes memory
    case = replace(CASE, hidden=256)
    expected = plain(case)
    results = world(2).run(out_of_step.without_shared_memory, obstacle, on_rank, case)
    for rank, got in enumerate(results):
        assert not got["shared"]
        assert got["more files"] == 0
        same_results(got["first"], expected[rank], f"rank {rank}")
        same_results(got["second"], expected[rank], f"rank {rank}, later")


@pytest.mark.parametrize("fails_at", [1, 2])
def test_no_descriptor_is_left_where_a_peer_dies_while_memory_is_shared(fails_at):
    class Gone:
        group, messages = SimpleNamespace(rank=0, num_ranks=2), 0

        def __call__(self, sends, recvs):
            self.messages += 1
            if self.messages == fails_at:
                raise PeerError(rank=0, peer=1, phase="route", call=1, reason="gone")

    before = out_of_step.open_files()
    with pytest.raises(PeerError, match="gone"):
        host_memory.map_together(Gone(), 4096)
    assert out_of_step.open_files() == before


# ---- messages of others


@pytest.mark.parametrize("shares", [True, False], ids=["shared_memory", "messages"])
def test_messages_of_the_user_on_the_group_stay_apart(world, plain, shares):
    expected = plain()
    for rank, got in enumerate(world(2).run(out_of_step.beside_messages_of_the_user, CASE, shares)):
        same_results(got["verbs"], expected[rank], f"rank {rank}")
        assert got["messages"] == [True] * 5


def test_two_threads_with_a_buffer_each_stay_apart(world, plain):
    cases = [CASE, replace(CASE, seed=1)]
    expected = [plain(case) for case in cases]
    for rank, by_thread in enumerate(world(2).run(out_of_step.two_threads, cases, 10)):
        for number, rounds in enumerate(by_thread):
            assert len(rounds) == 10, f"thread {number} of rank {rank} stopped"
            for got in rounds:
                same_results(got, expected[number][rank], f"thread {number} of rank {rank}")


def test_tags_of_buffers_differ_and_are_no_small_numbers():
    tags = {tag_of(number) for number in range(1000)}
    assert len(tags) == 1000
    assert min(tags) >= 1 << 24
    assert tag_of((1 << 31) - 1) < 1 << 31


# ---- two threads on one Buffer


@pytest.mark.parametrize("verb", ["route", "dispatch", "fresh", "combine"])
@two_or_three
def test_a_second_thread_is_refused_and_the_first_goes_on(world, verb, num_ranks):
    results = world(num_ranks).run(out_of_step.second_thread, verb)
    for rank, got in enumerate(results):
        if rank == 0:
            assert len(got["refused"]) == 4
            for text in got["refused"]:
                assert text.startswith("another thread is in a call of this Buffer; ")
        same_bytes(got["moved"], got["expected"], f"rank {rank}")


def test_a_turn_that_an_interrupt_left_open_is_taken_again():
    turn = Turn()
    turn.__enter__()  # and no exit
    with turn:
        pass
    taken = []

    def take():
        with turn:
            taken.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert taken == [True]


# ---- deadlines


def test_the_deadline_is_that_of_the_buffer_and_not_of_its_group(fresh_world, plain):
    expected = plain()
    for rank, got in enumerate(fresh_world(2).run(out_of_step.later_than_the_group)):
        same_results(got, expected[rank], f"rank {rank}")


def test_the_shortest_deadline_is_not_that_of_the_group(fresh_world):
    told, _ = fresh_world(2).run(out_of_step.sooner_than_a_millisecond, deadline_s=20)
    assert "nothing came within 1e-09 s" in told


def test_without_a_deadline_the_error_names_none():
    exchange = Messages(Group(), math.inf, tag_of(0))
    assert exchange.in_time() == ""
    assert exchange._deadline().days == 3650
