"""Calls that do not belong together, calls of two threads, deadlines of any length."""

import math
import re
import threading
from dataclasses import replace

import pytest

from tests import faults
from tests.checks import same_results
from tests.ranks import mistakes, out_of_step
from tests.ranks.out_of_step import CASE
from tests.ranks.raised import raised

pytestmark = pytest.mark.not_on(
    "torch_gpu", why="its messages are gloo's, staged through host memory: faults are torch_cpu's"
)

WITHOUT_TOKENS = replace(CASE, name="without tokens", tokens=(0,), max_tokens=4)
MIXED = {
    "replay": (out_of_step.replay, "dispatch", CASE),
    "combine": (out_of_step.combine, "combine", CASE),
    "backward_of_dispatch": (out_of_step.backward_of_dispatch, "combine", CASE),
    "backward_of_combine": (out_of_step.backward_of_combine, "dispatch", CASE),
    "replay_without_tokens": (out_of_step.replay, "dispatch", WITHOUT_TOKENS),
    "combine_without_tokens": (out_of_step.combine, "combine", WITHOUT_TOKENS),
    "combine_after_a_restore": (out_of_step.combine_after_a_restore, "combine", CASE),
    "combine_of_another_buffer": (out_of_step.combine_of_another_buffer, "combine", CASE),
}


@pytest.mark.parametrize("verb, phase, case", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_layouts_of_two_routes_in_another_order_are_a_peer_error(
    target, world, verb, phase, case, num_ranks
):
    told = world(num_ranks).run(out_of_step.mix_routes, verb, case.on(num_ranks))
    last = num_ranks - 1
    for rank, (kind, text) in enumerate(told):
        assert kind == "PeerError", text
        if target.has_kernels:
            # each names a rank whose layout is another: the last one, and for that any
            peers = [last] if rank < last else range(last)
            if "another rank has given up waiting for it" in text:  # in the call before, perhaps
                assert target.nodes == "several" and 0 < rank < last, text
                assert text.startswith(f"rank {rank} waited for rank {last} in "), text
                continue
            starts = [f"rank {rank} waited for rank {peer} in {phase} (call " for peer in peers]
            assert text.startswith(tuple(starts)), text
            _, found, difference = text.partition("the peer makes this call with another layout; ")
            assert found, text
            here, there = difference.split("; ")
            told = rf"{phase}, call \d+ of the Buffer, the layout of route [\d,]+"
            assert re.fullmatch(f"here: {told}", here) and re.fullmatch(f"there: {told}", there)
            assert here.partition(": ")[2] != there.partition(": ")[2]
        else:
            peer = last if rank < last else 0
            assert text.startswith(f"rank {rank} waited for rank {peer} in {phase} (call ")
            assert "): the peer replays the layout of another route; here: " in text
            assert re.search(rf"; there: {phase}, call \d+, .*, the layout of call \d+ of B", text)


@pytest.mark.parametrize("verb", ["dispatch", "replay", "scales", "combine"])
def test_dtypes_of_one_width_are_a_peer_error(target, world, verb):
    told = world(2).run(out_of_step.mix_dtypes, verb)
    phase = "combine" if verb == "combine" else "dispatch"
    what = "scales" if verb == "scales" else "rows"
    for text, (here, there) in zip(told, out_of_step.MIXED_DTYPES, strict=True):
        if target.has_kernels:
            start = "the peer makes this call with other sizes, dtypes or num_sms; here and there: "
            assert f"{start}{phase}" in text, text
        else:
            faults.check_mixed_dtypes(text, phase, what, here, there)


def test_a_second_thread_is_refused_in_a_world_of_one(alone):
    buffer = alone.buffer(**CASE.on(1).sizes())
    out = mistakes.send(alone, buffer, CASE.on(1).inputs(0))
    seen = []
    with buffer.communicator.verbs._turn:
        thread = threading.Thread(
            target=lambda: seen.append(
                raised(
                    lambda: buffer.communicator.verbs.combine(
                        out.rows, None, None, out.handle.layout, num_tokens=out.handle.num_tokens
                    )
                )
            )
        )
        thread.start()
        thread.join()
    assert str(seen[0]).startswith("another thread is in a call of this Buffer; ")


@pytest.mark.parametrize("timeout_s", [1e11, 1.7e308, math.inf])
def test_a_deadline_of_any_length(world, timeout_s):
    pool = world(2)
    expected = pool.run(out_of_step.plain, CASE)
    results = pool.run(out_of_step.deadline_of_any_length, timeout_s)
    for rank, (got, want) in enumerate(zip(results, expected, strict=True)):
        same_results(got, want, f"rank {rank}")
