"""A timeline of the kernels of a call, from time stamps taken inside them.

Every block notes what it did and when, by its GPU's own timer. These timers differ by some hundred
microseconds from GPU to GPU, so the ranks are put on one clock by what they see at the same time: a
wait for all ranks ends everywhere when the last of them arrives.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

# Span of csrc/layout/runtime_state.h -> verb, and what a block did
SPANS = (
    ("route", "publish routing"),
    ("route", "wait for the peers' routing"),
    ("route", "assign rows"),
    ("dispatch", "publish rows"),
    ("dispatch", "zero padding"),
    ("dispatch", "wait for the peers' rows"),
    ("dispatch", "pull rows"),
    ("combine", "wait for the peers' inboxes"),
    ("combine", "push sums"),
    ("combine", "wait for the peers' sums"),
    ("combine", "sum at home"),
    ("route", "relay routing"),
    ("dispatch", "send rows"),
    ("combine", "forward sums"),
)
_WAITS_FOR_ALL = (1, 5)  # by these the ranks are put on one clock


class Event(NamedTuple):
    """What a block did in a call; times in nanoseconds of its GPU's timer."""

    span: int
    block: int
    call: int
    begin_ns: int
    end_ns: int
    sm: int


class PhaseTimes(NamedTuple):
    """Microseconds of one call on one rank.

    Attributes:
        kernels: from the first block's first stamp to the last one's last.
        phases: by name: from the first block's begin to the last one's end; of a wait, the whole
            time of the block that waited longest.
        sms: how many SMs any of its blocks ran on.
        begins: by name, where a phase's first block begins, from the first block of all.
    """

    kernels: float
    phases: dict[str, float]
    sms: int
    begins: dict[str, float]


def phase_times(events: Iterable[Event]) -> PhaseTimes:
    """How long each phase of a call took, from what its blocks noted.

    Args:
        events: of one call on one rank.

    Returns:
        PhaseTimes: phases in the order of ``SPANS``; only those that were noted.
    """
    by_span: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_span[event.span].append(event)
    phases = {}
    for span in sorted(by_span):
        name = SPANS[span][1]
        longest = _longest_wait if name.startswith("wait") else _extent
        phases[name] = longest(by_span[span])
    together = [event for each in by_span.values() for event in each]
    sms = len({event.sm for event in together})
    first = min((event.begin_ns for event in together), default=0)
    begins = {
        SPANS[span][1]: (min(event.begin_ns for event in by_span[span]) - first) / 1e3
        for span in sorted(by_span)
    }
    return PhaseTimes(_extent(together), phases, sms, begins)


def _extent(events: list[Event]) -> float:
    begin = min((event.begin_ns for event in events), default=0)
    return (max((event.end_ns for event in events), default=0) - begin) / 1e3


def _longest_wait(events: list[Event]) -> float:
    waited: dict[int, int] = defaultdict(int)
    for event in events:
        waited[event.block] += event.end_ns - event.begin_ns
    return max(waited.values()) / 1e3


def clock_offsets(events_of_ranks: list[list[Event]]) -> list[float]:
    """Nanoseconds that each rank's timer is ahead of rank 0's; 0 where nothing tells."""
    ends = [_first_ends(events) for events in events_of_ranks]
    offsets = []
    for mine in ends:
        shared = mine.keys() & ends[0].keys()
        ahead = [mine[wait] - ends[0][wait] for wait in shared]
        offsets.append(statistics.median(ahead) if ahead else 0.0)
    return offsets


def _first_ends(events: list[Event]) -> dict[tuple[int, int], int]:
    ends: dict[tuple[int, int], int] = {}
    for event in events:
        if event.span in _WAITS_FOR_ALL:
            key = event.span, event.call
            ends[key] = min(event.end_ns, ends.get(key, event.end_ns))
    return ends


def lay_out(events: Iterable[Event]) -> list[tuple[int, Event]]:
    """Each event with its row among those of its block, so that events of a row never cross.

    Viewers draw what a thread does as a stack: an event lies beside another or within it. Warps of
    a block do things at the same time, so a block has several rows.
    """
    open_ends: dict[int, list[list[int]]] = defaultdict(list)  # block -> row -> stack of ends
    placed = []
    for event in sorted(events, key=lambda event: (event.begin_ns, -event.end_ns)):
        rows = open_ends[event.block]
        for stack in rows:
            while stack and stack[-1] <= event.begin_ns:
                stack.pop()
        fits = (row for row, ends in enumerate(rows) if not ends or event.end_ns <= ends[-1])
        row = next(fits, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(event.end_ns)
        placed.append((row, event))
    return placed


def chrome_trace(events_of_ranks: list[list[Event]]) -> dict[str, Any]:
    """The events of all ranks as Chrome's trace format: a process a rank, threads for each block.

    Args:
        events_of_ranks: each rank's events.

    Returns:
        dict: to be written as JSON and opened in chrome://tracing or Perfetto.
    """
    offsets = clock_offsets(events_of_ranks)
    begin = min(
        (
            event.begin_ns - offset
            for offset, events in zip(offsets, events_of_ranks, strict=True)
            for event in events
        ),
        default=0,
    )
    laid_out = [lay_out(events) for events in events_of_ranks]
    num_rows = 1 + max((row for placed in laid_out for row, _ in placed), default=0)
    trace: list[dict[str, Any]] = []
    for rank, (offset, placed) in enumerate(zip(offsets, laid_out, strict=True)):
        trace.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        for block, row in sorted({(event.block, row) for row, event in placed}):
            trace.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": rank,
                    "tid": block * num_rows + row,
                    "args": {"name": f"block {block}"},
                }
            )
        for row, event in placed:
            verb, name = SPANS[event.span]
            trace.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": verb,
                    "pid": rank,
                    "tid": event.block * num_rows + row,
                    "ts": (event.begin_ns - offset - begin) / 1e3,  # microseconds
                    "dur": (event.end_ns - event.begin_ns) / 1e3,
                    "args": {"call": event.call, "block": event.block, "sm": event.sm},
                }
            )
    return {"traceEvents": trace, "displayTimeUnit": "ns"}
