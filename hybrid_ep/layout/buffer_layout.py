"""Bytes of a rank's symmetric memory on one node."""

from __future__ import annotations

from hybrid_ep.integers import round_up
from hybrid_ep.shape import Shape

TILE_TOKENS = 128
PARCEL_TOKENS = 16
MAX_CHANNELS = 256
CALL_WORDS = 5  # a source announces four verbs in turn, and that it has given up
REGION_ALIGN = 128


def symmetric_regions(shape: Shape) -> dict[str, int]:
    """Bytes of each region of one rank's symmetric memory, as csrc/layout/buffer_layout.h has them.

    Returns:
        dict: region name -> bytes, each a multiple of 128.
    """
    ranks, tokens, topk = shape.ranks_per_node, shape.max_tokens, shape.topk
    num_tiles = -(-tokens // TILE_TOKENS)
    flags = round_up(MAX_CHANNELS + -(-tokens // PARCEL_TOKENS) + 1, 16)  # of a source
    most_others = min(topk, ranks - 1)  # other ranks that a token goes to
    experts = round_up(num_tiles * TILE_TOKENS * topk * 2, 128)  # int16
    tile_counts = round_up((shape.num_local_experts + 1) * num_tiles * 2, 128)  # uint16
    regions = {
        "outbox": 2 * tokens * round_up(shape.record_bytes, 128),  # each begins a cache line
        "routing_inbox": 2 * ranks * (experts + tile_counts),
        "inbox": tokens * most_others * shape.inbox_row_bytes,
        "value_inbox": tokens * topk * 4,
        "flags": ranks * flags * 8,
        "calls": ranks * CALL_WORDS * 8,
        "sum_flags": tokens * most_others * 8,
    }
    return {name: round_up(size, REGION_ALIGN) for name, size in regions.items()}
