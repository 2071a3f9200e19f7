"""Does what a rank sends reach every peer, and come back? Asked where the ranks are new.

Each rank sends each rank a token with a pattern of its own, and the rank sends it home again: the
verbs that training uses, over every pair of ranks. A network that loses or mixes up bytes is found
before the first step, by the names of the ranks between which it does. ``hybrid-ep check`` tests
more, with Buffers of its own; this is about the one that is being made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_ep.communicator import Communicator
from hybrid_ep.errors import SetupError
from hybrid_ep.ops.calls import combine, dispatch

_PATTERNS = 120  # distinct values: exact in a byte and in bf16
_verified: set[tuple[int, int, tuple[str, ...]]] = set()


def verify_once(communicator: Communicator) -> None:
    """``verify`` where this process has not done so for these ranks on these hosts; collective.

    Raises:
        RuntimeError: see ``verify``.
    """
    shape, group = communicator.shape, communicator.group
    ranks = shape.num_ranks, shape.ranks_per_node, tuple(group.hosts)
    if all(group.gather(ranks in _verified)):
        return
    verify(communicator)
    _verified.add(ranks)


def verify(communicator: Communicator) -> None:
    """Send a token from every rank to every rank and home again; collective.

    Args:
        communicator: of any Buffer; it takes ``num_ranks / max_tokens`` calls, at least one.

    Raises:
        SetupError: a pattern did not arrive as it was sent, on all ranks, with the same text.
        PeerError: a rank did not answer.
    """
    num_ranks, most = communicator.shape.num_ranks, communicator.shape.max_tokens
    wrong = []
    for first in range(0, num_ranks, most):
        wrong += _exchange(communicator, range(first, min(first + most, num_ranks)))
    everybody = [sentence for theirs in communicator.group.gather(wrong) for sentence in theirs]
    if everybody:
        more = f" and {len(everybody) - 3} more" if len(everybody) > 3 else ""
        raise SetupError(
            f"data are not what was sent: {'; '.join(everybody[:3])}{more}; hybrid-ep doctor looks "
            "at drivers and devices"
        )


def _exchange(communicator: Communicator, peers: range) -> list[str]:
    """A token to each of the peers and back; a sentence for each that went wrong."""
    shape, device, me = communicator.shape, communicator.device, communicator.group.rank
    dtype, summed = dtypes_for(communicator)
    sent = torch.stack([_pattern(communicator, me, peer, dtype) for peer in peers])
    topk_idx = torch.full((len(peers), shape.topk), -1, dtype=torch.int64, device=device)
    first_experts = [peer * shape.num_local_experts for peer in peers]
    topk_idx[:, 0] = torch.tensor(first_experts, dtype=torch.int64, device=device)
    with torch.no_grad():
        out = dispatch(communicator, sent, topk_idx, None, None, None, None, None, 1, None)
        home = combine(communicator, out.rows.to(summed), None, None, out.handle, None)[0]
    wrong = []
    for source, row in enumerate(out.rows):  # one of each rank, in their order
        if not torch.equal(row, _pattern(communicator, source, me, dtype)):
            wrong.append(f"dispatch from rank {source} to rank {me}")
    if me in peers and len(out.rows) != shape.num_ranks:
        wrong.append(f"rank {me} got {len(out.rows)} tokens from {shape.num_ranks} ranks")
    for peer, row, back in zip(peers, sent, home, strict=True):
        if not torch.equal(row.to(back.dtype), back):
            wrong.append(f"combine from rank {peer} to rank {me}")
    return wrong


def dtypes_for(communicator: Communicator) -> tuple[torch.dtype, torch.dtype]:
    """Of the tokens and of the sums: one, but where tokens are of single bytes."""
    dtype, both = communicator.shape.dtype, communicator.two_way_dtypes
    if not both:
        return torch.uint8, torch.bfloat16
    return (dtype, dtype) if dtype in both else (both[0], both[0])


def _pattern(communicator: Communicator, source: int, peer: int, dtype: torch.dtype) -> Tensor:
    """``[hidden]``: what ``source`` sends to ``peer``; other pairs differ in every element."""
    elements = torch.arange(
        communicator.shape.hidden, dtype=torch.int64, device=communicator.device
    )
    return ((elements + 31 * source + 7 * peer) % _PATTERNS).to(dtype)
