"""Bytes of one token on its way through dispatch."""

from __future__ import annotations

from hybrid_ep.limits import round_up


def record_bytes(*, hidden: int, topk: int, itemsize: int, scale_bytes: int) -> int:
    """Bytes of a token in an outbox and on the wire: row, scales and weights, each padded to 16."""
    return round_up(hidden * itemsize, 16) + round_up(scale_bytes, 16) + round_up(4 * topk, 16)
