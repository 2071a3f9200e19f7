"""Narrow routing gives the bits of padded routing; values return to the slots of their rows."""

import pytest
import torch

from tests.cases import Case
from tests.ranks import slots

NARROW = [
    Case("narrow", topk=2, align=4),
    Case("narrow_three_ranks", num_ranks=3, tokens=(9, 0, 5), topk=1, topk_dtype=torch.int16),
    Case("repeated_experts", topk=3, routing="duplicates", tokens=(8, 11)),
]


def same(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", NARROW, ids=str)
def test_fewer_slots_than_the_buffer_has(world, case):
    for narrow, padded in world(case.num_ranks).run(slots.narrow_and_padded, case, 5):
        assert same(narrow, padded)
        assert narrow[4].shape[1] == case.topk, "the gradient of narrow weights is as narrow"


@pytest.mark.parametrize("case", NARROW, ids=str)
def test_values_return_beside_rows(world, case):
    for found in world(case.num_ranks).run(slots.values_beside_rows, case):
        assert found["offsets"][0] == found["offsets"][1]
        for what in ("forward", "without values", "backward"):
            assert same(*found[what]), what
