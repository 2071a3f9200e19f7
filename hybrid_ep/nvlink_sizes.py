"""Bytes of the nvlink backend's memory and who publishes, for machines without the extension.

csrc/layout/ describes that memory; a test holds what is here and the extension together.
"""

from __future__ import annotations

from hybrid_ep.limits import round_up

CHUNK_TOKENS = 128
PARCEL_TOKENS = 16
MAX_CHANNELS = 256
CALL_WORDS = 5  # a source announces four verbs in turn, and that it has given up
REGION_ALIGN = 128


def symmetric_regions(
    *,
    ranks_per_node: int,
    num_local_experts: int,
    max_tokens: int,
    hidden: int,
    topk: int,
    itemsize: int,
    scale_bytes: int,
) -> dict[str, int]:
    """Bytes of each region of one rank's symmetric memory, as csrc/layout/buffer_layout.h has them.

    Args:
        ranks_per_node: R, ranks that reach each other's memory.
        num_local_experts: experts of one rank.
        max_tokens: T.
        hidden: elements of a row.
        topk: K.
        itemsize: bytes of an element of the widest payload.
        scale_bytes: bytes of scales per token beside that payload.

    Returns:
        dict: region name -> bytes, each a multiple of 128.
    """
    ranks, tokens = ranks_per_node, max_tokens
    record = record_bytes(hidden=hidden, topk=topk, itemsize=itemsize, scale_bytes=scale_bytes)
    num_chunks = -(-tokens // CHUNK_TOKENS)
    flags = round_up(MAX_CHANNELS + -(-tokens // PARCEL_TOKENS) + 1, 16)  # of a source
    most_others = min(topk, ranks - 1)  # other ranks that a token goes to
    experts = round_up(num_chunks * CHUNK_TOKENS * topk * 2, 128)  # int16
    chunk_counts = round_up((num_local_experts + 1) * num_chunks * 2, 128)  # uint16
    regions = {
        "outbox": 2 * tokens * round_up(record, 128),  # each record begins a cache line
        "routing_inbox": 2 * ranks * (experts + chunk_counts),
        "inbox": tokens * most_others * round_up(hidden * max(2, itemsize), 16),
        "value_inbox": tokens * topk * 4,
        "flags": ranks * flags * 8,
        "calls": ranks * CALL_WORDS * 8,
        "sum_flags": tokens * most_others * 8,
    }
    return {name: round_up(size, REGION_ALIGN) for name, size in regions.items()}


def record_bytes(*, hidden: int, topk: int, itemsize: int, scale_bytes: int) -> int:
    """Bytes of a token in an outbox and on the wire: row, scales and weights, each padded to 16."""
    return round_up(hidden * itemsize, 16) + round_up(scale_bytes, 16) + round_up(4 * topk, 16)


def tokens_by_sms(num_sms: int, num_tokens: int) -> int:
    """How many tokens of a dispatch SMs publish, if the size is not exact and no graph holds it.

    The copy engine publishes the others.
    """
    if num_sms > 32 or num_tokens < 2048:
        return num_tokens
    return 512 if num_sms > 16 else 0


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
