"""The kernels alone, their SMs, and each phase of a call, by what the kernels note on request.

Stamps cost time, so they are taken of other calls than those that are timed: of a Buffer with
``Config(trace=True)``, a few calls of each kind, started on all ranks at once like the timed ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from hybrid_ep.backends.cuda.trace import PhaseTimes, phase_times
from hybrid_ep.bench.clock import Call, Clock
from hybrid_ep.bench.inputs import NUM_INPUTS
from hybrid_ep.buffer import Buffer
from hybrid_ep.group import Group

TRACED_CALLS = 5


def add_phases(calls: Sequence[Call], buffer: Buffer, traced: Sequence[Call], clock: Clock) -> None:
    """Fill in what is known of calls that are traced: slowest rank, medians; collective.

    Args:
        calls: those that were timed.
        buffer: another Buffer of the same sizes, which traces.
        traced: the same calls of that Buffer.
        clock: starts them.
    """
    mine = [[_trace(buffer, call, i, clock) for i in range(TRACED_CALLS)] for call in traced]
    for call, of_ranks in zip(calls, zip(*Group().gather(mine), strict=True), strict=True):
        slowest = [slowest_of(ranks) for ranks in zip(*of_ranks, strict=True)]
        call.kernels_us, call.phases_us, call.sms_occupied = median_of(slowest)


def slowest_of(ranks: Sequence[PhaseTimes]) -> PhaseTimes:
    """One call: of each phase the time of the rank that took longest."""
    return _each(max, ranks)


def median_of(calls: Sequence[PhaseTimes]) -> PhaseTimes:
    """Of each phase the median; a phase that not every call had counts where it was."""
    return _each(statistics.median, calls)


def _each(pick: Any, times: Sequence[PhaseTimes]) -> PhaseTimes:
    names = dict.fromkeys(name for each in times for name in each.phases)
    phases = {
        name: pick([each.phases[name] for each in times if name in each.phases]) for name in names
    }
    return PhaseTimes(
        pick([each.kernels for each in times]), phases, pick([each.sms for each in times])
    )


def _trace(buffer: Buffer, call: Call, i: int, clock: Clock) -> PhaseTimes:
    ready = call.begin(i % NUM_INPUTS)
    buffer.communicator.verbs.take_trace()  # of what prepared it
    clock.time(ready)
    return phase_times(buffer.communicator.verbs.take_trace())
