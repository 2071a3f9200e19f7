"""A peer stays away, dies, comes late or makes another call: what holds on every backend.

What an error says besides is the backend's own: ``told`` looks at what ``mistakes.fault`` returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.launch import Outcome, Pool
from tests.ranks import mistakes

Sizes = dict[str, Any]
Told = Callable[[dict[str, Any]], None]

PHASES = {"route": mistakes.route, "dispatch": mistakes.dispatch, "combine": mistakes.combine}
each_phase = pytest.mark.parametrize("phase", PHASES)
two_or_three = pytest.mark.parametrize("num_ranks", [2, 3])


def check_named(outcomes: list[Outcome], phase: str, told: Told, victim: int = -1) -> None:
    """All other ranks name the victim, and go on telling the same until the Buffer is gone."""
    victim %= len(outcomes)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.error is None, outcome.error
        seen = outcome.value
        assert (seen["rank"], seen["peer"], seen["phase"]) == (rank, victim, phase), seen["error"]
        where = f"rank {rank} waited for rank {victim} in {phase} (call {seen['call']}"
        assert seen["error"].startswith(where), seen["error"]
        assert seen["again"] == [seen["error"]] * 3
        assert "destroyed" in seen["destroyed"]
        told(seen)


def stays_away(pool: Pool, phase: str, sizes: Sizes, told: Told, victim: int = -1) -> None:
    outcomes = pool.outcomes(mistakes.fault, PHASES[phase], mistakes.stay_away, sizes, victim)
    check_named(outcomes, phase, told, victim)
    assert pool.close() == [0] * pool.num_ranks


def dies(pool: Pool, phase: str, sizes: Sizes, told: Told) -> None:
    outcomes = pool.outcomes(mistakes.fault, PHASES[phase], mistakes.die, sizes)
    check_named(outcomes, phase, told)
    assert outcomes[-1].exit_code == -9
    assert pool.close() == [0] * (pool.num_ranks - 1) + [-9]


def makes_another_call(pool: Pool, theirs: Any, last: Any, sizes: Sizes, told: Told) -> str:
    """The last rank calls ``last``, the others ``theirs``; what the last one is told."""
    outcomes = pool.outcomes(mistakes.fault, theirs, last, sizes)
    check_named(outcomes, "combine" if theirs is mistakes.combine else "dispatch", told)
    assert outcomes[-1].value["error"] is not None
    assert pool.close() == [0] * pool.num_ranks
    return outcomes[-1].value["error"]


def is_late(pool: Pool, patient: Sizes) -> None:
    for seen in pool.run(mistakes.fault, mistakes.combine, mistakes.come_late, patient):
        assert seen["error"] is None
        assert "destroyed" in seen["destroyed"]
