"""A peer that dies, stays away or does something else: an error that names it, and a clean exit."""

import pytest

from hybrid_ep import Config
from tests import faults
from tests.faults import each_phase, two_or_three
from tests.ranks import mistakes

IMPATIENT = {"config": Config(timeout_s=1.5), "scale_bytes": 64}  # room for rows of fp32

OTHER_CALLS = {
    "combine_meets_dispatch": (mistakes.combine, mistakes.dispatch, "makes another call: dispatch"),
    "dispatch_meets_combine": (mistakes.dispatch, mistakes.combine, "makes another call: combine"),
    "replay_meets_another_replay": (
        mistakes.dispatch,
        mistakes.dispatch_of_another_route,
        "with another layout",
    ),
    "combine_meets_another_combine": (
        mistakes.combine,
        mistakes.combine_of_another_route,
        "with another layout",
    ),
    "bf16_meets_fp16": (mistakes.dispatch, mistakes.dispatch_of_fp16, "other sizes or dtypes"),
    "sums_of_bf16_meet_fp16": (mistakes.combine, mistakes.combine_of_fp16, "other sizes or dtypes"),
    "bf16_meets_fp32": (mistakes.dispatch, mistakes.dispatch_of_wider_rows, "other sizes"),
    "weights_meet_none": (mistakes.dispatch_with_weights, mistakes.dispatch, "other sizes"),
}


def told_of(reason):
    def told(seen):
        assert "channel" in seen["error"]
        assert reason in seen["error"]

    return told


@two_or_three
@each_phase
def test_peer_stays_away(fresh_world, phase, num_ranks):
    faults.stays_away(fresh_world(num_ranks), phase, IMPATIENT, told_of("no signal"))


@two_or_three
@each_phase
def test_peer_dies(fresh_world, phase, num_ranks):
    faults.dies(fresh_world(num_ranks), phase, IMPATIENT, told_of("no signal"))


@pytest.mark.parametrize("theirs, last, reason", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_peer_makes_another_call(fresh_world, theirs, last, reason):
    faults.makes_another_call(fresh_world(2), theirs, last, IMPATIENT, told_of(reason))


def test_DeepEP_570_late_peer_is_waited_for(world):
    faults.is_late(world(2), {"config": Config(timeout_s=20)})


def test_expert_out_of_range(fresh_world):
    pool = fresh_world(1)
    (text,) = pool.run(mistakes.expert_out_of_range)
    assert "topk_idx must lie in [-1, num_experts=" in text
    assert "at token 3, slot 1" in text
