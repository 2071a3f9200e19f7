"""Bytes of a rank's symmetric memory and of a live handle on several nodes."""

from __future__ import annotations

from hybrid_ep.layout.buffer_layout import MAX_CHANNELS, REGION_ALIGN, symmetric_regions
from hybrid_ep.layout.handle_layout import handle_bytes
from hybrid_ep.layout.record_layout import record_bytes
from hybrid_ep.limits import round_up

# kNumKinds of SlotFlag, and kOwnWindows, of csrc/layout/nodes_layout.h
NUM_SLOT_FLAGS, OWN_WINDOWS = 6, 4


def nodes_regions(
    *,
    num_nodes: int,
    ranks_per_node: int,
    num_local_experts: int,
    max_tokens: int,
    hidden: int,
    topk: int,
    itemsize: int,
    scale_bytes: int,
    chunk_tokens: int,
    window: int,
) -> dict[str, int]:
    """Bytes of each region of one rank's symmetric memory.

    Args:
        num_nodes: nodes of the group.
        ranks_per_node: ranks that reach each other's memory.
        num_local_experts: experts of one rank.
        max_tokens: T.
        hidden: elements of a row.
        topk: K.
        itemsize: bytes of an element of the widest payload.
        scale_bytes: bytes of scales per token beside that payload.
        chunk_tokens: tokens of a slot.
        window: slots between two rail peers.

    Returns:
        dict: region name -> bytes, each a multiple of 128.
    """
    world = symmetric_regions(
        ranks_per_node=num_nodes * ranks_per_node,
        num_local_experts=num_local_experts,
        max_tokens=max_tokens,
        hidden=hidden,
        topk=topk,
        itemsize=itemsize,
        scale_bytes=scale_bytes,
    )
    del world["inbox"], world["sum_flags"]  # sums pass through windows
    num_chunks = -(-max_tokens // chunk_tokens)
    own_window, window = (min(slots, num_chunks) for slots in (OWN_WINDOWS * window, window))
    push_slots = (num_nodes - 1) * window + own_window
    slots = num_nodes * window
    tokens = slots * chunk_tokens
    record = record_bytes(hidden=hidden, topk=topk, itemsize=itemsize, scale_bytes=scale_bytes)
    sum_bytes = round_up(hidden * max(2, itemsize), 16)
    sum_record = round_up(sum_bytes + round_up(4 * topk, 16), 128)
    windows = {
        "relay_window": tokens * round_up(record, 128),
        "push_window": push_slots * chunk_tokens * ranks_per_node * sum_bytes,
        "push_values": push_slots * chunk_tokens * topk * 4,
        "outgoing": tokens * sum_record,
        "home_window": tokens * sum_record,
        "slot_flags": NUM_SLOT_FLAGS * slots * ranks_per_node * 8,
        "push_free_flags": push_slots * 8,
        "pushed_flags": num_nodes * max_tokens * ranks_per_node * 8,
        "summed_flags": num_nodes * max_tokens * 8,
        "rail_flags": num_nodes * (2 * MAX_CHANNELS + 1) * 8,
    }
    return world | {name: round_up(size, REGION_ALIGN) for name, size in windows.items()}


def nodes_handle_bytes(
    *, num_nodes: int, ranks_per_node: int, num_local_experts: int, max_tokens: int, topk: int
) -> int:
    """Bytes of a live handle's layout on the nvshmem backend, whatever the routing.

    Behind that of one node of all ranks: the experts of my tokens, 2 bytes each, and a word for
    each token of each rail peer. Sections are padded to 4 words.
    """
    words = handle_bytes(
        num_ranks=num_nodes * ranks_per_node,
        num_local_experts=num_local_experts,
        max_tokens=max_tokens,
        topk=topk,
        has_inbox=False,
    )
    words //= 4
    for section in (-(-max_tokens * topk // 2), num_nodes * max_tokens):
        words = round_up(words + section, 4)
    return 4 * words
