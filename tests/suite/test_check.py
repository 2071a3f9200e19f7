"""The check holds on every target. The faults that it must find: tests/unit/test_check.py."""

from __future__ import annotations

import pytest

from hybrid_ep import check
from tests.launch import Rank


def run_check(me: Rank) -> tuple[list[str], list[str]]:
    """The properties that failed, and the lines that were reported."""
    lines: list[str] = []
    result = check.run(
        backend=me.backend,
        device=me.device,
        ranks_per_node=me.target.ranks_per_node(me.num_ranks),
        report=lines.append,
    )
    return [str(each) for each in result.failed], lines


@pytest.mark.parametrize(
    "num_ranks",
    [1, 3, pytest.param(4, marks=pytest.mark.only_on("nodes", why="two nodes of two ranks"))],
)
def test_all_is_well(world, num_ranks):
    results = world(num_ranks).run(run_check)
    assert [failed for failed, _ in results] == [[]] * num_ranks
    lines = results[0][1]
    assert lines[-1] == f"check: {len(check.PROPERTIES)} passed, 0 failed"
    assert sum(line.startswith("ok ") for line in lines) == len(check.PROPERTIES)


def test_one_rank_without_a_group(alone):
    failed, lines = run_check(alone)
    assert failed == []
    assert lines[-1].endswith(" passed, 0 failed")
