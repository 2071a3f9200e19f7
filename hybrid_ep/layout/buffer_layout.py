"""Bytes of a rank's symmetric memory on one node."""

from __future__ import annotations

from hybrid_ep.layout.record_layout import record_bytes
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
