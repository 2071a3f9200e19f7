"""The cases of the torch backend, bit by bit, over virtual nodes of ranks that share the GPUs."""

import dataclasses

import pytest

from tests.cases import CASES, Case, named
from tests.checks import check_combine, check_dispatch, check_gradients
from tests.nvshmem.shapes import on_shapes

# several uses of each slot of a window, and a chunk that is not full
LONG = [
    Case("long", tokens=(700, 1025), topk=4, hidden=64, num_scales=2),
    Case("long_skewed", tokens=(1100, 3), topk=3, hidden=32, routing="skewed", align=16),
]
ONCE = {case.name: dataclasses.replace(case, ranks_per_node=None) for case in CASES}
ALL = [*{case.name: case for case in ONCE.values()}.values(), *LONG]
# on shapes of many ranks, which share a GPU's time
SOME = [
    *(ONCE[case.name] for case in named(
        "plain", "DeepEP#744_pads_among_tokens", "one_rank_without_tokens", "skewed",
        "DeepEP#447_all_to_one_rank", "Megatron#175_duplicates_3_ranks", "odd_fp32_scales",
        "HEP_scan_one_block_less", "torchtitan#2207_third", "DeepEP#402_many_terms", "fp32",
    )),
    LONG[0],
]  # fmt: skip
PARAMS = [*on_shapes(ALL, ("1x2", "2x1", "2x2")), *on_shapes(SOME, ("4x1", "3x2", "2x4"))]


def summable(params):
    return [p for p in params if p.values[0].dtype.itemsize > 1 and p.values[0].weights]


@pytest.mark.parametrize("case", PARAMS)
def test_dispatch(world, case):
    check_dispatch(world(case.num_ranks), case)


@pytest.mark.parametrize("case", PARAMS)
def test_combine(world, case):
    check_combine(world(case.num_ranks), case)


@pytest.mark.parametrize("case", summable(PARAMS))
def test_gradients(world, case):
    check_gradients(world(case.num_ranks), case)
