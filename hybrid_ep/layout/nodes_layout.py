"""Bytes of a rank's symmetric memory and of a live handle on several nodes."""

from __future__ import annotations

from dataclasses import replace

from hybrid_ep.config import Config
from hybrid_ep.integers import round_up
from hybrid_ep.layout.buffer_layout import MAX_CHANNELS, REGION_ALIGN, symmetric_regions
from hybrid_ep.layout.handle_layout import handle_bytes
from hybrid_ep.shape import Shape

# kNumKinds of SlotFlag, and kOwnWindows, of csrc/layout/nodes_layout.h
NUM_SLOT_FLAGS, OWN_WINDOWS = 6, 4


def nodes_regions(shape: Shape, config: Config) -> dict[str, int]:
    """Bytes of each region of one rank's symmetric memory.

    Args:
        shape: sizes.
        config: says how many tokens are in a slot, and how many slots between two rail peers.

    Returns:
        dict: region name -> bytes, each a multiple of 128.
    """
    world = symmetric_regions(replace(shape, ranks_per_node=shape.num_ranks))
    del world["inbox"], world["sum_flags"]  # sums pass through windows
    num_nodes, ranks_per_node, max_tokens = shape.num_nodes, shape.ranks_per_node, shape.max_tokens
    chunk_tokens = config.network_chunk_tokens
    window = config.network_channels * config.network_window_chunks
    num_chunks = -(-max_tokens // chunk_tokens)
    own_window, window = (min(slots, num_chunks) for slots in (OWN_WINDOWS * window, window))
    push_slots = (num_nodes - 1) * window + own_window
    slots = num_nodes * window
    tokens = slots * chunk_tokens
    sum_record = round_up(shape.inbox_row_bytes + round_up(4 * shape.topk, 16), 128)
    windows = {
        "relay_window": tokens * round_up(shape.record_bytes, 128),
        "push_window": push_slots * chunk_tokens * ranks_per_node * shape.inbox_row_bytes,
        "push_values": push_slots * chunk_tokens * shape.topk * 4,
        "outgoing": tokens * sum_record,
        "home_window": tokens * sum_record,
        "slot_flags": NUM_SLOT_FLAGS * slots * ranks_per_node * 8,
        "push_free_flags": push_slots * 8,
        "pushed_flags": num_nodes * max_tokens * ranks_per_node * 8,
        "summed_flags": num_nodes * max_tokens * 8,
        "rail_flags": num_nodes * (2 * MAX_CHANNELS + 1) * 8,
    }
    return world | {name: round_up(size, REGION_ALIGN) for name, size in windows.items()}


def nodes_handle_bytes(shape: Shape) -> int:
    """Bytes of a live handle's layout on the nvshmem backend, whatever the routing.

    Behind that of one node of all ranks: the experts of my tokens, 2 bytes each, and a word for
    each token of each rail peer. Sections are padded to 4 words.
    """
    words = handle_bytes(shape, has_inbox=False) // 4
    tokens = shape.max_tokens
    for section in (-(-tokens * shape.topk // 2), shape.num_nodes * tokens):
        words = round_up(words + section, 4)
    return 4 * words
