"""With Config(trace=True) the kernels of every rank note what they did."""

import json

import pytest

from hybrid_ep.backends.cuda.trace import SPANS
from tests.cases import Case
from tests.ranks import traces

pytestmark = pytest.mark.not_on("nodes", why="which phases there are differs from rank to rank")
ACROSS_NODES = {"relay routing", "send rows", "forward sums"}
CASE = Case("trace", tokens=(300, 200), topk=2, hidden=512)
CALLS = 3


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_every_phase_of_every_call_is_there(world, num_ranks, tmp_path):
    path = tmp_path / "trace.json"
    world(num_ranks).run(traces.write, CASE.on(num_ranks), CALLS, str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in range(num_ranks):
        seen = {(e["name"], e["args"]["call"]) for e in events if e["pid"] == rank}
        names = {name for _, name in SPANS} - ACROSS_NODES
        if num_ranks == 1:
            names -= {"publish rows", "push sums"}  # there is nobody to do it for
        assert seen == {(name, call) for name in names for call in range(1, CALLS + 1)}
        pulls = {
            (e["args"]["call"], e["args"]["block"]): e["args"]["sm"]
            for e in events
            if e["pid"] == rank and e["name"] == "pull rows"
        }
        assert len({(call, sm) for (call, _), sm in pulls.items()}) == len(pulls), "an SM a block"
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)
    assert max(event["ts"] + event["dur"] for event in events) < 60e6
