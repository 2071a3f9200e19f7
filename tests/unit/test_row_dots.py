"""The order of dot products, against the same sums written out with loops."""

import numpy as np
import pytest
import torch

from hybrid_ep.backends.row_dots import row_dots

WIDTHS = [8, 264, 2048, 2056, 7168]


def added_one_by_one(row: np.ndarray, other: np.ndarray, itemsize: int) -> np.floating:
    """As csrc/kernels/dispatch/scale.cuh says, a value at a time."""
    number, lanes, per_vector = row.dtype.type, 32, 16 // itemsize
    per_strip = lanes * per_vector
    columns = [number(0)] * per_strip
    for at in range(len(row)):
        columns[at % per_strip] = columns[at % per_strip] + row[at] * other[at]
    return by_halves(
        [by_halves(columns[lane * per_vector : (lane + 1) * per_vector]) for lane in range(lanes)]
    )


def by_halves(terms: list) -> np.floating:
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [terms[i] + terms[i + half] for i in range(half)]
    return terms[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_order_is_the_stated_one(dtype, width):
    draw = torch.Generator().manual_seed(width)
    rows, others = (torch.randn((3, width), generator=draw).to(dtype) for _ in range(2))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    got = row_dots(rows, others)
    assert got.dtype == wide
    for dot, row, other in zip(got, rows.to(wide).numpy(), others.to(wide).numpy(), strict=True):
        assert dot.numpy() == added_one_by_one(row, other, rows.element_size())


def test_parts_of_a_long_table_do_not_matter():
    draw = torch.Generator().manual_seed(0)
    rows, others = (torch.randn((500, 1024), generator=draw) for _ in range(2))
    assert torch.equal(row_dots(rows, others)[123:124], row_dots(rows[123:124], others[123:124]))


def test_no_rows():
    assert row_dots(torch.empty(0, 64), torch.empty(0, 64)).shape == (0,)
