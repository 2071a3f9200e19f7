"""What the backward of a weighted combine makes of the rows that it dispatches.

Dot products have a stated order, that of csrc/kernels/dispatch/scale.cuh.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A row is cut into strips, these into vectors.
VECTOR_BYTES, VECTORS = 16, 32

# Products that are alive at a time
_CPU_BLOCK = 1 << 18
_GPU_BLOCK = 1 << 25


def scale_rows(grads: Tensor, rows: Tensor, weights: Tensor, is_padding: Tensor) -> Tensor:
    """Multiply each row of ``grads`` by its weight, in place; before that, make the dot products.

    Part by part, so that no copy of all rows in fp32 is made.

    Args:
        grads: ``[M, H]``, zero for rows that are padding.
        rows: ``[M, H]``, dtype of grads.
        weights: ``[M]``.
        is_padding: bool ``[M]``; what such rows hold does not matter.

    Returns:
        Tensor: ``[M]``, ``row_dots``; zero for padding.
    """
    dots = row_dots(rows, grads).masked_fill_(is_padding, 0)
    weights = weights.masked_fill(is_padding, 0)
    step = _rows_at_once(rows)
    for grad, weight in zip(grads.split(step), weights.split(step), strict=True):
        grad.mul_(weight.unsqueeze(1))  # in the weight's dtype, rounded once
    return dots.to(weights.dtype)


def row_dots(rows: Tensor, others: Tensor) -> Tensor:
    """``[M]``: the dot product of each row with the other one, in fp32 (fp64 for fp64).

    Each product is rounded before it is added. The order depends on the width and the dtype of the
    rows alone: a row is cut into strips, and products of the same column are added strip by strip;
    then the columns of a vector and at last the vectors, each time the first half to the second.

    Args:
        rows: ``[M, H]``; a row has a multiple of 16 bytes.
        others: ``[M, H]``, dtype of rows.
    """
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    dots = torch.empty(rows.shape[0], dtype=wide, device=rows.device)
    step = _rows_at_once(rows)
    for begin in range(0, rows.shape[0], step):
        here = slice(begin, begin + step)
        _add(rows[here].to(wide) * others[here].to(wide), rows.element_size(), dots[here])
    return dots


def _rows_at_once(rows: Tensor) -> int:
    block = _CPU_BLOCK if rows.device.type == "cpu" else _GPU_BLOCK
    return max(1, block // max(1, rows.shape[1]))


def _add(products: Tensor, itemsize: int, dots: Tensor) -> None:
    per_vector = VECTOR_BYTES // itemsize
    per_strip = VECTORS * per_vector
    num_rows, width = products.shape
    columns = products.new_zeros(num_rows, per_strip)
    for begin in range(0, width, per_strip):
        strip = products[:, begin : begin + per_strip]
        columns[:, : strip.shape[1]] += strip
    vectors = _by_halves(columns.view(num_rows, VECTORS, per_vector))
    dots.copy_(_by_halves(vectors))


def _by_halves(terms: Tensor) -> Tensor:
    """Sums over the last dimension, a power of two long."""
    while (half := terms.shape[-1] // 2) > 0:
        terms = terms[..., :half] + terms[..., half:]
    return terms[..., 0]
