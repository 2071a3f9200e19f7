"""Sums of rows in a stated order: where the library adds and rounds, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_ep.backends.host_memory import empty

_SUM_BLOCK = 1 << 18  # fp32 values that are summed at a time on the CPU: 1 MB


def sum_in_order(rows: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """``[N, H]``: sum over j, in order, of ``weights[n, j] * rows[index[n, j]]``; -1 is none.

    Added in fp32 beginning with the first term, then rounded to the dtype of rows; zero where there
    is no term. The sums with most terms come first and their terms move to the left, so that term j
    belongs to a prefix of them; on the CPU a block of sums stays in the cache until it is rounded.
    """
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    num_terms = (index >= 0).sum(dim=1)
    order = num_terms.argsort(descending=True, stable=True)
    order, without = order.tensor_split([int((num_terms > 0).sum())])
    to_left = (index < 0).byte().argsort(dim=1, stable=True)[order]
    terms = index[order].gather(1, to_left).long()
    factors = None if weights is None else weights[order].gather(1, to_left).unsqueeze(2)

    sums = empty((index.shape[0], rows.shape[1]), rows).index_fill_(0, without, 0.0)
    block = max(16, _SUM_BLOCK // rows.shape[1]) if rows.device.type == "cpu" else len(order)
    for begin in range(0, len(order), max(1, block)):
        here = slice(begin, begin + block)
        lengths = (terms[here] >= 0).sum(dim=0).tolist()
        total = rows.index_select(0, terms[here, 0]).to(wide)
        if factors is not None:
            total *= factors[here, 0]
        for column, length in enumerate(lengths[1:], start=1):
            if length == 0:
                break
            term = rows.index_select(0, terms[begin : begin + length, column])
            if factors is not None:
                term = term.to(wide).mul_(factors[begin : begin + length, column])
            total[:length] += term
        sums.index_copy_(0, order[here], total.to(rows.dtype))
    return sums


def gather_or_zero(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]`` with zero where index is -1."""
    if values.numel() == 0:
        return values.new_zeros(index.shape)
    return torch.where(index >= 0, values[index.clamp(min=0).long()], 0.0)
