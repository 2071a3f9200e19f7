"""A peer stays away, dies or makes another call: all other ranks name it.

What an error says besides is the backend's own: ``told`` looks at what ``mistakes.fault`` returned.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.launch import Outcome, Pool
from tests.ranks import mistakes

Sizes = dict[str, Any]
Told = Callable[[dict[str, Any]], None]

PHASES = {"route": mistakes.route, "dispatch": mistakes.dispatch, "combine": mistakes.combine}
each_phase = pytest.mark.parametrize("phase", PHASES)


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


def dies(pool: Pool, phase: str, sizes: Sizes, told: Told) -> None:
    outcomes = pool.outcomes(mistakes.fault, PHASES[phase], mistakes.die, sizes)
    check_named(outcomes, phase, told)
    assert outcomes[-1].exit_code == -9
    assert pool.close() == [0] * (pool.num_ranks - 1) + [-9]


def check_mixed_dtypes(text: str, phase: str, what: str, here: str, there: str) -> None:
    """The text of a PeerError of the torch backend tells both calls, equal but for the dtypes."""
    calls = re.search(r"\): the peer made another call; here: (.*); there: (.*)$", text)
    assert calls is not None, text
    assert calls[1].startswith(f"{phase}, call "), text
    other = rf"\1({there})"
    assert re.sub(rf"({what} of [\d,]+ bytes )\({here}\)", other, calls[1]) == calls[2], text
    assert calls[1] != calls[2]
