"""The torch backend over NCCL, for every way in which init_process_group names it."""

from dataclasses import replace

import pytest

from hybrid_ep import Config, PeerError
from tests import targets
from tests.cases import CASES, OF_MANY_RANKS
from tests.checks import check_verbs
from tests.ranks import mistakes, out_of_step, over_nccl
from tests.ranks.out_of_step import CASE
from tests.targets import TORCH_GPU

WAYS = {"nccl": "nccl", "both": "cpu:gloo,cuda:nccl", "unnamed": None}
SOME = [
    case
    for case in CASES
    if case.name in OF_MANY_RANKS and case.ranks_per_node is None and case.on(1).has_experts_enough
]
each_way = pytest.mark.parametrize(
    "target",
    [targets.as_param(replace(TORCH_GPU, group=group), id=way) for way, group in WAYS.items()],
    indirect=True,
)
one_way = pytest.mark.parametrize("target", [targets.as_param(TORCH_GPU)], indirect=True)
two_gpus = pytest.mark.gpus(2)
IMPATIENT = {"config": Config(timeout_s=3)}


@each_way
@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=two_gpus)])
def test_verbs(world, case, num_ranks):
    """A rank alone sends itself its rows, so one GPU is enough to see the exchanges."""
    check_verbs(world(num_ranks), case.on(num_ranks), over_nccl.all_verbs_of_nccl)


@one_way
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=two_gpus)])
@pytest.mark.parametrize("align, max_rows", [(1, None), (16, None), (1, 64), (1, 7)])
def test_the_host_waits_for_nothing_but_tables(world, num_ranks, align, max_rows):
    """torch raises where an op would wait for the GPU; a replayed layout may be read once."""
    case = CASE.on(num_ranks)
    for seen in world(num_ranks).run(over_nccl.run, over_nccl.waits, case, align, max_rows):
        of_combine = 3 if max_rows == 7 else 2  # as in tests/unit, but for the tables
        assert seen == {"route": 0, "fresh": 0, "replay": 1, "combine": of_combine}


@two_gpus
@one_way
def test_two_buffers_of_a_group_in_another_order_are_a_peer_error(world):
    told = world(2).run(over_nccl.run, over_nccl.two_buffers_in_another_order, CASE)
    for kind, text in told:
        assert kind == "PeerError"
        assert "): the peer made a call of another Buffer: " in text


@two_gpus
@one_way
@pytest.mark.parametrize("verb", [out_of_step.replay, out_of_step.combine])
def test_layouts_of_two_routes_in_another_order_are_a_peer_error(world, verb):
    for kind, text in world(2).run(out_of_step.mix_routes, verb, CASE):
        assert kind == "PeerError"
        assert "the peer replays the layout of another route" in text


@two_gpus
@one_way
@pytest.mark.parametrize("phase", ["route", "dispatch", "combine"])
def test_peer_stays_away(fresh_world, phase):
    """The deadline is the Buffer's; NCCL's own is minutes away."""
    verb = {"route": mistakes.route, "dispatch": mistakes.dispatch, "combine": mistakes.combine}
    outcomes = fresh_world(2).outcomes(
        over_nccl.wait_in_vain, verb[phase], IMPATIENT, deadline_s=60
    )
    error = outcomes[0].value
    assert isinstance(error, PeerError), outcomes[0]
    assert (error.rank, error.peer, error.phase) == (0, 1, phase)
    assert str(error).endswith("nothing came within 3 s")


@one_way
def test_a_call_in_a_capture_is_refused(world):
    (text,) = world(1).run(over_nccl.captured, CASE.on(1))
    assert "must not be called while a CUDA graph is captured" in text
