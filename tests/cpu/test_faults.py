"""A peer that dies, stays away, comes late or does something else: an error that names it."""

import pytest

from hybrid_ep import Config
from tests.ranks import mistakes

FIRST_CALL = 3  # after the route and the dispatch of the call before
PATIENT = {"config": Config(timeout_s=20)}
IMPATIENT = {"config": Config(timeout_s=1)}


def check_named(outcomes, victim, phase):
    """All but the last rank tell the same story, and go on telling it until the Buffer is gone."""
    for rank, outcome in enumerate(outcomes[:victim]):
        assert outcome.error is None, outcome.error
        seen = outcome.value
        where = (seen["rank"], seen["peer"], seen["phase"])
        assert where == (rank, victim, phase), seen["error"]
        assert seen["call"] == FIRST_CALL
        told = f"rank {rank} waited for rank {victim} in {phase} (call {FIRST_CALL})"
        assert seen["error"].startswith(told)
        assert seen["again"] == [seen["error"]] * 3
        assert "destroyed" in seen["destroyed"]


PHASES = {"route": mistakes.route, "dispatch": mistakes.dispatch, "combine": mistakes.combine}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_peer_stays_away(fresh_world, phase, num_ranks):
    pool = fresh_world(num_ranks)
    outcomes = pool.outcomes(mistakes.fault, PHASES[phase], mistakes.stay_away, IMPATIENT)
    check_named(outcomes, num_ranks - 1, phase)
    assert pool.close() == [0] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_peer_dies(fresh_world, phase, num_ranks):
    pool = fresh_world(num_ranks)
    outcomes = pool.outcomes(mistakes.fault, PHASES[phase], mistakes.die, IMPATIENT)
    check_named(outcomes, num_ranks - 1, phase)
    assert outcomes[-1].exit_code == -9
    assert pool.close() == [0] * (num_ranks - 1) + [-9]


OTHER_CALLS = {
    "combine_meets_dispatch": (mistakes.combine, mistakes.dispatch),
    "dispatch_meets_combine": (mistakes.dispatch, mistakes.combine),
    "dispatch_meets_route": (mistakes.dispatch, mistakes.route),
    "bf16_meets_fp32": (mistakes.dispatch, mistakes.dispatch_of_wider_rows),
    "weights_meet_none": (mistakes.dispatch_with_weights, mistakes.dispatch),
}


@pytest.mark.parametrize("theirs, last", OTHER_CALLS.values(), ids=OTHER_CALLS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_peer_makes_another_call(fresh_world, theirs, last, num_ranks):
    pool = fresh_world(num_ranks)
    sizes = {**PATIENT, "scale_bytes": 64}  # room for rows of fp32
    outcomes = pool.outcomes(mistakes.fault, theirs, last, sizes)
    phase = "combine" if theirs is mistakes.combine else "dispatch"
    check_named(outcomes, num_ranks - 1, phase)
    assert "made another call" in outcomes[0].value["error"]
    assert "made another call" in outcomes[-1].value["error"]
    assert pool.close() == [0] * num_ranks


def test_DeepEP_604_too_many_tokens_on_one_rank(fresh_world):
    pool = fresh_world(2)
    outcomes = pool.outcomes(mistakes.fault, mistakes.route, mistakes.too_many_tokens, IMPATIENT)
    check_named(outcomes, 1, "route")
    assert outcomes[1].error is None


def test_DeepEP_570_late_peer_is_waited_for(world):
    for seen in world(2).run(mistakes.fault, mistakes.combine, mistakes.come_late, PATIENT):
        assert seen["error"] is None
        assert "destroyed" in seen["destroyed"]


def test_Automodel_2686_exit_without_destroy(fresh_world):
    pool = fresh_world(2)
    pool.run(leave_buffers_behind)
    assert pool.close() == [0, 0]


KEPT = []


def leave_buffers_behind(me):
    KEPT.append(mistakes.Call(me))
