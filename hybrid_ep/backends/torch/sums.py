"""Sums of rows in a stated order: where the library adds and rounds, in torch."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from hybrid_ep.backends.torch.layout import Layout, count_terms
from hybrid_ep.backends.torch.tensors import as_words, empty, to_device
from hybrid_ep.shape import Shape

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


def sum_at_home(
    inbox: Tensor, home_copies: Tensor, home_terms: list[int], layout: Layout, shape: Shape
) -> Tensor:
    """``[T, H]``: over the ranks of a node in rank order, then over the nodes; rounded after each.

    Args:
        inbox: sums of the copies that I sent, ordered as ``layout.send_tokens``.
        home_copies: ``[T, J]``, which of them are of a token, in rank order; -1 for none.
        home_terms: for each j below J, how many tokens have more than j of them.
        layout: of these copies.
        shape: says how ranks are divided into nodes.
    """
    nodes, device = shape.num_nodes, inbox.device
    if nodes == 1:
        return sum_in_order(inbox, home_copies, home_terms)
    ends = to_device(list(accumulate(layout.send_counts)), torch.int64, device)
    peer = torch.bucketize(home_copies.clamp(min=0), ends, right=True)
    node = torch.where(home_copies >= 0, peer // shape.ranks_per_node, -1)
    sums = []
    for n in range(nodes):
        of_node = torch.where(node == n, home_copies, -1)
        sums.append(sum_in_order(inbox, of_node, count_terms(of_node).tolist()))
    number = torch.arange(nodes * layout.num_tokens, dtype=torch.int64, device=device)
    sum_of_node = number.view(nodes, layout.num_tokens).t()
    touched = torch.stack([(node == n).any(dim=1) for n in range(nodes)], dim=1)
    index = torch.where(touched, sum_of_node, -1)
    return sum_in_order(torch.cat(sums), index, count_terms(index).tolist())


def gather_or_zero(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]`` with zero where index is -1."""
    if values.numel() == 0:
        return values.new_zeros(index.shape)
    return torch.where(index >= 0, values[index.clamp(min=0).long()], 0.0)
