"""Exchanges of the torch backend over NCCL: each is one ``all_to_all_single``.

NCCL has no tags: it pairs what the ranks of a communicator start, in the order in which they start
it. An ``all_to_all_single`` uses the communicator that the group has for all its collectives, so
the calls of Buffers and the other collectives on a group must come in one order on all its ranks.
The tables that begin a call name the Buffer, so calls of two Buffers in another order are a fault.

    current stream   tables ---+--- copies of rows, sums ---+--- wait --- rows
    NCCL's stream              +- all_to_all of tables      +- all_to_all of rows
    side stream                      +- copy to the host
    host                                   waits for that --+

The host waits for the tables and for nothing else: the current stream goes on meanwhile with what
was queued on it. The ``wait()`` of a Work lets the stream wait, not the host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.backends.torch.messages import Exchange, Rows, Told

_UNTOLD = -1  # in the tables before NCCL fills them; fields begin with the number of a phase
_SPIN_S, _SLEEP_S = 1e-3, 1e-4  # how long the host only looks again, and how seldom later
_LOOK_S = 1.0  # for the tables that have come, once others are late


class _Tables(NamedTuple):
    """Mine and theirs, ``[2, R, width]``, on the device and, once they have come, on the host."""

    on_device: Tensor
    on_host: Tensor


class _Sent(NamedTuple):
    received: Tensor
    work: dist.Work


@dataclass
class Collectives(Exchange):
    """See the module. The device is a GPU; on the CPU, for tests, each exchange is over at once.

    The deadline is that of the tables, where a call waits for its peers. The rows behind them have
    the timeout of NCCL.
    """

    _side: _Side | None = None

    def meet(self) -> None:
        """Exchange a byte with each rank, while a Buffer is made and all of them are here.

        NCCL makes the communicator of a group for its first collective, and holds the host
        meanwhile, without a deadline, until all ranks have come.
        """
        sent = torch.zeros(self.group.num_ranks, dtype=torch.uint8, device=self.group.device)
        group = self.group.process_group
        dist.all_to_all_single(torch.empty_like(sent), sent, group=group)

    def tell(self, fields: list[int], counts: Tensor | None, num_counts: int) -> _Tables:
        told, untold = fields + [0] * num_counts, [_UNTOLD] * (len(fields) + num_counts)
        rows = torch.tensor([[told], [untold]], dtype=torch.int64, device="cpu")
        tables = rows.repeat(1, self.group.num_ranks, 1).to(self.group.device, non_blocking=True)
        if counts is not None:
            tables[0, :, len(fields) :].copy_(counts)
        if self.group.device.type == "cpu":
            self.receive(self._all_to_all(tables[1], tables[0]))
            return _Tables(tables, tables)

        if self._side is None:
            self._side = _Side(tables.shape, self.group.device)
        side = self._side
        side.before.record(torch.cuda.current_stream(self.group.device))
        sent = self._all_to_all(tables[1], tables[0])
        with torch.cuda.stream(side.stream):
            self.receive(sent)
            side.host.copy_(tables, non_blocking=True)
            side.after.record(side.stream)
        tables.record_stream(side.stream)
        return _Tables(tables, side.host)

    def hear(self, told: _Tables) -> Told:
        if self.group.device.type != "cpu":
            self._await(told)
        mine, theirs = told.on_host.tolist()
        for peer, table in enumerate(theirs):
            if table[0] == _UNTOLD:
                raise self.lacks(peer, "NCCL ended the exchange before anything came")
        return Told(mine, theirs)

    def pick(self, source: Tensor, index: Tensor | None = None) -> Rows:
        return Rows(source if index is None else source.index_select(0, index))

    def send(self, rows: Rows, send_counts: list[int], recv_counts: list[int]) -> _Sent:
        sent = rows.source
        received = sent.new_empty((sum(recv_counts), sent.shape[1]))
        # bytes, because NCCL does not know every dtype
        views = received.view(torch.uint8), sent.view(torch.uint8)
        work = self._all_to_all(*views, recv_counts, send_counts).work
        return _Sent(received, work)

    def receive(self, sent: _Sent) -> Tensor:
        try:
            sent.work.wait()
        except RuntimeError as error:
            self._blame("nothing came", error)
        return sent.received

    def _all_to_all(self, received: Tensor, sent: Tensor, *counts: list[int]) -> _Sent:
        """Start one; ``counts`` to receive and to send, by rank, none where all are equal."""
        self.open()
        try:
            group = self.group.process_group
            work = dist.all_to_all_single(received, sent, *counts, group=group, async_op=True)
        except RuntimeError as error:
            self._blame("the exchange could not be started", error)
        return _Sent(received, work)

    def _blame(self, what: str, error: RuntimeError) -> NoReturn:
        """As ``blaming``: NCCL does not say with which peer it failed."""
        peer = (self.group.rank + 1) % self.group.num_ranks
        try:
            with self.blaming(peer, f"{what}, with this or another peer"):
                raise error
        finally:
            del error  # with its traceback it would keep the callers' frames alive

    def _await(self, tables: _Tables) -> None:
        """Wait on the host until they have come.

        The deadline begins when the GPU has done what was queued before them. Between two looks the
        host hears an interrupt, and other threads run.
        """
        before, after = self._side.before, self._side.after
        begin = time.monotonic()
        begun_at = None
        while not after.query():
            now = time.monotonic()
            if begun_at is None and before.query():
                begun_at = now
            if begun_at is not None and now - begun_at > self.timeout_s:
                raise self.lacks(self._find_silent_peer(tables), f"nothing came{self.in_time()}")
            time.sleep(_SLEEP_S if now - begin > _SPIN_S else 0)

    def _find_silent_peer(self, tables: _Tables) -> int:
        """The first peer whose table is not there: those of the others may have come."""
        stream, copied = torch.cuda.Stream(self.group.device), torch.cuda.Event()
        with torch.cuda.stream(stream):
            tables.on_host.copy_(tables.on_device, non_blocking=True)
            copied.record(stream)
        begin = time.monotonic()
        while not copied.query():
            if time.monotonic() - begin > _LOOK_S:  # behind the exchange, in a stream of its own
                return (self.group.rank + 1) % self.group.num_ranks
            time.sleep(_SLEEP_S)
        silent = [peer for peer, table in enumerate(tables.on_host[1]) if table[0] == _UNTOLD]
        silent = [peer for peer in silent if peer != self.group.rank]
        return silent[0] if silent else (self.group.rank + 1) % self.group.num_ranks


class _Side:
    """A stream that takes tables to the host, its place before and after them, and their memory."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.before, self.after = torch.cuda.Event(), torch.cuda.Event()
        with torch.inference_mode(False):  # later calls in any mode write to it
            # pinned: a copy to other memory would hold the host
            self.host = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)
