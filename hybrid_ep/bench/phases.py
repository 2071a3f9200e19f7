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
        times = median_of(slowest)
        call.kernels_us, call.phases_us, call.sms_occupied = times[:3]
        call.phase_begins_us = times.begins


def slowest_of(ranks: Sequence[PhaseTimes]) -> PhaseTimes:
    """One call: of each phase the time of the rank that took longest, and the earliest begin."""
    return _each(max, ranks)._replace(begins=_by_name(min, [each.begins for each in ranks]))


def median_of(calls: Sequence[PhaseTimes]) -> PhaseTimes:
    """Of each phase the median; a phase that not every call had counts where it was."""
    return _each(statistics.median, calls)


def _each(pick: Any, times: Sequence[PhaseTimes]) -> PhaseTimes:
    return PhaseTimes(
        pick([each.kernels for each in times]),
        _by_name(pick, [each.phases for each in times]),
        pick([each.sms for each in times]),
        _by_name(pick, [each.begins for each in times]),
    )


def _by_name(pick: Any, phases: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in phases for name in each)
    return {name: pick([each[name] for each in phases if name in each]) for name in names}


def _trace(buffer: Buffer, call: Call, i: int, clock: Clock) -> PhaseTimes:
    ready = call.begin(i % NUM_INPUTS)
    buffer.communicator.verbs.take_trace()  # of what prepared it
    clock.time(ready)
    return phase_times(buffer.communicator.verbs.take_trace())
