"""The layout that a live handle owns: its bytes, and which rows it leaves to padding."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_ep.integers import round_up
from hybrid_ep.shape import Shape

HEADER_WORDS = 16


def handle_bytes(shape: Shape, *, has_inbox: bool = True) -> int:
    """Bytes of a live handle's layout on the nvlink backend: the worst case, whatever the routing.

    In int32 words: a header, each source's first copy, counts and offsets, 4 per possible copy, 1
    per possible row; per token a word for its own copy, 2 bytes per other rank it may go to (if
    their sums come home through an inbox), a byte for how many, and one per slot. Sections are
    padded to 4.
    """
    ranks, tokens, topk = shape.num_ranks, shape.max_tokens, shape.topk
    experts, copies = shape.num_local_experts, ranks * tokens
    words = HEADER_WORDS
    for section in (
        ranks + 1,
        experts,
        experts + 1,
        4 * copies,
        copies * min(topk, experts),
        tokens,
        -(-tokens * min(topk, ranks - 1) // 2) if has_inbox else 0,
        -(-tokens // 4),
        -(-tokens * topk // 4),
    ):
        words = round_up(words + section, 4)
    return 4 * words


def find_padding(layout: Tensor, shape: Shape, num_rows: int) -> Tensor:
    """Bool ``[M]``: which of the rows no copy fills, by the counts and offsets of the layout."""
    experts = shape.num_local_experts
    counts_at = round_up(HEADER_WORDS + shape.num_ranks + 1, 4)
    offsets_at = round_up(counts_at + experts, 4)
    counts = layout[counts_at : counts_at + experts]
    offsets = layout[offsets_at : offsets_at + experts + 1]
    rows = torch.arange(num_rows, dtype=torch.int32, device=layout.device)
    expert = torch.searchsorted(offsets[1:], rows, right=True).clamp_(max=experts - 1)
    return rows - offsets[expert] >= counts[expert]
