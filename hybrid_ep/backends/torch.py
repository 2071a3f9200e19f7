"""The torch backend: the specification of the library, and what runs where nothing faster can.

It needs no extension and runs on any device: gloo on the CPU, NCCL on GPUs, and gloo with host
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

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.backends import Route
from hybrid_ep.backends.host_memory import HostMemory, HostOutbox, as_words, map_together
from hybrid_ep.backends.messages import Exchange
from hybrid_ep.backends.sums import gather_or_zero, sum_in_order
from hybrid_ep.backends.torch_layout import (
    Layout,
    distinct_experts,
    gather_slots,
    list_home_copies,
    ranks_of_tokens,
    sum_slots,
)
from hybrid_ep.errors import PeerError
from hybrid_ep.topology import Topology

_PHASES = ("route", "dispatch", "combine")


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
        self.layout_size = Layout.size(topology.num_ranks, max_tokens, topk)
        carrier = "nothing" if topology.num_ranks == 1 else dist.get_backend(group)
        self._exchange = Exchange(
            group,
            topology,
            timedelta(seconds=timeout_s),
            staged=device.type != "cpu" and carrier != "nccl",
        )
        self._carrier = carrier + (" through host memory" if self._exchange.staged else "")
        self._memory = HostMemory()
        self._outbox: HostOutbox | None = None
        self._may_share = device.type == "cpu" and topology.num_ranks > 1

    def describe(self) -> str:
        shared = ", tokens by shared memory on one host" if self._may_share else ""
        return f"torch: point-to-point messages, carried by {self._carrier}{shared}"

    def check(self) -> None:
        if self._exchange.failure is not None:
            raise self._exchange.failure

    def destroy(self) -> None:
        self._outbox = None
        self._memory = HostMemory()

    def reclaim(self) -> None:
        pass  # the system keeps shared memory until the last rank has let go of it

    # ---- route

    def route(self, topk_idx: Tensor, *, max_rows: int | None, align: int) -> Route:
        ranks, topk = self._topology.num_ranks, self._topk
        experts, positions = distinct_experts(topk_idx)
        # copies: the token once for each rank that has one of its experts
        present = ranks_of_tokens(experts, self._num_local_experts, ranks)  # [T, R]
        send_counts = present.sum(dim=0)
        peer_of_copy, send_tokens = present.t().nonzero(as_tuple=True)

        outbox = self._outbox_for("route", (topk * experts.element_size(),))
        if outbox is not None:
            unused = self._max_tokens - experts.shape[0]
            everybody = torch.nn.functional.pad(experts, (0, 0, 0, unused), value=-1)
            everybody = outbox.publish([as_words(everybody)], self._call)[0].view(experts.dtype)
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
        home_copies = list_home_copies(present, peer_of_copy, send_tokens, min(topk, ranks))

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
        expert = copies.flatten().index_select(0, slot)
        expert -= self._topology.rank * self._num_local_experts
        counts = torch.bincount(expert, minlength=self._num_local_experts)
        ends = counts.add(align - 1).div(align, rounding_mode="floor").mul(align).cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends])
        required = int(offsets[-1])

        order = _stable_order(expert)
        unpadded = counts.cumsum(0) - counts
        ascending = torch.arange(expert.numel(), dtype=expert.dtype, device=self._device)
        row = torch.empty_like(expert).scatter_(0, order, ascending)
        row += (offsets[:-1] - unpadded).index_select(0, expert)
        if max_rows is not None and required > max_rows:
            # rows beyond the bound are dropped: the last experts lose theirs first
            row = torch.where(row < max_rows, row, -1)
            kept = (max_rows - offsets[:-1]).clamp(min=0)
            counts = torch.minimum(counts, kept)
            offsets = offsets.clamp(max=max_rows)
        copy_rows = torch.full_like(copies, -1)
        copy_rows.view(-1).scatter_(0, slot, row)
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
        by_place = None if weights is None else sum_slots(weights, parts.positions)
        payloads = [None if t is None else as_words(t) for t in (x, scales, by_place)]
        widths = tuple(0 if p is None else p.shape[1] * p.element_size() for p in payloads)
        outbox = self._outbox_for("dispatch", widths)
        if outbox is not None:
            published = outbox.publish(payloads, self._call)
        self._agree("dispatch", widths)

        copy_rows = parts.copy_rows.flatten()
        slot = (copy_rows >= 0).nonzero().squeeze(1)  # copy * K + place
        row = copy_rows.index_select(0, slot).long()
        source = slot // self._topk
        if outbox is not None:
            source = parts.sources.index_select(0, source).long()
        source_of_row = torch.zeros(num_rows, dtype=torch.long, device=self._device)
        source_of_row.scatter_(0, row, source)
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
        by_place = published[2].view(weights.dtype).flatten()
        row_weights = by_place.index_select(0, source * self._topk + slot % self._topk)
        row_weights = weights.new_zeros(num_rows).scatter_(0, row, row_weights)
        return rows, row_weights, moved_scales

    def _outbox_for(self, phase: str, widths: tuple[int, ...]) -> HostOutbox | None:
        """The shared outbox with room for such tokens, made anew for wider ones; or None."""
        needed = sum(widths)
        if self._may_share and (self._outbox is None or self._outbox.token_bytes < needed):
            self._agree(phase, widths)  # so that all ranks are here
            size = HostOutbox.size(self._topology, self._max_tokens, needed)
            mapped = map_together(self._exchange, size, phase, self._call)
            self._call -= 1  # the set-up is part of the call that needs it
            self._may_share = mapped is not None
            self._outbox = mapped and HostOutbox(mapped, self._topology, self._max_tokens, needed)
        return self._outbox

    def _send_copies(self, source: Tensor, parts: Layout) -> Tensor:
        return self._exchange_rows(
            source, parts.send_tokens.long(), parts.send_counts, parts.recv_counts, "dispatch"
        )

    # ---- combine

    def dispatch_fresh(
        self,
        topk_idx: Tensor,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        *,
        max_rows: int | None,
        align: int,
    ) -> tuple[Tensor | None, ...]:
        route = self.route(topk_idx, max_rows=max_rows, align=align)
        return *route, *self.dispatch(x, weights, scales, route.layout, num_rows=max_rows)

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
        place_weights = None if weights is None else gather_or_zero(weights, parts.copy_rows)
        partial = sum_in_order(self._memory, rows, parts.copy_rows, place_weights)
        inbox = self._return_copies(partial, parts)
        y = self._sum_at_home(inbox, parts)
        if values is None:
            return y, None

        home = self._return_copies(gather_or_zero(values, parts.copy_rows), parts)
        by_place = home.new_zeros((num_tokens, self._topk))
        by_place.index_add_(0, parts.send_tokens.long(), home)  # one rank owns each place
        return y, gather_slots(by_place, parts.positions)

    def _sum_at_home(self, inbox: Tensor, parts: Layout) -> Tensor:
        """Over the ranks of a node in rank order, then over the nodes; rounded after each."""
        nodes = self._topology.num_nodes
        if nodes == 1:
            return sum_in_order(self._memory, inbox, parts.home_copies)
        ends = torch.tensor(parts.send_counts, device=self._device).cumsum(0)
        peer = torch.bucketize(parts.home_copies.clamp(min=0), ends, right=True)
        node = torch.where(parts.home_copies >= 0, peer // self._topology.ranks_per_node, -1)
        sums = [
            sum_in_order(self._memory, inbox, torch.where(node == n, parts.home_copies, -1))
            for n in range(nodes)
        ]
        tokens = parts.num_tokens
        sum_of_node = torch.arange(nodes * tokens, device=self._device).view(nodes, tokens).t()
        touched = torch.stack([(node == n).any(dim=1) for n in range(nodes)], dim=1)
        index = torch.where(touched, sum_of_node, -1)
        return sum_in_order(self._memory, torch.cat(sums), index)

    def _return_copies(self, received: Tensor, parts: Layout) -> Tensor:
        """Send each copy's result back; what comes home is ordered as ``send_tokens``."""
        home = self._memory.empty((sum(parts.send_counts), received.shape[1]), received)
        sends = list(received.split(parts.recv_counts))
        recvs = list(home.split(parts.send_counts))
        recvs[self._topology.rank].copy_(sends[self._topology.rank])
        self._exchange([[t] for t in sends], [[t] for t in recvs], phase="combine", call=self._call)
        return home

    # ---- shared by the verbs

    def _parts(self, layout: Tensor) -> Any:
        return Layout(layout, self._topology.num_ranks, self._max_tokens, self._topk)

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


def _stable_order(keys: Tensor) -> Tensor:
    """As ``keys.argsort(stable=True)`` of int32 keys.

    On the CPU torch sorts by radix from 32768 keys on, three times faster, which T * K is often
    just short of.
    """
    missing = 32768 - keys.numel()
    if keys.device.type != "cpu" or not 0 < missing < 16384:
        return keys.argsort(stable=True)
    last = torch.iinfo(keys.dtype).max
    return torch.nn.functional.pad(keys, (0, missing), value=last).argsort(stable=True)[:-missing]
