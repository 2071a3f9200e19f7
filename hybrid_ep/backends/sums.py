"""Sums of rows in a stated order: where the library adds and rounds, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_ep.backends.tensors import as_words, empty

# fp32 values that are summed at a time
_CPU_BLOCK = 1 << 18  # 1 MB, for the cache
_GPU_BLOCK = 1 << 26  # 256 MB: each block takes a launch or two per term


def sum_in_order(
    rows: Tensor, index: Tensor, num_terms: list[int], weights: Tensor | None = None
) -> Tensor:
    """``[N, H]``: sum over ``rows[index[n]]``, ascending in index, each times its weight.

    Added in fp32 beginning with the first term, then rounded to the dtype of rows; zero where there
    is no term. The sums with most terms come first, so that term j belongs to a prefix of them; on
    the CPU a block of sums stays in the cache until it is rounded.

    Args:
        rows: ``[M, H]``.
        index: ``[N, J]``; -1 is no term.
        num_terms: for each j below J, how many sums have more than j terms.
        weights: ``[M]``.
    """
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    terms = torch.where(index < 0, torch.iinfo(index.dtype).max, index).sort(dim=1).values
    order = (index >= 0).sum(dim=1).argsort(descending=True, stable=True)
    terms = terms.index_select(0, order)

    words = as_words(rows)

    def term(here: slice, j: int) -> Tensor:
        row = terms[here, j]
        found = words.index_select(0, row).view(rows.dtype)
        if weights is None:
            return found
        return found.to(wide).mul_(weights.index_select(0, row).unsqueeze(1))

    with_terms = num_terms[0]
    sums = empty((index.shape[0], rows.shape[1]), rows)
    sums.index_fill_(0, order[with_terms:], 0.0)
    on_cpu = rows.device.type == "cpu"
    block = max(1, (_CPU_BLOCK if on_cpu else _GPU_BLOCK) // rows.shape[1])
    for begin in range(0, with_terms, block):
        end = min(begin + block, with_terms)
        total = term(slice(begin, end), 0).to(wide)
        for j, longer in enumerate(num_terms[1:], start=1):
            last = min(longer, end)
            if last <= begin:
                break
            total[: last - begin].add_(term(slice(begin, last), j))
        sums.view(words.dtype).index_copy_(0, order[begin:end], as_words(total.to(rows.dtype)))
    return sums


def gather_or_zero(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]`` with zero where index is -1."""
    if values.numel() == 0:
        return values.new_zeros(index.shape)
    return torch.where(index >= 0, values[index.clamp(min=0).long()], 0.0)
