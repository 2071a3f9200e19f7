"""A peer that dies, stays away or does something else: an error that names it, and a clean exit."""

import pytest

from hybrid_ep import Config
from tests.ranks import mistakes

IMPATIENT = {"config": Config(timeout_s=1.5), "scale_bytes": 64}  # room for rows of fp32

PHASES = {"route": mistakes.route, "dispatch": mistakes.dispatch, "combine": mistakes.combine}
OTHER_CALLS = {
    "combine_meets_dispatch": (mistakes.combine, mistakes.dispatch, "no signal"),
    "dispatch_meets_combine": (mistakes.dispatch, mistakes.combine, "no signal"),
    "bf16_meets_fp32": (mistakes.dispatch, mistakes.dispatch_of_wider_rows, "other sizes"),
    "weights_meet_none": (mistakes.dispatch_with_weights, mistakes.dispatch, "other sizes"),
}


def check_named(outcomes, victim, phase, reason):
    """All but the last rank tell the same story, and go on telling it until the Buffer is gone."""
    for rank, outcome in enumerate(outcomes[:victim]):
        assert outcome.error is None, outcome.error
        seen = outcome.value
        assert (seen["rank"], seen["peer"], seen["phase"]) == (rank, victim, phase), seen["error"]
        assert f"rank {rank} waited for rank {victim} in {phase} (call " in seen["error"]
        assert "channel" in seen["error"]
        assert reason in seen["error"]
        assert seen["again"] == [seen["error"]] * 3
        assert "destroyed" in seen["destroyed"]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_peer_stays_away(fresh_world, phase, num_ranks):
    pool = fresh_world(num_ranks)
    outcomes = pool.outcomes(mistakes.fault, PHASES[phase], mistakes.stay_away, IMPATIENT)
    check_named(outcomes, num_ranks - 1, phase, "no signal")
    assert pool.close() == [0] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_peer_dies(fresh_world, phase, num_ranks):
    pool = fresh_world(num_ranks)
    outcomes = pool.outcomes(mistakes.fault, PHASES[phase], mistakes.die, IMPATIENT)
    check_named(outcomes, num_ranks - 1, phase, "no signal")
    assert outcomes[-1].exit_code == -9
    assert pool.close() == [0] * (num_ranks - 1) + [-9]


@pytest.mark.parametrize("theirs, last, reason", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_peer_makes_another_call(fresh_world, theirs, last, reason):
    pool = fresh_world(2)
    outcomes = pool.outcomes(mistakes.fault, theirs, last, IMPATIENT)
    check_named(outcomes, 1, "combine" if theirs is mistakes.combine else "dispatch", reason)
    assert outcomes[1].value["error"] is not None
    assert pool.close() == [0] * 2


def test_DeepEP_570_late_peer_is_waited_for(world):
    patient = {"config": Config(timeout_s=20)}
    for seen in world(2).run(mistakes.fault, mistakes.combine, mistakes.come_late, patient):
        assert seen["error"] is None
        assert "destroyed" in seen["destroyed"]


def test_expert_out_of_range(fresh_world):
    pool = fresh_world(1)
    (text,) = pool.run(mistakes.expert_out_of_range)
    assert "topk_idx must lie in [-1, num_experts=" in text
    assert "at token 3, slot 1" in text
