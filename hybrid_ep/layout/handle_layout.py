"""Bytes of the layout that a live handle owns."""

from __future__ import annotations

from hybrid_ep.limits import round_up


def handle_bytes(
    *,
    num_ranks: int,
    num_local_experts: int,
    max_tokens: int,
    topk: int,
    has_inbox: bool = True,
) -> int:
    """Bytes of a live handle's layout on the nvlink backend: the worst case, whatever the routing.

    In int32 words: a header, each source's first copy, counts and offsets, 4 per possible copy, 1
    per possible row; per token a word for its own copy, 2 bytes per other rank it may go to (if
    their sums come home through an inbox), a byte for how many, and one per slot. Sections are
    padded to 4.
    """
    copies = num_ranks * max_tokens
    words = 16
    for section in (
        num_ranks + 1,
        num_local_experts,
        num_local_experts + 1,
        4 * copies,
        copies * min(topk, num_local_experts),
        max_tokens,
        -(-max_tokens * min(topk, num_ranks - 1) // 2) if has_inbox else 0,
        -(-max_tokens // 4),
        -(-max_tokens * topk // 4),
    ):
        words = round_up(words + section, 4)
    return 4 * words
