"""Does what a rank sends reach every peer, and come back? Asked where the ranks are new.

Each rank sends each rank a token with a pattern of its own, and the rank sends it home again: the
verbs that training uses, over every pair of ranks. A network that loses or mixes up bytes is found
before the first step, by the names of the ranks between which it does. ``hybrid-ep check`` tests
more, with Buffers of its own; this is about the one that is being made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_ep.errors import SetupError

if TYPE_CHECKING:
    from hybrid_ep.buffer import Buffer

_PATTERNS = 120  # distinct values: exact in a byte and in bf16
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)  # what combine takes
_verified: set[tuple[int, int, tuple[str, ...]]] = set()


def verify_once(buffer: Buffer, hosts: list[str]) -> None:
    """``verify`` where this process has not done so for these ranks on these hosts; collective.

    Raises:
        RuntimeError: see ``verify``.
    """
    topology = buffer.topology
    ranks = (topology.num_ranks, topology.ranks_per_node, tuple(hosts))
    if all(buffer.gather(ranks in _verified)):
        return
    verify(buffer)
    _verified.add(ranks)


def verify(buffer: Buffer) -> None:
    """Send a token from every rank to every rank and home again; collective.

    Args:
        buffer: any Buffer; it takes ``num_ranks / max_tokens`` calls, at least one.

    Raises:
        SetupError: a pattern did not arrive as it was sent, on all ranks, with the same text.
        PeerError: a rank did not answer.
    """
    num_ranks = buffer.topology.num_ranks
    wrong = []
    for first in range(0, num_ranks, buffer.max_tokens):
        wrong += _exchange(buffer, range(first, min(first + buffer.max_tokens, num_ranks)))
    everybody = [sentence for theirs in buffer.gather(wrong) for sentence in theirs]
    if everybody:
        more = f" and {len(everybody) - 3} more" if len(everybody) > 3 else ""
        raise SetupError(
            f"data are not what was sent: {'; '.join(everybody[:3])}{more}; hybrid-ep doctor looks "
            "at drivers and devices"
        )


def _exchange(buffer: Buffer, peers: range) -> list[str]:
    """A token to each of the peers and back; a sentence for each that went wrong."""
    from hybrid_ep.ops import combine, dispatch

    me, num_ranks = buffer.topology.rank, buffer.topology.num_ranks
    sent = torch.stack([_pattern(buffer, me, peer) for peer in peers])
    shape = (len(peers), buffer.topk)
    topk_idx = torch.full(shape, -1, dtype=torch.int64, device=buffer.device)
    first_experts = [peer * buffer.num_local_experts for peer in peers]
    topk_idx[:, 0] = torch.tensor(first_experts, dtype=torch.int64, device=buffer.device)
    with torch.no_grad():
        out = dispatch(buffer, sent, topk_idx)
        home = combine(buffer, out.rows.to(_summed(buffer)), out.handle)
    wrong = []
    for source, row in enumerate(out.rows):  # one of each rank, in their order
        if not torch.equal(row, _pattern(buffer, source, me)):
            wrong.append(f"dispatch from rank {source} to rank {me}")
    if me in peers and len(out.rows) != num_ranks:
        wrong.append(f"rank {me} got {len(out.rows)} tokens from {num_ranks} ranks")
    for peer, row, back in zip(peers, sent, home, strict=True):
        if not torch.equal(row.to(back.dtype), back):
            wrong.append(f"combine from rank {peer} to rank {me}")
    return wrong


def _pattern(buffer: Buffer, source: int, peer: int) -> Tensor:
    """``[hidden]``: what ``source`` sends to ``peer``; other pairs differ in every element."""
    dtype = buffer.dtype if buffer.dtype in _SUMMED else torch.uint8
    elements = torch.arange(buffer.hidden, dtype=torch.int64, device=buffer.device)
    return ((elements + 31 * source + 7 * peer) % _PATTERNS).to(dtype)


def _summed(buffer: Buffer) -> torch.dtype:
    return buffer.dtype if buffer.dtype in _SUMMED else torch.bfloat16
