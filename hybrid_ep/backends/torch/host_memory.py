"""An outbox that the ranks of a host share. It only saves time: results are those of messages."""

from __future__ import annotations

import os
import secrets
from mmap import mmap

import torch
from torch import Tensor

from hybrid_ep.backends.torch.messages import Messages
from hybrid_ep.shape import Shape


class HostOutbox:
    """Tokens that the ranks of one host publish for each other: the pull of the kernels, in DRAM.

    A message costs a gather, two copies through a socket and a scatter; here a token is copied once
    by its rank and then straight into its rows. The calls use two halves in turn. The exchange that
    starts a call tells that all ranks have published; a rank that publishes call n+2 has had that
    exchange of call n+1, so all peers have finished pulling call n.

    Args:
        mapped: the memory, the same for all ranks.
        shape: how many tokens of how many ranks.
        rank: this one.
        token_bytes: room for one token.
    """

    SECTION = 64  # what follows another payload starts at a multiple of these bytes

    def __init__(self, mapped: mmap, shape: Shape, rank: int, token_bytes: int) -> None:
        self.token_bytes = token_bytes
        with torch.inference_mode(False):  # later calls in any mode write to it
            self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._tokens = shape.num_ranks * shape.max_tokens
        self._first = rank * shape.max_tokens

    @classmethod
    def size(cls, shape: Shape, token_bytes: int) -> int:
        half = shape.num_ranks * shape.max_tokens * token_bytes + 4 * cls.SECTION
        return 2 * (half // cls.SECTION * cls.SECTION)

    def publish(self, payloads: list[Tensor | None], call: int) -> list[Tensor | None]:
        """Write my ``[T, width]`` of each payload; returns ``[R * max_tokens, width]``, all ranks'.

        They hold the peers' tokens once the exchange that starts the call is over.
        """
        begin = call % 2 * (self._bytes.numel() // 2)
        everybody: list[Tensor | None] = []
        for payload in payloads:
            if payload is None:
                everybody.append(None)
                continue
            size = self._tokens * payload.shape[1] * payload.element_size()
            view = self._bytes[begin : begin + size].view(payload.dtype).view(-1, payload.shape[1])
            view[self._first : self._first + payload.shape[0]].copy_(payload)
            everybody.append(view)
            begin += -(-size // self.SECTION) * self.SECTION
        return everybody


def map_together(exchange: Messages, num_bytes: int) -> mmap | None:
    """Memory that all ranks share, or None (on all of them) where one of them cannot have it.

    Rank 0 makes it without a name in any file system, so nothing is left behind; the others open it
    through rank 0's process. They cannot if they run on another host or in another container, and
    no rank can without descriptors or under a limit on the size of files.
    """
    rank, ranks = exchange.group.rank, exchange.group.num_ranks
    made, ticket, mapped, agreed = -1, _NO_TICKET, None, False
    try:
        if rank == 0:
            made, ticket = _make_memory(num_bytes)
        ticket = torch.tensor(ticket, dtype=torch.int64, device="cpu")
        sends = [[ticket] if rank == 0 else [] for _ in range(ranks)]
        recvs = [[ticket] if peer == 0 else [] for peer in range(ranks)]
        exchange(sends, recvs)

        mapped = _map_ticket(*ticket.tolist(), num_bytes)
        mine = int(mapped is not None)
        told = torch.full((ranks, 1), mine, dtype=torch.int64, device="cpu")
        heard = told.clone()
        exchange([[row] for row in told], [[row] for row in heard])
        agreed = bool(heard.all())
    finally:
        if made >= 0:
            os.close(made)
        if mapped is not None and not agreed:
            mapped.close()
    return mapped if agreed else None


_NO_TICKET = (0, -1, 0)


def _make_memory(num_bytes: int) -> tuple[int, tuple[int, int, int]]:
    """A descriptor of new memory, and the ticket to it: process, descriptor, nonce."""
    descriptor = -1
    try:
        nonce = secrets.randbits(62)
        descriptor = os.memfd_create(_memory_name(nonce))
        os.ftruncate(descriptor, num_bytes)
    except _REFUSED:
        if descriptor >= 0:
            os.close(descriptor)
        return -1, _NO_TICKET
    return descriptor, (os.getpid(), descriptor, nonce)


# no memfd in this system, none allowed, none left, no size such as this
_REFUSED = (AttributeError, OSError, ValueError, OverflowError, MemoryError)


def _memory_name(nonce: int) -> str:
    return f"hybrid_ep-{nonce:x}"


def _map_ticket(process: int, descriptor: int, nonce: int, num_bytes: int) -> mmap | None:
    if descriptor < 0:
        return None
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        # on another host, or in another container, that path is missing or something else
        if not os.readlink(path).startswith(f"/memfd:{_memory_name(nonce)} "):
            return None
        opened = os.open(path, os.O_RDWR)
        try:
            return mmap(opened, num_bytes)
        finally:
            os.close(opened)
    except _REFUSED:
        return None
