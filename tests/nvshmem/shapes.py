"""Nodes of ranks that the tests make of the GPUs there are, and cases on them."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.cases import Case

# name -> nodes, ranks of each
SHAPES = {"1x2": (1, 2), "2x1": (2, 1), "2x2": (2, 2), "4x1": (4, 1), "3x2": (3, 2), "2x4": (2, 4)}


def on(case: Case, shape: str) -> Case:
    nodes, ranks_per_node = SHAPES[shape]
    return replace(case, num_ranks=nodes * ranks_per_node, ranks_per_node=ranks_per_node)


def on_shapes(cases: Iterable[Case], shapes: Iterable[str] = SHAPES) -> list:
    """Every case on every shape that has experts enough for distinct choices."""
    cases = list(cases)
    return [
        pytest.param(on(case, shape), id=f"{shape}-{case.name}")
        for shape in shapes
        for case in cases
        if case.num_slots <= on(case, shape).num_experts or case.routing == "duplicates"
    ]
