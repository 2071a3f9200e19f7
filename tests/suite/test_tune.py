"""What tune decides between times that it measures: whatever it is, every rank decides it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hybrid_ep import bench
from hybrid_ep.tune import search as tune
from hybrid_ep.tune.search import Goal
from tests.launch import Pool, Rank
from tests.targets import Target


def tune_on_rank(me: Rank, load: bench.Load, goal: Goal) -> tune.Tuned:
    return tune.tune(me.device, load, goal, backend=me.backend, iters=3, warmup=0)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_ranks_decide_alike(target: Target, world: Callable[[int], Pool], dtype: str) -> None:
    """No setting changes times of the torch backend: noise decides, for all ranks alike."""
    goal = Goal(max_sms=3 if target.nodes == "several" else 2, aim="fewest", within=1.5)
    sizes = {"tokens": (8,), "hidden": (256,), "experts": (4,), "topk": (2,)}
    (load,) = bench.Options(**sizes, dtypes=(dtype,)).loads(2)
    first, second = world(2).run(tune_on_rank, load, goal)
    assert first == second
    assert first.complete
    assert [each.op for each in first.confirmed] == ["dispatch", "combine"]
    assert {each.op for each in first.measured} == {"dispatch", "combine"}
    assert [len(each.us) for each in (*first.measured[:1], *first.confirmed)] == [3, 9, 9]
    for each in first.confirmed:
        assert each.sms <= goal.max_sms
    dispatched, combined = (each.config for each in first.confirmed)
    assert first.config == combined
    assert replace(combined, num_sms_combine=dispatched.num_sms_combine) == dispatched
