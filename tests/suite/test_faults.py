"""A peer that dies, stays away, comes late or does something else: an error that names it."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from hybrid_ep import Config
from tests import faults
from tests.faults import each_phase
from tests.launch import Pool
from tests.ranks import mistakes
from tests.targets import Target

pytestmark = pytest.mark.not_on(
    "torch_gpu", why="its messages are gloo's, staged through host memory: faults are torch_cpu's"
)
FIRST_CALL = 5  # of the torch backend: after two routes and two dispatches
# nodes: the first Buffer makes a round trip while kernels are being loaded
TIMEOUT_S = {"torch_cpu": 1, "nvlink": 1.5, "nodes": 3}
several = pytest.mark.parametrize(
    "num_ranks",
    [
        2,
        pytest.param(3, marks=pytest.mark.not_on("nodes", why="2 and 4 ranks show it")),
        pytest.param(4, marks=pytest.mark.only_on("nodes", why="two nodes of two ranks")),
    ],
)


@pytest.fixture
def ranks(target: Target, request: pytest.FixtureRequest) -> Callable[[int], Pool]:
    """Fresh ones for the torch backend: where a rank waited in vain, gloo ends their connection."""
    return request.getfixturevalue("world" if target.has_kernels else "fresh_world")


def impatient(target: Target) -> dict[str, Any]:
    """Sizes of a Buffer with a short deadline, and with room for rows of fp32."""
    return {"config": Config(timeout_s=TIMEOUT_S[target.name]), "scale_bytes": 64}


def told_of(target: Target, reason: str) -> Callable[[dict[str, Any]], None]:
    def told(seen: dict[str, Any]) -> None:
        if target.has_kernels:
            assert "channel" in seen["error"]
            assert re.search(reason, seen["error"])
        else:
            assert seen["call"] == FIRST_CALL
            assert f"(call {FIRST_CALL}): " in seen["error"], "no channels here"

    return told


@several
@each_phase
def test_peer_stays_away(target, ranks, phase, num_ranks):
    faults.stays_away(ranks(num_ranks), phase, impatient(target), told_of(target, "no signal"))


@each_phase
def test_ranks_end_as_programs_do_after_a_fault(target, fresh_world, phase):
    pool = fresh_world(2)
    faults.stays_away(pool, phase, impatient(target), told_of(target, "no signal"))
    assert pool.close() == [0, 0]


@several
@each_phase
def test_peer_dies(target, fresh_world, phase, num_ranks):
    faults.dies(fresh_world(num_ranks), phase, impatient(target), told_of(target, "no signal"))


# what ranks call and what the last one calls; what the torch backend and the kernels say
OTHER_CALLS = {
    "combine_meets_dispatch": (
        mistakes.combine,
        mistakes.dispatch,
        r"made another call; here: combine, call \d+, rows of 64 .*; there: dispatch, call ",
        "makes another call; here: combine, call .*; there: dispatch, call ",
    ),
    "dispatch_meets_combine": (
        mistakes.dispatch,
        mistakes.combine,
        r"made another call; here: dispatch, call \d+, rows of 64 .*; there: combine, call ",
        "makes another call; here: dispatch, call .*; there: combine, call ",
    ),
    "dispatch_meets_route": (
        mistakes.dispatch,
        mistakes.route,
        r"made another call; here: dispatch, call .*; there: route, call \d+, top-3$",
        "makes another call; here: dispatch, call .*; there: route, call ",
    ),
    "replay_meets_another_replay": (
        mistakes.dispatch,
        mistakes.dispatch_of_another_route,
        "replays the layout of another route",
        "with another layout",
    ),
    "combine_meets_another_combine": (
        mistakes.combine,
        mistakes.combine_of_another_route,
        "replays the layout of another route",
        "with another layout",
    ),
    "bf16_meets_fp16": (
        mistakes.dispatch,
        mistakes.dispatch_of_fp16,
        r"made another call; here: dispatch.* \(bfloat16\); there: dispatch.* \(float16\)",
        "other sizes, dtypes or num_sms",
    ),
    "sums_of_bf16_meet_fp16": (
        mistakes.combine,
        mistakes.combine_of_fp16,
        r"made another call; here: combine.* \(bfloat16\); there: combine.* \(float16\)",
        "other sizes, dtypes or num_sms",
    ),
    "bf16_meets_fp32": (
        mistakes.dispatch,
        mistakes.dispatch_of_wider_rows,
        r"here: dispatch.* rows of 64 bytes.*; there: dispatch.* rows of 128 bytes",
        "other sizes",
    ),
    "weights_meet_none": (
        mistakes.dispatch_with_weights,
        mistakes.dispatch,
        r"here: dispatch.*\), weights of 12 bytes; there: dispatch, .*\)$",
        "other sizes",
    ),
}


@pytest.mark.parametrize(
    "theirs, last, torch_says, kernels_say", OTHER_CALLS.values(), ids=OTHER_CALLS
)
@pytest.mark.parametrize(
    "num_ranks",
    [2, pytest.param(3, marks=pytest.mark.only_on("torch_cpu", why="there all hear it at once"))],
)
def test_peer_makes_another_call(target, ranks, theirs, last, torch_says, kernels_say, num_ranks):
    sizes = impatient(target)
    if not target.has_kernels:
        sizes["config"] = Config(timeout_s=20)  # told at once
    outcomes = ranks(num_ranks).outcomes(mistakes.fault, theirs, last, sizes)
    phase = "combine" if theirs is mistakes.combine else "dispatch"
    says = kernels_say if target.has_kernels else torch_says
    faults.check_named(outcomes, phase, told_of(target, says))
    assert re.search(says, outcomes[0].value["error"])
    text = outcomes[-1].value["error"]
    assert text is not None and (target.has_kernels or "another" in text)


def test_DeepEP_604_too_many_tokens_on_one_rank(target, ranks):
    sizes = impatient(target)
    outcomes = ranks(2).outcomes(mistakes.fault, mistakes.route, mistakes.too_many_tokens, sizes)
    faults.check_named(outcomes, "route", told_of(target, "no signal"))
    assert outcomes[1].error is None


def test_DeepEP_570_late_peer_is_waited_for(world):
    sizes = {"config": Config(timeout_s=20)}
    for seen in world(2).run(mistakes.fault, mistakes.combine, mistakes.come_late, sizes):
        assert seen["error"] is None
        assert "destroyed" in seen["destroyed"]


def test_Automodel_2686_exit_without_destroy(fresh_world):
    pool = fresh_world(2)
    pool.run(leave_buffers_behind)
    assert pool.close() == [0, 0]


KEPT = []


def leave_buffers_behind(me):
    KEPT.append(mistakes.Call(me))
