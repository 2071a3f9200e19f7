"""benchmarks/drop_in.py, and what lets the frameworks' own tests share a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import drop_in
from hybrid_ep.bench.options import Options
from hybrid_ep.integrations.deep_ep import settings
from tests.launch import Rank
from tools.frameworks import shared_gpus

TINY = Options(tokens=(8,), hidden=(32,), experts=(4, 64), topk=(2,), sms=(48,), iters=2, warmup=0)


def measure(me: Rank) -> dict[str, Any]:
    try:
        return drop_in.measure(me.device, TINY)
    finally:
        settings.forget()


def test_each_op_and_direction_is_measured_both_ways(world):
    found = world(2).run(measure)[0]
    wanted = [(op, way) for way in ("forward", "backward") for op in ("dispatch", "combine")]
    assert [(each["op"], each["direction"]) for each in found["records"]] == 2 * wanted
    assert all(min(each["us"]) > 0 for each in found["records"])
    assert found["waits"] == {4: [None, None], 64: [None, None]}, "there is no GPU to wait for"


@pytest.mark.parametrize(
    ("experts", "more_us", "told"), [(64, 15, "15 met"), (256, 31, "30 MISSED")]
)
def test_a_record_is_held_against_its_aim(experts, more_us, told):
    record = {"op": "dispatch", "direction": "forward", "host_us": [None, 7.0]}
    row = drop_in.cells({**record, "experts": experts, "us": [1.0, 2.0], "more_us": more_us})
    assert row[5:] == (f"{more_us:+.1f}", told, "-", "7.0")


@pytest.fixture
def asked(monkeypatch):
    """What the ranks of a machine with one GPU ask torch for."""
    seen = []

    def init_process_group(backend=None, **options):
        seen.append((backend, options))

    def new_group(ranks=None, timeout=None, backend=None, **options):
        seen.append((backend, options))

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_to_all_single", lambda *args, **sizes: seen.append(sizes))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    return seen


def test_ranks_that_share_a_gpu_get_gloo(asked):
    shared_gpus.install(2)
    dist.init_process_group("nccl", rank=1, device_id=torch.device("cuda", 1))
    dist.new_group([0, 1], pg_options=SimpleNamespace())
    dist.new_group([0, 1], None, "nccl")
    for device in (1, "cuda:1", torch.device("cuda", 1)):
        torch.cuda.set_device(device)
    assert asked == [("gloo", {"rank": 1}), ("gloo", {}), ("gloo", {}), 0, 0, 0]


def test_a_rank_with_a_gpu_of_its_own_keeps_nccl(asked):
    shared_gpus.install(1)
    dist.init_process_group("nccl")
    torch.cuda.set_device("cuda:0")
    dist.all_to_all_single(input_split_sizes=torch.tensor([1, 2]).numpy())
    sizes = {"input_split_sizes": [1, 2]}
    assert asked == [("nccl", {}), "cuda:0", sizes]
