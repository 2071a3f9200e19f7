"""The torch backend: the specification of the library, and what runs where nothing faster can.

It imports torch only and runs on any device: gloo on the CPU, NCCL on GPUs, and gloo with host
copies where several ranks share a GPU. The other backends are compared with it bit by bit, so the
places where it adds and where it rounds are part of the contract:

    expert side   acc = sum over the token's local experts, in expert order, in fp32
                  (weight * row is rounded to fp32 before it is added), rounded to the payload dtype
    home          y = sum over the ranks of a node in rank order in fp32, rounded; with several
                  nodes, then the sum of those over the nodes, in order, rounded once more

Sums start with their first term, not with zero, so that a sum of one row is that row.

    token t of rank s --send_tokens--> copy c of rank r --copy_rows--> rows of the local experts
    y[t] <--home_copies-- sum of copy c <--copy_rows-- rows
"""

from __future__ import annotations

import ctypes
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from mmap import mmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.backends import Route
from hybrid_ep.errors import PeerError
from hybrid_ep.topology import Topology

_PHASES = ("route", "dispatch", "combine")
_SUM_BLOCK = 1 << 18  # fp32 values that are summed at a time on the CPU: 1 MB


class _Layout:
    """Names for the parts of a torch layout, which are views of one int32 tensor.

    Attributes:
        num_copies: copies that this rank receives; num_rows: rows they need, padding included.
        send_counts, recv_counts: lists, copies per peer.
        send_tokens: ``[copies sent]``, token of each copy, ordered by (peer, token).
        home_copies: ``[T, min(K, R)]``, the token's copies in rank order, -1 where it has fewer.
        positions: ``[T, K]``, slot -> place of its expert among the token's distinct experts in
            ascending order; -1 for a slot without expert.
        copy_rows: ``[num_copies, K]``, row for each such place, -1 where the expert is not mine or
            the row was dropped.
        sources: ``[num_copies]``, ``source rank * max_tokens + source token`` of each copy.
    """

    HEADER = 4

    def __init__(self, storage: Tensor, num_ranks: int, max_tokens: int, topk: int) -> None:
        header = storage[: self.HEADER + 2 * num_ranks].tolist()
        self.num_tokens, self.num_copies, self.num_rows, num_sent = header[: self.HEADER]
        self.send_counts = header[self.HEADER : self.HEADER + num_ranks]
        self.recv_counts = header[self.HEADER + num_ranks :]
        fanout = min(topk, num_ranks)
        shapes = {
            "send_tokens": (max_tokens * fanout, (num_sent,)),
            "home_copies": (max_tokens * fanout, (self.num_tokens, fanout)),
            "positions": (max_tokens * topk, (self.num_tokens, topk)),
            "copy_rows": (num_ranks * max_tokens * topk, (self.num_copies, topk)),
            "sources": (num_ranks * max_tokens, (self.num_copies,)),
        }
        begin = self.HEADER + 2 * num_ranks
        for name, (capacity, shape) in shapes.items():
            size = 1
            for length in shape:
                size *= length
            setattr(self, name, storage[begin : begin + size].view(shape))
            begin += capacity

    @staticmethod
    def size(num_ranks: int, max_tokens: int, topk: int) -> int:
        """Int32 words of the storage: the worst case, so that shapes never depend on routing."""
        fanout = min(topk, num_ranks)
        per_token = 2 * fanout + topk + num_ranks * (topk + 1)
        return _Layout.HEADER + 2 * num_ranks + max_tokens * per_token


