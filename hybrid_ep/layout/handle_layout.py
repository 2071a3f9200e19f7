"""Bytes of the layout that a live handle owns."""

from __future__ import annotations

from hybrid_ep.integers import round_up
from hybrid_ep.shape import Shape


def handle_bytes(shape: Shape, *, has_inbox: bool = True) -> int:
    """Bytes of a live handle's layout on the nvlink backend: the worst case, whatever the routing.

    In int32 words: a header, each source's first copy, counts and offsets, 4 per possible copy, 1
    per possible row; per token a word for its own copy, 2 bytes per other rank it may go to (if
    their sums come home through an inbox), a byte for how many, and one per slot. Sections are
    padded to 4.
    """
    ranks, tokens, topk = shape.num_ranks, shape.max_tokens, shape.topk
    experts, copies = shape.num_local_experts, ranks * tokens
    words = 16
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
