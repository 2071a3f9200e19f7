"""A Buffer as a context manager, and what Buffers, handles and the logger say of themselves."""

import pytest

from tests import targets
from tests.ranks import contexts
from tests.ranks.contexts import CASE

pytestmark = pytest.mark.not_on("torch_gpu", why=targets.SAME_PYTHON)


def test_the_end_of_a_block_is_a_barrier_and_destroys(world):
    for state, waited, late in world(2).run(contexts.leave):
        assert state.endswith(", destroyed)")
        assert waited
        assert late == "this hybrid_ep.Buffer was destroyed"


def test_after_an_exception_a_block_waits_for_no_rank(world):
    for state, told in world(2).run(contexts.leave_after_an_exception):
        assert state.endswith(", destroyed)")
        assert told == "'of the user'"


def test_the_end_of_a_block_tells_what_an_earlier_call_left(world):
    first, last = world(2).run(contexts.leave_with_a_failure)
    assert first.startswith("RuntimeError: rank 1: ") or "a call on rank 1 failed: " in first
    assert last.startswith("PeerError: rank 0 waited for rank 1 in route (call 3): made up; ")
    assert first.endswith(", destroyed)") and last.endswith(", destroyed)")


def test_what_buffers_and_handles_say(target, world):
    for rank, told in enumerate(world(2).run(contexts.texts)):
        start = f"Buffer(rank {rank} of 2, hidden={CASE.hidden}, num_experts={CASE.num_experts}, "
        for state in ("live", "released", "destroyed"):
            assert told[state].startswith(start), told
            assert told[state].endswith(f", backend='{target.backend}', {state})")
        assert told["not made"] == "Buffer(not made)"
        sent = CASE.num_tokens(rank)
        assert told["handle"].startswith(f"Handle(num_tokens={sent}, num_rows=")
        assert "tensor(" not in told["handle"]
        assert told["described"] == "hybrid_ep"
        assert told["log"].startswith(f"hybrid_ep.Buffer: rank {rank} of 2, ")