@dataclass
class _Exchange:
    """Point-to-point messages of equal meaning between all ranks: one list of tensors a peer."""

    group: Any
    topology: Topology
    timeout: timedelta
    staged: bool  # gloo cannot send from a GPU: go through host memory
    failure: PeerError | None = None

    def __call__(
        self,
        sends: Sequence[Sequence[Tensor]],
        recvs: Sequence[Sequence[Tensor]],
        *,
        phase: str,
        call: int,
    ) -> None:
        """Send ``sends[r]`` to rank r and fill ``recvs[r]`` from it; my own rank is left alone."""
        if self.topology.num_ranks == 1:
            return
        work: list[tuple[int, dist.Work]] = []
        keep: list[Tensor] = []  # isend does not hold its tensor
        landed: list[tuple[Tensor, Tensor]] = []
        try:
            operations = []
            for step in range(1, self.topology.num_ranks):
                # rank r talks to r+1, r+2, ... so that no receiver gets everything at once
                source = (self.topology.rank - step) % self.topology.num_ranks
                target = (self.topology.rank + step) % self.topology.num_ranks
                for tensor in recvs[source]:
                    if tensor.numel():
                        buffer = torch.empty_like(tensor, device="cpu") if self.staged else tensor
                        landed.append((tensor, buffer))
                        operations.append((dist.irecv, buffer, source))
                for tensor in sends[target]:
                    if tensor.numel():
                        buffer = tensor.cpu() if self.staged else tensor
                        keep.append(buffer)
                        operations.append((dist.isend, buffer, target))
            work = self._start(operations)
            for peer, request in work:
                self._wait(request, peer, phase, call)
        except PeerError as error:
            self.failure = error
            raise
        if self.staged:
            for tensor, buffer in landed:
                tensor.copy_(buffer)

    def _start(self, operations: list[tuple[Any, Tensor, int]]) -> list[tuple[int, dist.Work]]:
        peers = [peer for _, _, peer in operations]
        to_global = self._global_rank
        if dist.get_backend(self.group) == "nccl" and operations:
            batch = [dist.P2POp(op, t, to_global(p), self.group) for op, t, p in operations]
            requests = dist.batch_isend_irecv(batch)
            return [(peers[0], request) for request in requests]
        return [(p, op(t, to_global(p), group=self.group)) for op, t, p in operations]

    def _global_rank(self, peer: int) -> int:
        return dist.get_global_rank(self.group, peer)

    def _wait(self, request: dist.Work, peer: int, phase: str, call: int) -> None:
        try:
            if dist.get_backend(self.group) == "nccl":
                request.wait()  # orders the stream; NCCL's watchdog keeps the deadline
            else:
                request.wait(self.timeout)
        except RuntimeError as error:
            raise PeerError(
                rank=self.topology.rank,
                peer=peer,
                phase=phase,
                call=call,
                reason=f"nothing came within {self.timeout.total_seconds():g} s or the connection "
                f"closed ({str(error).splitlines()[0]})",
            ) from error


class _HostMemory:
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


class _HostOutbox:
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


def _map_together(exchange: _Exchange, num_bytes: int, phase: str, call: int) -> mmap | None:
    """Memory that all ranks share, or None (on all of them) where they are not on one host.

    Rank 0 makes it without a name in any file system, so nothing is left behind; the others open it
    through rank 0's process.
    """
    rank, ranks = exchange.topology.rank, exchange.topology.num_ranks
    ticket = torch.zeros(3, dtype=torch.int64)  # process, descriptor, nonce
    mine = -1
    if rank == 0:
        nonce = secrets.randbits(62)
        if hasattr(os, "memfd_create"):
            mine = os.memfd_create(_memory_name(nonce))
            os.ftruncate(mine, num_bytes)
        ticket = torch.tensor([os.getpid(), mine, nonce])
    sends = [[ticket] if rank == 0 else [] for _ in range(ranks)]
    recvs = [[ticket] if peer == 0 else [] for peer in range(ranks)]
    exchange(sends, recvs, phase=phase, call=call)

    mapped = _map_ticket(*ticket.tolist(), num_bytes)
    told = torch.full((ranks, 1), int(mapped is not None), dtype=torch.int64)
    heard = told.clone()
    exchange([[row] for row in told], [[row] for row in heard], phase=phase, call=call)
    if mine >= 0:
        os.close(mine)
    return mapped if bool(heard.all()) else None


def _memory_name(nonce: int) -> str:
    return f"hybrid_ep-{nonce:x}"


def _map_ticket(process: int, descriptor: int, nonce: int, num_bytes: int) -> mmap | None:
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
    except OSError:
        return None


