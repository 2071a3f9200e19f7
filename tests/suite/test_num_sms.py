"""``num_sms`` of a call: no bit depends on it, its backward takes as many, all ranks ask alike."""

from __future__ import annotations

import re

import pytest
import torch

import hybrid_ep
from tests.cases import Case
from tests.checks import same_bytes
from tests.ranks import num_sms, out_of_step

CASE = Case("num_sms", tokens=(150, 90), topk=3, hidden=256)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("max_rows", [None, 1024], ids=["exact", "bounded"])
def test_results_and_gradients_do_not_depend_on_it(world, max_rows, way):
    pool = world(2)
    expected = pool.run(num_sms.layer, CASE.on(2), max_rows, None, "eager")
    least, _ = pool.run(num_sms.bounds)[0]
    for asked in (least, 7):
        for got, want in zip(
            pool.run(num_sms.layer, CASE.on(2), max_rows, asked, way), expected, strict=True
        ):
            for name in ("y", "x", "weights"):
                same_bytes(got[name], want[name], name)
            assert {number for _, number in got["asked"]} == {asked}, got["asked"]
            backward = ["combine", "combine", "combine_backward", "dispatch"]
            assert [verb for verb, _ in got["asked"]].count("combine_backward") == 1
            assert len(got["asked"]) == 4 + len(backward)


@pytest.mark.parametrize("asked", [0, -1, True, 2.5, "8"], ids=repr)
def test_numbers_that_are_none_are_refused(alone, asked):
    buffer = alone.buffer(**CASE.on(1).sizes())
    inputs = CASE.on(1).inputs(0)
    x, topk_idx = inputs.x.to(alone.device), inputs.topk_idx.to(alone.device)
    out = hybrid_ep.dispatch(buffer, x, topk_idx)
    with pytest.raises((ValueError, TypeError), match="num_sms"):
        hybrid_ep.dispatch(buffer, x, topk_idx, num_sms=asked)
    with pytest.raises((ValueError, TypeError), match="num_sms"):
        hybrid_ep.combine(buffer, out.rows, out.handle, num_sms=asked)


@pytest.mark.not_on("torch_cpu", "torch_gpu", why="its calls take no SMs, so it knows no most")
def test_more_than_the_GPU_has_are_refused(alone):
    buffer = alone.buffer(**CASE.on(1).sizes())
    inputs = CASE.on(1).inputs(0)
    x, topk_idx = inputs.x.to(alone.device), inputs.topk_idx.to(alone.device)
    most = torch.cuda.get_device_properties(alone.device).multi_processor_count
    assert hybrid_ep.dispatch(buffer, x, topk_idx, num_sms=most).rows.shape[0] > 0
    text = f"num_sms of a dispatch must be from [13] to {most}, got {most + 1}"
    with pytest.raises(ValueError, match=text):
        hybrid_ep.dispatch(buffer, x, topk_idx, num_sms=most + 1)


@pytest.mark.not_on("torch_gpu", why="its tables are those of torch_cpu")
@pytest.mark.parametrize("verb", ["dispatch", "dispatch_bounded", "replay", "combine"])
def test_ranks_that_ask_for_others_are_a_peer_error(target, world, verb):
    for text in world(2).run(out_of_step.mix_num_sms, verb):
        assert "num_sms" in text, text
        if not target.has_kernels:
            assert re.search(r", num_sms=\d+(;|$)", text), text
