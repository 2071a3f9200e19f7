"""The round trip that a network has to pass when ranks are new."""

from types import SimpleNamespace

import pytest
import torch

from hybrid_ep.ops import round_trip
from hybrid_ep.shape import Shape, unaligned
from tests import targets
from tests.cases import Case
from tests.ranks import round_trips

pytestmark = pytest.mark.not_on("torch_gpu", why=targets.SAME_PYTHON)

SIZES = Case("round trip", num_ranks=3, max_tokens=16).sizes()
SHAPES = {
    "one_rank": (1, {}),
    "three_ranks": (3, {}),
    "four_ranks": (4, {}),
    "two_nodes_of_two": (4, {"ranks_per_node": 2}),
    "fewer_tokens_than_ranks": (3, {"max_tokens": 2}),
    "top_1": (2, {"topk": 1}),
    "fp32": (2, {"dtype": torch.float32}),
    "fp8": (2, {"dtype": torch.float8_e4m3fn}),
    "rows_of_16_bytes_as_float32_alone": (2, {"dtype": torch.int32, "hidden": 4}),
}


def sizes_for(num_ranks: int, **changes) -> dict:
    return {**SIZES, "num_experts": 2 * num_ranks, "ranks_per_node": None, **changes}


ONE_NODE = pytest.mark.not_on("nvlink", why="it serves one node")


@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        pytest.param(*shape, id=name, marks=[ONE_NODE] if "ranks_per_node" in shape[1] else [])
        for name, shape in SHAPES.items()
    ],
)
def test_what_arrives_is_what_was_sent(world, num_ranks, changes):
    said = world(num_ranks).run(round_trips.verify, sizes_for(num_ranks, **changes))
    assert said == [""] * num_ranks


@pytest.mark.parametrize(
    ("dtype", "hidden", "expected"),
    [
        (torch.bfloat16, 32, (torch.bfloat16, torch.bfloat16)),
        (torch.float32, 4, (torch.float32, torch.float32)),
        (torch.float8_e4m3fn, 16, (torch.uint8, torch.bfloat16)),
        (torch.int32, 4, (torch.float32, torch.float32)),
        (torch.int16, 8, (torch.bfloat16, torch.bfloat16)),
    ],
    ids=str,
)
def test_rows_are_as_wide_as_the_kernels_want_them(dtype, hidden, expected):
    sizes = {"num_experts": 4, "max_tokens": 4, "topk": 2}
    shape = Shape(num_ranks=2, hidden=hidden, dtype=dtype, **sizes)
    carried = shape.two_way_dtypes(aligned=True)
    buffer = SimpleNamespace(shape=shape, two_way_dtypes=carried)
    found = round_trip.dtypes_for(buffer)
    assert found == expected
    assert not any(unaligned(hidden, each) for each in found)


@pytest.mark.parametrize(
    ("spoils", "sentence"),
    [("dispatch", "dispatch from rank 0 to rank 1"), ("combine", "combine from rank 0 to rank 1")],
)
def test_every_rank_names_the_pair_whose_bytes_were_spoiled(world, spoils, sentence):
    said = world(3).run(round_trips.verify, sizes_for(3), spoils)
    assert said[0] == said[1] == said[2]
    assert sentence in said[0]


def test_once_for_the_same_ranks_and_again_if_one_of_them_is_new(world):
    counts = world(2).run(round_trips.verify_in_turn, sizes_for(2))
    assert counts == [[1, 1, 2, 3], [1, 1, 2, 3]]
