"""Handles in any order, again and with other strides; several Buffers: as on the CPU."""

import pytest

from tests import oracle
from tests.cases import Case, named
from tests.checks import same_bytes
from tests.cpu.test_handles import (
    LAYERS,
    ORDERS,
    STRIDED,
    check_many_buffers,
    check_order,
    check_replay,
    check_strides,
)
from tests.nvshmem.shapes import SHAPES, on, on_shapes
from tests.ranks import handles

FEW = ("2x1", "2x2")


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("shape", FEW)
def test_order_does_not_matter(world, shape, order):
    layers = [on(case, shape) for case in LAYERS]
    check_order(world(layers[0].num_ranks), layers, order)


@pytest.mark.parametrize(
    "case",
    on_shapes(
        named(
            "plain",
            "one_rank_without_tokens",
            "torchtitan#2207_third_duplicates",
            "odd_fp32_scales",
        ),
        FEW,
    ),
)
def test_replay_of_a_layout(world, case):
    check_replay(world(case.num_ranks), case)


@pytest.mark.parametrize("shape", FEW)
def test_uccl_878_many_buffers(world, shape):
    case = on(Case("many buffers"), shape)
    check_many_buffers(world(case.num_ranks), case)


@pytest.mark.parametrize("shape", FEW)
def test_strides_do_not_matter(world, shape):
    case = on(STRIDED, shape)
    check_strides(world(case.num_ranks), case)


def test_one_job_serves_every_division_into_nodes(world):
    """The ranks stay, and what is a node changes from Buffer to Buffer."""
    for shape in ("4x1", "2x2"):
        case = on(Case("divided"), shape)
        expected = oracle.dispatch(case)
        for rank, results in enumerate(world(4).run(handles.many_buffers, case, 2)):
            for rows in results:
                same_bytes(rows, expected[rank].rows, f"rows of rank {rank} of {shape}")


def test_a_second_job_is_refused_by_name(fresh_world):
    pool = fresh_world(4)
    assert pool.run(handles.other_group) == [
        f"a process takes part in one NVSHMEM job, that of its first Buffer: the ranks were "
        f"[0, 1, 2, 3], this Buffer has {[0, 1] if rank < 2 else [2, 3]}"
        for rank in range(SHAPES["2x2"][0] * SHAPES["2x2"][1])
    ]
