"""The bench of overlap runs on GPUs alone. No times are judged."""

from __future__ import annotations

import pytest

from hybrid_ep.bench.overlap import OverlapOptions, measure_overlap
from tests.launch import Rank

pytestmark = pytest.mark.not_on("nodes", why="streams and products do not depend on the backend")
OPTIONS = OverlapOptions(
    backends=("nvlink",),
    tokens=(64,),
    hidden=(512,),
    experts=(8,),
    topk=(2,),
    sms=(4, 8),
    gemm=(512, 512, 512),
    gemms=2,
    iters=3,
    warmup=1,
)


def measure(me: Rank) -> dict:
    return measure_overlap(me.device, OPTIONS)


def test_each_setting_is_timed_alone_and_at_once(world):
    first, second = world(2).run(measure)
    assert first == second, "the same on all ranks"
    records = first["overlaps"]
    ours = [r for r in records if r["way"] == "nvlink"]
    wanted = [(sms, products) for sms in (4, 8) for products in ("all", "rest")]
    assert [(r["sms"], r["product_sms"]) for r in ours] == wanted
    for record in records:
        assert record["both_us"] >= max(record["communication_us"], record["products_us"]) * 0.999
        assert min(record["products_alone_us"], record["communication_alone_us"]) > 0
        assert (record["allowed_part"] is None) == (record["sms"] is None)
