"""Host memory of the torch backend: blocks used again, and an outbox that ranks of a host share.

Both only save time: results and order are those of messages.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import weakref
from mmap import mmap

import torch
from torch import Tensor

from hybrid_ep.backends.messages import Exchange
from hybrid_ep.topology import Topology


class HostMemory:
    """Large blocks of host memory, used again once the tensor in them is gone.

    malloc gives blocks of this size back to the system, and faulting their pages in anew costs more
    than twice the copy that fills them (4 ranks on 2 cores, 67 MB each: 51 ms against 22).
    """

    MIN_BYTES = 1 << 20
    MAX_FREE = 4  # blocks

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def empty(self, shape: tuple[int, int], like: Tensor) -> Tensor:
        """As ``like.new_empty(shape)``."""
        num_bytes = shape[0] * shape[1] * like.element_size()
        if like.device.type != "cpu" or num_bytes < self.MIN_BYTES:
            return like.new_empty(shape)
        fitting = [b for b in self._free if num_bytes <= b.numel() <= 2 * num_bytes]
        if fitting:
            block = min(fitting, key=Tensor.numel)
            self._free = [b for b in self._free if b is not block]
        else:  # an eighth more, since the number of rows changes from call to call
            block = torch.empty(num_bytes + num_bytes // 8, dtype=torch.uint8)
        lease = (ctypes.c_char * num_bytes).from_address(block.data_ptr())
        weakref.finalize(lease, self._give_back, block).atexit = False
        return torch.frombuffer(lease, dtype=like.dtype).view(shape)

    def _give_back(self, block: Tensor) -> None:
        self._free = [*self._free, block][-self.MAX_FREE :]


class HostOutbox:
    """Tokens that the ranks of one host publish for each other: the pull of the kernels, in DRAM.

    A message costs a gather, two copies through a socket and a scatter; here a token is copied once
    by its rank and then straight into its rows. The calls use two halves in turn. The exchange that
    starts a call tells that all ranks have published; a rank that publishes call n+2 has had that
    exchange of call n+1, so all peers have finished pulling call n.

    Args:
        mapped: the memory, the same for all ranks.
        token_bytes: room for one token.
    """

    SECTION = 64  # what follows another payload starts at a multiple of these bytes

    def __init__(self, mapped: mmap, topology: Topology, max_tokens: int, token_bytes: int) -> None:
        self.token_bytes = token_bytes
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._topology = topology
        self._max_tokens = max_tokens

    @classmethod
    def size(cls, topology: Topology, max_tokens: int, token_bytes: int) -> int:
        half = topology.num_ranks * max_tokens * token_bytes + 4 * cls.SECTION
        return 2 * (half // cls.SECTION * cls.SECTION)

    def publish(self, payloads: list[Tensor | None], call: int) -> list[Tensor | None]:
        """Write my ``[T, width]`` of each payload; returns ``[R * max_tokens, width]``, all ranks'.

        They hold the peers' tokens once the exchange that starts the call is over.
        """
        begin = call % 2 * (self._bytes.numel() // 2)
        first, ranks = self._topology.rank * self._max_tokens, self._topology.num_ranks
        everybody: list[Tensor | None] = []
        for payload in payloads:
            if payload is None:
                everybody.append(None)
                continue
            size = ranks * self._max_tokens * payload.shape[1] * payload.element_size()
            view = self._bytes[begin : begin + size].view(payload.dtype).view(-1, payload.shape[1])
            view[first : first + payload.shape[0]].copy_(payload)
            everybody.append(view)
            begin += -(-size // self.SECTION) * self.SECTION
        return everybody


def map_together(exchange: Exchange, num_bytes: int, phase: str, call: int) -> mmap | None:
    """Memory that all ranks share, or None (on all of them) where one of them cannot have it.

    Rank 0 makes it without a name in any file system, so nothing is left behind; the others open it
    through rank 0's process. They cannot if they run on another host or in another container, and
    no rank can without descriptors or under a limit on the size of files.
    """
    rank, ranks = exchange.topology.rank, exchange.topology.num_ranks
    made, ticket, mapped, agreed = -1, _NO_TICKET, None, False
    try:
        if rank == 0:
            made, ticket = _make_memory(num_bytes)
        ticket = torch.tensor(ticket)
        sends = [[ticket] if rank == 0 else [] for _ in range(ranks)]
        recvs = [[ticket] if peer == 0 else [] for peer in range(ranks)]
        exchange(sends, recvs, phase=phase, call=call)

        mapped = _map_ticket(*ticket.tolist(), num_bytes)
        told = torch.full((ranks, 1), int(mapped is not None), dtype=torch.int64)
        heard = told.clone()
        exchange([[row] for row in told], [[row] for row in heard], phase=phase, call=call)
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


def as_words(tensor: Tensor) -> Tensor:
    """The same bytes as the widest integers that divide a row: moving knows no dtype."""
    width = tensor.shape[1] * tensor.element_size()
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    size = next(size for size in words if width % size == 0)
    # to one dimension, since the one row of a wider tensor is contiguous and keeps its stride
    flat = tensor.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % size:
        flat = flat.clone()
    return flat.view(words[size]).view(tensor.shape[0], width // size)
