"""examples/overlap.py: communication on a stream of its own changes no bit."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import lanes


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("num_parts", "bounded"),
    [(1, False), (2, False), (2, True)],
    ids=["whole", "halves", "halves-max_rows"],
)
def test_streams_change_no_bit(world, num_parts, bounded, recompute):
    for steps in world(2).run(lanes.both_ways, num_parts, bounded, recompute):
        for one_stream, with_lane in steps:
            assert one_stream.keys() == with_lane.keys() and "experts.w1" in one_stream
            for name, tensor in one_stream.items():
                assert torch.equal(tensor, with_lane[name]), name
                assert tensor.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("bounded", "first"),
    [(False, ["dispatch", "compute", "dispatch"]), (True, ["dispatch", "dispatch", "compute"])],
    ids=["host_waits", "max_rows"],
)
def test_work_is_queued_before_a_dispatch_that_waits_and_behind_one_that_does_not(
    world, bounded, first
):
    for made in world(2).run(lanes.order_of_calls, bounded):
        assert made == [*first, "combine", "compute", "combine"]
