"""examples/overlap.py: communication on a stream of its own changes no bit."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import overlapped


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("num_parts", "bounded"),
    [(1, False), (2, False), (2, True)],
    ids=["whole", "halves", "halves-max_rows"],
)
def test_streams_change_no_bit(world, num_parts, bounded, recompute):
    for told in world(2).run(overlapped.both_ways, num_parts, bounded, recompute):
        for one_stream, with_lane in told:
            assert one_stream.keys() == with_lane.keys() and "experts.w1" in one_stream
            for name, tensor in one_stream.items():
                assert torch.equal(tensor, with_lane[name]), name
                assert tensor.abs().sum() > 0, name


def test_experts_of_a_half_are_queued_before_the_next_dispatch_waits(world):
    for made in world(2).run(overlapped.order_of_calls):
        assert made == ["dispatch", "compute", "dispatch", "combine", "compute", "combine"]
