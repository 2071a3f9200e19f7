"""A peer that dies, stays away, comes late or does something else: an error that names it."""

import pytest

from hybrid_ep import Config
from tests import faults
from tests.faults import each_phase, two_or_three
from tests.ranks import mistakes

FIRST_CALL = 5  # after two routes and two dispatches
PATIENT = {"config": Config(timeout_s=20)}
IMPATIENT = {"config": Config(timeout_s=1)}


def told(seen):
    assert seen["call"] == FIRST_CALL
    assert f"(call {FIRST_CALL}): " in seen["error"], "no channels here"


def told_of_another_call(seen):
    told(seen)
    assert "made another call" in seen["error"]


@two_or_three
@each_phase
def test_peer_stays_away(fresh_world, phase, num_ranks):
    faults.stays_away(fresh_world(num_ranks), phase, IMPATIENT, told)


@two_or_three
@each_phase
def test_peer_dies(fresh_world, phase, num_ranks):
    faults.dies(fresh_world(num_ranks), phase, IMPATIENT, told)


OTHER_CALLS = {
    "combine_meets_dispatch": (mistakes.combine, mistakes.dispatch),
    "dispatch_meets_combine": (mistakes.dispatch, mistakes.combine),
    "dispatch_meets_route": (mistakes.dispatch, mistakes.route),
    "bf16_meets_fp32": (mistakes.dispatch, mistakes.dispatch_of_wider_rows),
    "weights_meet_none": (mistakes.dispatch_with_weights, mistakes.dispatch),
}


@pytest.mark.parametrize("theirs, last", OTHER_CALLS.values(), ids=OTHER_CALLS)
@two_or_three
def test_peer_makes_another_call(fresh_world, theirs, last, num_ranks):
    sizes = {**PATIENT, "scale_bytes": 64}  # room for rows of fp32
    pool = fresh_world(num_ranks)
    text = faults.makes_another_call(pool, theirs, last, sizes, told_of_another_call)
    assert "made another call" in text


def test_DeepEP_604_too_many_tokens_on_one_rank(fresh_world):
    pool = fresh_world(2)
    outcomes = pool.outcomes(mistakes.fault, mistakes.route, mistakes.too_many_tokens, IMPATIENT)
    faults.check_named(outcomes, "route", told)
    assert outcomes[1].error is None


def test_DeepEP_570_late_peer_is_waited_for(world):
    faults.is_late(world(2), PATIENT)


def test_Automodel_2686_exit_without_destroy(fresh_world):
    pool = fresh_world(2)
    pool.run(leave_buffers_behind)
    assert pool.close() == [0, 0]


KEPT = []


def leave_buffers_behind(me):
    KEPT.append(mistakes.Call(me))
