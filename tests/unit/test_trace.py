"""Time stamps of several GPUs become one timeline."""

import json

import pytest

import hybrid_ep
from hybrid_ep.backends.cuda.trace import (
    SPANS,
    Event,
    chrome_trace,
    clock_offsets,
    lay_out,
    phase_times,
)

PUBLISH, WAIT, ASSIGN = range(3)
PULL = 6
FIRST_SM = 70


def a_call(call: int, start_ns: int, clock_ns: int, arrival_ns: int) -> list[Event]:
    """Two blocks publish, wait until the last rank arrived, and assign; by one GPU's timer."""
    late = arrival_ns + clock_ns
    return [
        Event(span, block, call, begin_ns, end_ns, sm=FIRST_SM + block)
        for block in range(2)
        for span, begin_ns, end_ns in (
            (PUBLISH, start_ns + clock_ns, start_ns + clock_ns + 3_000),
            (WAIT, start_ns + clock_ns + 4_000, late + 500 * block),
            (ASSIGN, late + 500 * block, late + 9_000),
        )
    ]


def two_ranks() -> list[list[Event]]:
    """Rank 1's timer is 170 us ahead, and it comes 20 us late to the second of two calls."""
    return [
        a_call(1, 0, 0, 5_000) + a_call(2, 100_000, 0, 125_000),
        a_call(1, 0, 170_000, 5_000) + a_call(2, 120_000, 170_000, 125_000),
    ]


def test_timers_are_put_on_one_clock() -> None:
    assert clock_offsets(two_ranks()) == [0, 170_000]


def test_times_of_phases() -> None:
    """A phase is as long as all its blocks together, a wait as long as one block waited."""
    events = [
        *a_call(1, 0, 0, 5_000),
        # block 0 waits once more, after it assigned, and a block of the next kernel is elsewhere
        Event(WAIT, 0, 1, 20_000, 21_500, sm=FIRST_SM),
        Event(PULL, 0, 1, 21_000, 21_500, sm=FIRST_SM - 1),
    ]
    times = phase_times(events)
    assert times.phases == {
        SPANS[PUBLISH][1]: 3.0,
        SPANS[WAIT][1]: 2.5,
        SPANS[ASSIGN][1]: 9.0,
        SPANS[PULL][1]: 0.5,
    }
    assert list(times.phases) == [SPANS[span][1] for span in (PUBLISH, WAIT, ASSIGN, PULL)]
    assert times.kernels == 21.5
    assert times.sms == 3
    assert list(times.begins.items()) == [
        (SPANS[PUBLISH][1], 0.0),
        (SPANS[WAIT][1], 4.0),
        (SPANS[ASSIGN][1], 5.0),
        (SPANS[PULL][1], 21.0),
    ]
    assert phase_times([]) == (0.0, {}, 0, {})


def test_a_rank_without_a_shared_wait_keeps_its_clock() -> None:
    assert clock_offsets([a_call(1, 0, 0, 5_000), []]) == [0, 0]
    assert chrome_trace([[], []])["traceEvents"][0]["args"] == {"name": "rank 0"}


def test_the_late_rank_shows() -> None:
    trace = json.loads(json.dumps(chrome_trace(two_ranks())))["traceEvents"]
    waits = {
        (event["pid"], event["args"]["call"]): event["dur"]
        for event in trace
        if event["name"] == SPANS[WAIT][1] and event["tid"] == 0
    }
    assert waits == {(0, 1): 1, (1, 1): 1, (0, 2): 21, (1, 2): 1}  # microseconds
    begins = [event["ts"] for event in trace if event["ph"] == "X"]
    assert min(begins) == 0
    assert {event["cat"] for event in trace if event["ph"] == "X"} == {"route"}


def test_events_of_a_row_never_cross() -> None:
    pull, publish, wait = (
        Event(span, 0, 1, begin, end, sm=7)
        for span, begin, end in ((PULL, 0, 90), (3, 10, 100), (5, 20, 30))
    )
    later, elsewhere = Event(PULL, 0, 2, 90, 120, sm=7), Event(PULL, 1, 1, 5, 95, sm=8)
    rows = {event: row for row, event in lay_out([elsewhere, later, wait, publish, pull])}
    assert rows == {pull: 0, publish: 1, wait: 0, later: 0, elsewhere: 0}
    trace = chrome_trace([[pull, publish, elsewhere]])["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert threads == {0: "block 0", 1: "block 0", 2: "block 1"}
    where = {e["tid"]: (e["args"]["block"], e["args"]["sm"]) for e in trace if e["ph"] == "X"}
    assert where == {0: (0, 7), 1: (0, 7), 2: (1, 8)}


@pytest.mark.parametrize(
    "trace, said", [(False, r"Config\(trace=True\)"), (True, "torch backend has no kernels")]
)
def test_what_a_trace_needs(trace, said, tmp_path) -> None:
    buffer = hybrid_ep.Buffer(
        hidden=16,
        num_experts=2,
        max_tokens=4,
        topk=1,
        device="cpu",
        config=hybrid_ep.Config(trace=trace),
    )
    with pytest.raises(RuntimeError, match=said):
        buffer.write_trace(tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())
