"""A timeline of the kernels of a call, from time stamps taken inside them.

Every block notes what it did and when, by its GPU's own timer. These timers differ by some hundred
microseconds from GPU to GPU, so the ranks are put on one clock by what they see at the same time: a
wait for all ranks ends everywhere when the last of them arrives.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

# Span of csrc/runtime_state.h -> verb, and what a block did
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
_WAITS_FOR_ALL = (1, 5, 9)  # by these the ranks are put on one clock


class Event(NamedTuple):
    """What a block did in a call; times in nanoseconds of its GPU's timer."""

    span: int
    block: int
    call: int
    begin_ns: int
    end_ns: int


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


def chrome_trace(events_of_ranks: list[list[Event]]) -> dict[str, Any]:
    """The events of all ranks as Chrome's trace format: a process a rank, a thread a block.

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
    trace: list[dict[str, Any]] = []
    for rank, (offset, events) in enumerate(zip(offsets, events_of_ranks, strict=True)):
        trace.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        for event in events:
            verb, name = SPANS[event.span]
            trace.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": verb,
                    "pid": rank,
                    "tid": event.block,
                    "ts": (event.begin_ns - offset - begin) / 1e3,  # microseconds
                    "dur": (event.end_ns - event.begin_ns) / 1e3,
                    "args": {"call": event.call},
                }
            )
    return {"traceEvents": trace, "displayTimeUnit": "ns"}
