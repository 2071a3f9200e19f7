"""Dispatch bit by bit, combine bit by bit and within a bound of fp64, gradients: every case."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests import targets
from tests.cases import CASES, OF_MANY_RANKS, Case
from tests.checks import check_verbs
from tests.targets import Target

# several uses of each slot of a window, and a chunk that is not full
LONG = [
    Case("long", tokens=(700, 1025), topk=4, hidden=64, num_scales=2),
    Case("long_skewed", tokens=(1100, 3), topk=3, hidden=32, routing="skewed", align=16),
]
# the kernels get every case on few ranks, and some on many, which share a GPU's time
ANY_NODES = [replace(case, ranks_per_node=None) for case in CASES]
SOME = [case for case in ANY_NODES if case.name in OF_MANY_RANKS]
ON_ONE_NODE = {1: ANY_NODES, 2: ANY_NODES, 3: ANY_NODES, 4: SOME, 8: SOME}  # by ranks
ON_NODES = {  # by nodes, ranks of each
    (1, 2): [*SOME, LONG[0]],
    (2, 1): [*ANY_NODES, *LONG],
    (2, 2): [*ANY_NODES, *LONG],
    (4, 1): [*SOME, LONG[0]],
    (3, 2): [*SOME, LONG[0]],
    (2, 4): [*SOME, LONG[0]],
}


def cases_of(target: Target) -> Iterator[tuple[str, Case]]:
    """The cases of a target, with the ranks or the nodes in front of their names."""
    if not target.has_kernels:
        yield from (("", case) for case in CASES)
    elif target.nodes == "one":
        for ranks, cases in ON_ONE_NODE.items():
            yield from ((f"{ranks}-", case.on(ranks)) for case in cases)
    else:
        for (nodes, ranks), cases in ON_NODES.items():
            yield from ((f"{nodes}x{ranks}-", case.on(nodes * ranks, ranks)) for case in cases)


EVERYTHING = [
    targets.as_param(target, case, id=f"{where}{case}")
    for target in targets.ALL
    for where, case in cases_of(target)
    if case.has_experts_enough
]


@pytest.mark.parametrize("target, case", EVERYTHING, indirect=["target"])
def test_verbs(world, case):
    check_verbs(world(case.num_ranks), case)