class TorchBackend:
    """See the module; the methods are those of ``Backend``."""

    name = "torch"

    def __init__(
        self,
        group: Any,
        topology: Topology,
        *,
        num_experts: int,
        max_tokens: int,
        topk: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._topology = topology
        self._num_local_experts = num_experts // topology.num_ranks
        self._max_tokens = max_tokens
        self._topk = topk
        self._device = device
        self._call = 0
        self.layout_size = _Layout.size(topology.num_ranks, max_tokens, topk)
        carrier = "nothing" if topology.num_ranks == 1 else dist.get_backend(group)
        self._exchange = _Exchange(
            group,
            topology,
            timedelta(seconds=timeout_s),
            staged=device.type != "cpu" and carrier != "nccl",
        )
        self._carrier = carrier + (" through host memory" if self._exchange.staged else "")
        self._memory = _HostMemory()
        self._outbox: _HostOutbox | None = None
        self._may_share = device.type == "cpu" and topology.num_ranks > 1

    def describe(self) -> str:
        shared = ", tokens by shared memory on one host" if self._may_share else ""
        return f"torch: point-to-point messages, carried by {self._carrier}{shared}"

    def check(self) -> None:
        if self._exchange.failure is not None:
            raise self._exchange.failure

    def destroy(self) -> None:
        self._outbox = None

    # ---- route

    def route(self, topk_idx: Tensor, *, max_rows: int | None, align: int) -> Route:
        ranks, topk = self._topology.num_ranks, self._topk
        experts, positions = _distinct_experts(topk_idx)
        # copies: the token once for each rank that has one of its experts
        present = _one_hot_any(experts, self._num_local_experts, ranks)  # [T, R]
        send_counts = present.sum(dim=0)
        peer_of_copy, send_tokens = present.t().nonzero(as_tuple=True)

        outbox = self._outbox_for("route", (topk * experts.element_size(),))
        if outbox is not None:
            unused = self._max_tokens - experts.shape[0]
            everybody = torch.nn.functional.pad(experts, (0, 0, 0, unused), value=-1)
            everybody = outbox.publish([_as_words(everybody)], self._call)[0].view(experts.dtype)
        recv_counts = torch.empty_like(send_counts)
        self._agree("route", (topk,), send_counts, recv_counts)
        sent, received = send_counts.tolist(), recv_counts.tolist()
        if outbox is None:
            numbers = torch.arange(experts.shape[0], dtype=experts.dtype, device=self._device)
            numbers += self._topology.rank * self._max_tokens
            outgoing = torch.cat([experts, numbers.unsqueeze(1)], dim=1)
            copies = self._exchange_rows(outgoing, send_tokens, sent, received, "route")
            copies, sources = copies[:, :topk], copies[:, topk]
        else:
            sources = self._is_mine(everybody).any(dim=1).nonzero().squeeze(1)
            copies = everybody.index_select(0, sources)

        copy_rows, counts, offsets, required = self._assign_rows(copies, max_rows, align)
        home_copies = _home_copies(present, peer_of_copy, send_tokens, min(topk, ranks))

        layout = torch.zeros(self.layout_size, dtype=torch.int32, device=self._device)
        header = [topk_idx.shape[0], copies.shape[0], required, send_tokens.shape[0]]
        layout[: len(header) + 2 * ranks] = torch.tensor(
            header + sent + received, dtype=torch.int32, device=self._device
        )
        parts = self._parts(layout)
        parts.send_tokens.copy_(send_tokens)
        parts.home_copies.copy_(home_copies)
        parts.positions.copy_(positions)
        parts.copy_rows.copy_(copy_rows)
        parts.sources.copy_(sources)
        return Route(
            layout,
            counts.int(),
            offsets.int(),
            torch.tensor(required, dtype=torch.int32, device=self._device),
        )

    def _assign_rows(
        self, copies: Tensor, max_rows: int | None, align: int
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Rows ordered by (local expert, source rank, source token), the last two as copies are."""
        slot = self._is_mine(copies).flatten().nonzero().squeeze(1)  # copy * K + place
        expert = copies.flatten()[slot] - self._topology.rank * self._num_local_experts
        counts = torch.bincount(expert, minlength=self._num_local_experts)
        ends = counts.add(align - 1).div(align, rounding_mode="floor").mul(align).cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends])
        required = int(offsets[-1])

        order = torch.argsort(expert, stable=True)
        unpadded = counts.cumsum(0) - counts
        row = torch.empty_like(expert)
        row[order] = torch.arange(expert.numel(), dtype=row.dtype, device=self._device)
        row += (offsets[:-1] - unpadded)[expert]
        if max_rows is not None and required > max_rows:
            # rows beyond the bound are dropped: the last experts lose theirs first
            row = torch.where(row < max_rows, row, -1)
            kept = (max_rows - offsets[:-1]).clamp(min=0)
            counts = torch.minimum(counts, kept)
            offsets = offsets.clamp(max=max_rows)
        copy_rows = torch.full_like(copies, -1)
        copy_rows.view(-1)[slot] = row
        return copy_rows, counts, offsets, required

    def _is_mine(self, experts: Tensor) -> Tensor:
        first = self._topology.rank * self._num_local_experts
        return (experts >= first) & (experts < first + self._num_local_experts)

    # ---- dispatch

    def dispatch(
        self,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        layout: Tensor,
        *,
        num_rows: int | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        parts = self._parts(layout)
        num_rows = parts.num_rows if num_rows is None else num_rows
        by_place = None if weights is None else _sum_slots(weights, parts.positions)
        payloads = [None if t is None else _as_words(t) for t in (x, scales, by_place)]
        widths = tuple(0 if p is None else p.shape[1] * p.element_size() for p in payloads)
        outbox = self._outbox_for("dispatch", widths)
        if outbox is not None:
            published = outbox.publish(payloads, self._call)
        self._agree("dispatch", widths)

        copy_rows = parts.copy_rows.flatten()
        slot = (copy_rows >= 0).nonzero().squeeze(1)  # copy * K + place
        row = copy_rows[slot].long()
        copy = slot // self._topk
        source_of_row = torch.zeros(num_rows, dtype=torch.long, device=self._device)
        source_of_row[row] = copy if outbox is None else parts.sources[copy].long()
        padding = None
        if row.numel() < num_rows:
            padding = torch.ones(num_rows, dtype=torch.bool, device=self._device)
            padding[row] = False
            padding = padding.nonzero().squeeze(1)
        if outbox is None:
            published = [None if p is None else self._send_copies(p, parts) for p in payloads]

        def move(source: Tensor, like: Tensor) -> Tensor:
            words = self._memory.empty((num_rows, source.shape[1]), source)
            if source.shape[0] == 0:
                words.zero_()
            else:
                torch.index_select(source, 0, source_of_row, out=words)
                if padding is not None:
                    words.index_fill_(0, padding, 0)
            return words.view(like.dtype).view(num_rows, like.shape[1])

        rows = move(published[0], x)
        moved_scales = None if scales is None else move(published[1], scales)
        if weights is None:
            return rows, None, moved_scales
        by_place = published[2].view(weights.dtype)
        row_weights = weights.new_zeros(num_rows)
        row_weights[row] = by_place[source_of_row[row], slot % self._topk]
        return rows, row_weights, moved_scales

    def _outbox_for(self, phase: str, widths: tuple[int, ...]) -> _HostOutbox | None:
        """The shared outbox with room for such tokens, made anew for wider ones; or None."""
        needed = sum(widths)
        if self._may_share and (self._outbox is None or self._outbox.token_bytes < needed):
            self._agree(phase, widths)  # so that all ranks are here
            size = _HostOutbox.size(self._topology, self._max_tokens, needed)
            mapped = _map_together(self._exchange, size, phase, self._call)
            self._call -= 1  # the set-up is part of the call that needs it
            self._may_share = mapped is not None
            self._outbox = mapped and _HostOutbox(mapped, self._topology, self._max_tokens, needed)
        return self._outbox

    def _send_copies(self, source: Tensor, parts: _Layout) -> Tensor:
        return self._exchange_rows(
            source, parts.send_tokens.long(), parts.send_counts, parts.recv_counts, "dispatch"
        )

    # ---- combine

    def combine(
        self,
        rows: Tensor,
        weights: Tensor | None,
        values: Tensor | None,
        layout: Tensor,
        *,
        num_tokens: int,
    ) -> tuple[Tensor, Tensor | None]:
        parts = self._parts(layout)
        self._agree("combine", (rows.element_size() * rows.shape[1], values is not None))
        place_weights = None if weights is None else _gather(weights, parts.copy_rows)
        partial = _sum_in_order(self._memory, rows, parts.copy_rows, place_weights)
        inbox = self._return_copies(partial, parts)
        y = self._sum_at_home(inbox, parts)
        if values is None:
            return y, None

        home = self._return_copies(_gather(values, parts.copy_rows), parts)
        by_place = home.new_zeros((num_tokens, self._topk))
        by_place.index_add_(0, parts.send_tokens.long(), home)  # one rank owns each place
        return y, _gather_slots(by_place, parts.positions)

    def _sum_at_home(self, inbox: Tensor, parts: _Layout) -> Tensor:
        """Over the ranks of a node in rank order, then over the nodes; rounded after each."""
        nodes = self._topology.num_nodes
        if nodes == 1:
            return _sum_in_order(self._memory, inbox, parts.home_copies)
        ends = torch.tensor(parts.send_counts, device=self._device).cumsum(0)
        peer = torch.bucketize(parts.home_copies.clamp(min=0), ends, right=True)
        node = torch.where(parts.home_copies >= 0, peer // self._topology.ranks_per_node, -1)
        sums = [
            _sum_in_order(self._memory, inbox, torch.where(node == n, parts.home_copies, -1))
            for n in range(nodes)
        ]
        tokens = parts.num_tokens
        sum_of_node = torch.arange(nodes * tokens, device=self._device).view(nodes, tokens).t()
        touched = torch.stack([(node == n).any(dim=1) for n in range(nodes)], dim=1)
        index = torch.where(touched, sum_of_node, -1)
        return _sum_in_order(self._memory, torch.cat(sums), index)

    def _return_copies(self, received: Tensor, parts: _Layout) -> Tensor:
        """Send each copy's result back; what comes home is ordered as ``send_tokens``."""
        home = self._memory.empty((sum(parts.send_counts), received.shape[1]), received)
        sends = list(received.split(parts.recv_counts))
        recvs = list(home.split(parts.send_counts))
        recvs[self._topology.rank].copy_(sends[self._topology.rank])
        self._exchange([[t] for t in sends], [[t] for t in recvs], phase="combine", call=self._call)
        return home

    # ---- shared by the verbs

    def _parts(self, layout: Tensor) -> Any:
        return _Layout(layout, self._topology.num_ranks, self._max_tokens, self._topk)

    def _agree(
        self,
        phase: str,
        signature: tuple[int, ...],
        counts: Tensor | None = None,
        recv_counts: Tensor | None = None,
    ) -> None:
        """Start a call: everybody makes the same one. Carries the counts of copies along."""
        self.check()
        self._call += 1
        ranks, me = self._topology.num_ranks, self._topology.rank
        mine = [_PHASES.index(phase), self._call, *(int(v) for v in signature)]
        sent = torch.tensor([mine] * ranks, dtype=torch.int64)
        if counts is not None:
            sent = torch.cat([sent, counts.cpu().unsqueeze(1)], dim=1)
        width = 8  # the same for every phase, so that different calls can be told apart
        sent = torch.nn.functional.pad(sent, (0, width - sent.shape[1])).to(self._device)
        got = sent.clone()
        self._exchange(
            [[row] for row in sent], [[row] for row in got], phase=phase, call=self._call
        )
        for peer, theirs in enumerate(got.tolist()):
            if theirs[: len(mine)] != mine:
                self._exchange.failure = PeerError(
                    rank=me,
                    peer=peer,
                    phase=phase,
                    call=self._call,
                    reason=f"the peer made another call: (phase, call, sizes) is {mine} here and "
                    f"{theirs[: len(mine)]} there, phases being {', '.join(_PHASES)}",
                )
                raise self._exchange.failure
        if recv_counts is not None:
            recv_counts.copy_(got[:, len(mine)])

    def _exchange_rows(
        self,
        source: Tensor,
        send_tokens: Tensor,
        send_counts: list[int],
        recv_counts: list[int],
        phase: str,
    ) -> Tensor:
        """Gather rows of ``source`` by token for each peer; returns theirs, ordered by rank."""
        me = self._topology.rank
        received = source.new_empty((sum(recv_counts), *source.shape[1:]))
        recvs = list(received.split(recv_counts))
        tokens = list(send_tokens.split(send_counts))
        torch.index_select(source, 0, tokens[me], out=recvs[me])
        sends = [
            source[:0] if peer == me else source.index_select(0, t) for peer, t in enumerate(tokens)
        ]
        recvs[me] = recvs[me][:0]
        self._exchange([[t] for t in sends], [[t] for t in recvs], phase=phase, call=self._call)
        return received


def _distinct_experts(topk_idx: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's distinct experts in ascending order, then -1; and slot -> place among them."""
    topk, big = topk_idx.shape[1], torch.iinfo(torch.int32).max
    ordered, slot = torch.where(topk_idx < 0, big, topk_idx.int()).sort(dim=1, stable=True)
    valid = ordered != big
    new = valid.clone()
    new[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    place = torch.where(valid, new.cumsum(1) - 1, -1)
    positions = torch.empty_like(place).scatter_(1, slot, place)
    # slots without expert write to a column of their own, which is cut off
    experts = torch.full((topk_idx.shape[0], topk + 1), -1, dtype=torch.int32, device=place.device)
    experts.scatter_(1, torch.where(valid, place, topk), ordered)
    return experts[:, :topk].contiguous(), positions


def _one_hot_any(experts: Tensor, num_local_experts: int, num_ranks: int) -> Tensor:
    """Bool ``[T, R]``: does token t have an expert on rank r?"""
    shape = (experts.shape[0], num_ranks + 1)  # the last column stands for "no expert"
    rank = torch.where(experts >= 0, experts // num_local_experts, num_ranks)
    present = torch.zeros(shape, dtype=torch.bool, device=experts.device)
    return present.scatter_(1, rank.long(), True)[:, :num_ranks]


def _home_copies(present: Tensor, peer: Tensor, token: Tensor, fanout: int) -> Tensor:
    """``[T, fanout]``: which copies a token has, in rank order; -1 where there are fewer."""
    slot = present.long().cumsum(1) - 1
    home = torch.full((present.shape[0], fanout), -1, dtype=torch.long, device=present.device)
    home[token, slot[token, peer]] = torch.arange(token.numel(), device=present.device)
    return home


def _sum_in_order(
    memory: _HostMemory, rows: Tensor, index: Tensor, weights: Tensor | None = None
) -> Tensor:
    """``[N, H]``: sum over j, in order, of ``weights[n, j] * rows[index[n, j]]``; -1 is none.

    Added in fp32 beginning with the first term, then rounded to the dtype of rows; zero where there
    is no term. The sums with most terms come first and their terms move to the left, so that term j
    belongs to a prefix of them; on the CPU a block of sums stays in the cache until it is rounded.
    """
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    num_terms = (index >= 0).sum(dim=1)
    order = num_terms.argsort(descending=True, stable=True)
    order, without = order.tensor_split([int((num_terms > 0).sum())])
    to_left = (index < 0).byte().argsort(dim=1, stable=True)[order]
    terms = index[order].gather(1, to_left).long()
    factors = None if weights is None else weights[order].gather(1, to_left).unsqueeze(2)

    sums = memory.empty((index.shape[0], rows.shape[1]), rows).index_fill_(0, without, 0.0)
    block = max(16, _SUM_BLOCK // rows.shape[1]) if rows.device.type == "cpu" else len(order)
    for begin in range(0, len(order), max(1, block)):
        here = slice(begin, begin + block)
        lengths = (terms[here] >= 0).sum(dim=0).tolist()
        total = rows.index_select(0, terms[here, 0]).to(wide)
        if factors is not None:
            total *= factors[here, 0]
        for column, length in enumerate(lengths[1:], start=1):
            if length == 0:
                break
            term = rows.index_select(0, terms[begin : begin + length, column])
            if factors is not None:
                term = term.to(wide).mul_(factors[begin : begin + length, column])
            total[:length] += term
        sums.index_copy_(0, order[here], total.to(rows.dtype))
    return sums


def _gather(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]`` with zero where index is -1."""
    if values.numel() == 0:
        return values.new_zeros(index.shape)
    return torch.where(index >= 0, values[index.clamp(min=0).long()], 0.0)


def _sum_slots(weights: Tensor, positions: Tensor) -> Tensor:
    """Weights by slot -> by place; slots with the same expert add, in slot order."""
    by_place = torch.zeros_like(weights)
    for slot in range(weights.shape[1]):
        place = positions[:, slot : slot + 1].long()
        weight = torch.where(place >= 0, weights[:, slot : slot + 1], 0.0)
        by_place.scatter_add_(1, place.clamp(min=0), weight)
    return by_place


def _gather_slots(by_place: Tensor, positions: Tensor) -> Tensor:
    """By place -> by slot; slots with the same expert get the same value."""
    places = positions.long()
    return torch.where(places >= 0, by_place.gather(1, places.clamp(min=0)), 0.0)


def _as_words(tensor: Tensor) -> Tensor:
    """The same bytes as the widest integers that divide a row: moving knows no dtype."""
    width = tensor.shape[1] * tensor.element_size()
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    size = next(size for size in words if width % size == 0)
    # to one dimension, since the one row of a wider tensor is contiguous and keeps its stride
    flat = tensor.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % size:
        flat = flat.clone()
    return flat.view(words[size]).view(tensor.shape[0], width // size)
