"""The torch backend's way over NCCL, on the CPU with gloo's collectives in the place of NCCL's."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import PeerError
from hybrid_ep.backends.torch.carrier import choose_carrier, serving_backend
from hybrid_ep.backends.torch.collectives import Collectives
from hybrid_ep.errors import SetupError
from tests import faults
from tests.cases import CASES, params
from tests.checks import check_verbs, same_results
from tests.ranks import out_of_step, over_nccl
from tests.ranks.out_of_step import CASE

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@params(CASES)
def test_verbs(world, case):
    check_verbs(world(case.num_ranks), case, over_nccl.all_verbs)


# ---- which backend of a group carries a tensor

NCCL, BOTH, GLOO, HOST = "cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo", "cpu:gloo"
CARRIERS = {  # what init_process_group made, device, whether ranks share it -> what carries
    "nccl": (NCCL, GPU, False, "nccl"),
    "both": (BOTH, GPU, False, "nccl"),
    "both_for_the_cpu": (BOTH, CPU, False, "gloo"),
    "both_and_a_shared_gpu": (BOTH, GPU, True, "gloo through host memory"),
    "gloo": (GLOO, GPU, False, "gloo through host memory"),
    "gloo_for_the_cpu": (GLOO, CPU, False, "gloo"),
    "gloo_on_a_machine_without_gpus": (HOST, CPU, False, "gloo"),
    "gloo_for_the_cpu_alone": (HOST, GPU, False, "gloo through host memory"),
}
REFUSED = {
    "nccl_for_the_cpu": (NCCL, CPU, False, "tensors are on the CPU"),
    "nccl_and_a_shared_gpu": (NCCL, GPU, True, "ranks share a GPU"),
}


@pytest.mark.parametrize("config, device, shares, carrier", CARRIERS.values(), ids=CARRIERS)
def test_the_backend_that_serves_the_device_carries(monkeypatch, config, device, shares, carrier):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert str(choose_carrier(None, device, shares)) == carrier


@pytest.mark.parametrize("config, device, shares, why", REFUSED.values(), ids=REFUSED)
def test_a_group_that_cannot_carry_is_refused(monkeypatch, config, device, shares, why):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    with pytest.raises(SetupError) as refused:
        choose_carrier(None, device, shares)
    assert why in str(refused.value)
    assert "it has cuda:nccl alone; make it with" in str(refused.value)


# as init_process_group names them, with a GPU there; torch makes a config of each
@pytest.mark.parametrize("name", ["nccl", "cpu:gloo,cuda:nccl", "undefined"])
def test_every_way_to_name_nccl_serves_gpus(monkeypatch, name):
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda *args: torch.device("cuda"))
    config = str(dist.distributed_c10d.BackendConfig(dist.Backend(name)))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert serving_backend(None, GPU) == "nccl"


def test_describe_names_the_carrier(world):
    (told, *_) = world(2).run(over_nccl.run, over_nccl.describe, CASE)
    assert "torch: all_to_all_single, carried by nccl\n" in told
    (told, *_) = world(2).run(over_nccl.describe, CASE)
    assert "torch: point-to-point messages, carried by gloo, tokens by shared memory" in told


# ---- the host waits for what the ranks tell each other, and for nothing else

SIZINGS = {"exact": (1, None), "aligned": (16, None), "bounded": (1, 64), "dropping": (1, 7)}


@pytest.mark.parametrize("align, max_rows", SIZINGS.values(), ids=SIZINGS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_host_waits_for_nothing_but_tables(world, num_ranks, align, max_rows):
    case = CASE.on(num_ranks)
    for seen in world(num_ranks).run(over_nccl.run, over_nccl.questions, case, align, max_rows):
        assert all(asked == [] for asked, _ in seen.values()), seen
        # of one table each; of a layout its sizes first; of a combine the home copies, while sums
        # are under way, and, where rows were dropped, the sums
        reads = {name: number for name, (_, number) in seen.items()}
        of_combine = 4 if max_rows == SIZINGS["dropping"][1] else 3
        assert reads == {"route": 1, "fresh": 1, "replay": 2, "combine": of_combine}


# ---- calls that do not belong together, and exchanges that fail

NODES = replace(CASE, name="nodes", num_ranks=4, ranks_per_node=2, experts_per_rank=2)


@pytest.mark.parametrize("case", [CASE, NODES], ids=str)
def test_a_rank_whose_verbs_are_watched_stays_in_step(world, case):
    for rank, (plain, watched) in enumerate(
        world(case.num_ranks).run(over_nccl.run, over_nccl.one_rank_is_watched, case)
    ):
        same_results(watched, plain, f"rank {rank}")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_two_buffers_of_a_group_in_another_order_are_a_peer_error(world, num_ranks):
    case = CASE.on(num_ranks)
    told = world(num_ranks).run(over_nccl.run, over_nccl.two_buffers_in_another_order, case)
    for kind, text in told:
        assert kind == "PeerError"
        assert "): the peer made a call of another Buffer; here: Buffer " in text


@pytest.mark.parametrize("verb", [out_of_step.replay, out_of_step.combine])
def test_layouts_of_two_routes_in_another_order_are_a_peer_error(world, verb):
    for kind, text in world(2).run(over_nccl.run, out_of_step.mix_routes, verb, CASE):
        assert kind == "PeerError"
        assert "the peer replays the layout of another route" in text


@pytest.mark.parametrize("verb", ["dispatch", "replay", "scales", "combine"])
def test_dtypes_of_one_width_are_a_peer_error(world, verb):
    told = world(2).run(over_nccl.run, out_of_step.mix_dtypes, verb)
    phase = "combine" if verb == "combine" else "dispatch"
    what = "scales" if verb == "scales" else "rows"
    for text, (here, there) in zip(told, out_of_step.MIXED_DTYPES, strict=True):
        assert f" in {phase} (call " in text
        faults.check_mixed_dtypes(text, phase, what, here, there)


@pytest.mark.parametrize("at", [1, 2], ids=["tables", "rows"])
def test_an_exchange_that_cannot_start_is_a_peer_error(fresh_world, at):
    for seen in fresh_world(2).run(over_nccl.run, over_nccl.an_exchange_fails, at):
        assert isinstance(seen["first"], PeerError)
        assert seen["first"].phase == "combine"
        assert "this or another peer (NCCL Error 6)" in str(seen["first"])
        assert seen["later"] == [True] * 2


def test_an_exchange_that_nccl_ended_is_a_peer_error():
    """Its watchdog lets the stream go on, with nothing in the table of the peer that is gone."""
    exchange = Collectives(SimpleNamespace(rank=1, num_ranks=3, device=CPU), 1.0)
    exchange.call = "route", 5
    exchange.open()
    tables = torch.tensor([[[0, 7]] * 3, [[0, 7], [0, 7], [-1, -1]]])
    with pytest.raises(PeerError) as raised:
        exchange.hear(type("Tables", (), {"on_host": tables})())
    assert str(raised.value).startswith("rank 1 waited for rank 2 in route (call 5): NCCL ended")
    assert exchange.failure is raised.value
