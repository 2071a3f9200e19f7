"""examples/lm where ranks share a GPU: copies of the dense part, and streams that are real."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.lm.options import OVERLAPS, PRESETS, Options
from tests.ranks import lm

SMALL = Options(sizes=PRESETS["small"], steps=6, lr=1e-2, warmup=2, log_every=2, profiled=1)


@pytest.mark.only_on("nvlink", why="the example makes Buffers of one node")
def test_the_model_learns_the_same_whatever_overlaps(world):
    found = {}
    for overlap in OVERLAPS:
        for recompute in (False, True):
            options = replace(SMALL, backend="nvlink", overlap=overlap, recompute=recompute)
            told, *_ = world(2).run(lm.run, options)
            assert told["machine"]["dense"] == "copies" and told["peak_bytes"] > 0
            assert told["losses"][-1] < told["losses"][0] - 0.3
            assert 0 < told["communication_share"]
            found[overlap, recompute] = told["losses"]
    wanted = found["none", False]
    for case, losses in found.items():  # attention's backward adds in no fixed order
        assert losses == pytest.approx(wanted, rel=2e-2), case
