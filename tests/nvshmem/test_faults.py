"""A peer on another node that dies, stays away or does something else: an error that names it."""

import pytest

from tests.gpu.test_faults import IMPATIENT, OTHER_CALLS, PHASES, check_named
from tests.ranks import mistakes

# ranks, ranks of a node; the last rank is the one at fault
SHAPES = {"2x1": (2, 1), "3x1": (3, 1), "2x2": (4, 2)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("phase", PHASES)
def test_peer_stays_away(fresh_world, phase, shape):
    num_ranks, ranks_per_node = SHAPES[shape]
    pool = fresh_world(num_ranks)
    sizes = {**IMPATIENT, "ranks_per_node": ranks_per_node}
    outcomes = pool.outcomes(mistakes.fault, PHASES[phase], mistakes.stay_away, sizes)
    check_named(outcomes, num_ranks - 1, phase, "no signal")
    assert pool.close() == [0] * num_ranks


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("phase", PHASES)
def test_peer_dies(fresh_world, phase, shape):
    num_ranks, ranks_per_node = SHAPES[shape]
    pool = fresh_world(num_ranks)
    sizes = {**IMPATIENT, "ranks_per_node": ranks_per_node}
    outcomes = pool.outcomes(mistakes.fault, PHASES[phase], mistakes.die, sizes)
    check_named(outcomes, num_ranks - 1, phase, "no signal")
    assert outcomes[-1].exit_code == -9
    assert pool.close() == [0] * (num_ranks - 1) + [-9]


@pytest.mark.parametrize("theirs, last, reason", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_peer_makes_another_call(fresh_world, theirs, last, reason):
    pool = fresh_world(2)
    sizes = {**IMPATIENT, "ranks_per_node": 1}
    outcomes = pool.outcomes(mistakes.fault, theirs, last, sizes)
    check_named(outcomes, 1, "combine" if theirs is mistakes.combine else "dispatch", reason)
    assert outcomes[1].value["error"] is not None
    assert pool.close() == [0] * 2


def test_expert_out_of_range(fresh_world):
    (text,) = fresh_world(1).run(mistakes.expert_out_of_range)
    assert "topk_idx must lie in [-1, num_experts=" in text
    assert "at token 3, slot 1" in text
