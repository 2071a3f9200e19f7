"""examples/lm on GPUs: copies of the dense part or FSDP over NCCL, and streams that are real."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.lm.options import OVERLAPS, PRESETS, WAYS, Options
from tests import targets
from tests.ranks import lm

SMALL = Options(sizes=PRESETS["small"], steps=6, lr=1e-2, warmup=2, log_every=2, profiled=1)


@pytest.mark.only_on("nvlink", why="the example makes Buffers of one node")
def test_the_model_learns_the_same_whatever_overlaps(world):
    found = {}
    for overlap in OVERLAPS:
        for recompute in (False, True):
            options = replace(SMALL, backend="nvlink", overlap=overlap, recompute=recompute)
            result, *_ = world(2).run(lm.run, options)
            assert result["machine"]["dense"] == "copies" and result["peak_bytes"] > 0
            assert result["losses"][-1] < result["losses"][0] - 0.1
            assert 0 < result["communication_share"]
            found[overlap, recompute] = result["losses"]
    agree(found)


over_nccl = pytest.mark.parametrize("target", [targets.as_param(targets.TORCH_GPU)], indirect=True)
ranks = pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.gpus(2))])


@over_nccl
@ranks
def test_FSDP_over_NCCL_both_ways(world, num_ranks):
    found = {}
    for way in WAYS:
        for overlap in OVERLAPS:
            backend = "auto" if way == "nccl" else "nvlink"
            options = replace(SMALL, backend=backend, way=way, overlap=overlap)
            result, *_ = world(num_ranks).run(lm.run, options)
            assert result["machine"]["dense"] == "fsdp"
            found[way, overlap] = result["losses"]
    agree(found)


@over_nccl
@ranks
def test_FSDP_resumes(world, tmp_path, num_ranks):
    options = replace(SMALL, backend="nvlink", folder=tmp_path, save_every=3)
    whole, *_ = world(num_ranks).run(lm.run, options)
    (tmp_path / "6" / ".metadata").unlink()
    again, *_ = world(num_ranks).run(lm.run, options)
    assert again["first_step"] == 4
    agree({"whole": whole["losses"][3:], "again": again["losses"]})


def agree(found: dict[object, list[float]]) -> None:
    """Within what attention's backward, which adds in no fixed order, makes of six steps."""
    wanted = next(iter(found.values()))
    for case, losses in found.items():
        assert losses == pytest.approx(wanted, rel=2e-2), case
