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

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.backends import Route
from hybrid_ep.backends.host_memory import HostOutbox, as_words, empty, map_together
from hybrid_ep.backends.messages import Exchange, tag_of
from hybrid_ep.backends.sums import gather_or_zero, sum_in_order
from hybrid_ep.backends.torch_layout import (
    Layout,
    distinct_experts,
    gather_slots,
    list_home_copies,
    ranks_of_tokens,
    sum_slots,
)
from hybrid_ep.backends.turns import Turn
from hybrid_ep.errors import PeerError
from hybrid_ep.topology import Topology

_PHASES = ("route", "dispatch", "combine")
_SIZES = {  # of a phase, in the order in which ranks tell them to each other
    "route": ("topk",),
    "dispatch": (
        "bytes of x per token",
        "bytes of scales per token",
        "bytes of weights per token",
        "the dtype of x",
        "the dtype of scales",
    ),
    "combine": ("bytes per row", "the dtype of rows", "values beside the rows"),
}
_COMMON = 4  # words before the sizes: phase, call, and who made the layout
_WIDTH = _COMMON + max(map(len, _SIZES.values())) + 1  # equal in all phases; the last is a count
_DTYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)
_WORD = 1 << 31  # numbers wrap, to fit into a word of a layout


class TorchBackend:
    """See the module; the methods are those of ``Backend``.

    Args:
        number: of the Buffer, equal on all ranks and its own among the Buffers of the group.
        last_call: number of the last call of the Buffer, where a backend served it before.
    """

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
        number: int,
        last_call: int = 0,
    ) -> None:
        self._topology = topology
        self._num_local_experts = num_experts // topology.num_ranks
        self._max_tokens = max_tokens
        self._topk = topk
        self._device = device
        self.number, self.last_call = number % _WORD, last_call
        self.layout_size = Layout.size(topology.num_ranks, max_tokens, topk)
        carrier = "nothing" if topology.num_ranks == 1 else dist.get_backend(group)
        self._exchange = Exchange(
            group,
            topology,
            timeout_s,
            staged=device.type != "cpu" and carrier != "nccl",
            tag=tag_of(number),
        )
        self._turn = Turn()
        self._carrier = carrier + (" through host memory" if self._exchange.staged else "")
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
        self._exchange.drop()

    def reclaim(self) -> None:
        pass  # the system keeps shared memory until the last rank has let go of it

    # ---- route

    def route(self, topk_idx: Tensor, *, max_rows: int | None, align: int) -> Route:
        with self._one_call():
            return self._route(topk_idx, max_rows, align)

    def _route(
        self, topk_idx: Tensor, max_rows: int | None, align: int, *, is_last: bool = True
    ) -> Route:
        """``is_last``: the call ends with this verb."""
        ranks, topk = self._topology.num_ranks, self._topk
        experts, positions = distinct_experts(topk_idx)
        # copies: the token once for each rank that has one of its experts
        present = ranks_of_tokens(experts, self._num_local_experts, ranks)  # [T, R]
        send_counts = present.sum(dim=0)
        peer_of_copy, send_tokens = present.t().nonzero(as_tuple=True)

        fields = self._fields("route", (topk,))
        outbox = self._outbox_for("route", fields, topk * experts.element_size())
        if outbox is not None:
            unused = self._max_tokens - experts.shape[0]
            everybody = torch.nn.functional.pad(experts, (0, 0, 0, unused), value=-1)
            everybody = self._publish(outbox, "route", [as_words(everybody)])[0]
            everybody = everybody.view(experts.dtype)
        sent = send_counts.tolist()
        received = self._agree("route", fields, sent)
        if outbox is None:
            numbers = torch.arange(experts.shape[0], dtype=experts.dtype, device=self._device)
            numbers += self._topology.rank * self._max_tokens
            outgoing = torch.cat([experts, numbers.unsqueeze(1)], dim=1)
            copies = self._exchange_rows(outgoing, send_tokens, sent, received, "route")
            copies, sources = copies[:, :topk], copies[:, topk]
        else:
            sources = self._is_mine(everybody).any(dim=1).nonzero().squeeze(1)
            copies = everybody.index_select(0, sources)
        if is_last:
            self._exchange.settle()

        copy_rows, counts, offsets, required = self._assign_rows(copies, max_rows, align)
        home_copies = list_home_copies(present, peer_of_copy, send_tokens, min(topk, ranks))

        layout = torch.zeros(self.layout_size, dtype=torch.int32, device=self._device)
        # no peer can take another layout in a world of one, where opcheck runs route twice and
        # wants the same bytes
        made_by = [self.number, self.last_call % _WORD] if ranks > 1 else [0, 0]
        header = [topk_idx.shape[0], copies.shape[0], required, send_tokens.shape[0], *made_by]
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
        with self._one_call():
            return self._dispatch(x, weights, scales, layout, num_rows)

    def _dispatch(
        self,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        layout: Tensor,
        num_rows: int | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        parts = self._parts(layout)
        num_rows = parts.num_rows if num_rows is None else num_rows
        by_place = None if weights is None else sum_slots(weights, parts.positions)
        payloads = [None if t is None else as_words(t) for t in (x, scales, by_place)]
        widths = tuple(0 if p is None else p.shape[1] * p.element_size() for p in payloads)
        dtypes = (_number_of(x.dtype), 0 if scales is None else _number_of(scales.dtype))
        fields = self._fields("dispatch", widths + dtypes, parts)
        outbox = self._outbox_for("dispatch", fields, sum(widths))
        if outbox is not None:
            published = self._publish(outbox, "dispatch", payloads)
        self._agree("dispatch", fields)

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
        self._exchange.settle()

        def move(source: Tensor, like: Tensor) -> Tensor:
            moved = empty((num_rows, like.shape[1]), like)
            words = moved.view(source.dtype)
            if source.shape[0] == 0:
                words.zero_()
            else:
                torch.index_select(source, 0, source_of_row, out=words)
                if padding is not None:
                    words.index_fill_(0, padding, 0)
            return moved

        rows = move(published[0], x)
        moved_scales = None if scales is None else move(published[1], scales)
        if weights is None:
            return rows, None, moved_scales
        by_place = published[2].view(weights.dtype).flatten()
        row_weights = by_place.index_select(0, source * self._topk + slot % self._topk)
        row_weights = weights.new_zeros(num_rows).scatter_(0, row, row_weights)
        return rows, row_weights, moved_scales

    def _outbox_for(self, phase: str, fields: list[int], needed: int) -> HostOutbox | None:
        """The shared outbox with room for such tokens, made anew for wider ones; or None."""
        if self._may_share and (self._outbox is None or self._outbox.token_bytes < needed):
            self._compare(phase, fields)  # so that all ranks are here
            size = HostOutbox.size(self._topology, self._max_tokens, needed)
            mapped = map_together(self._exchange, size, phase, self.last_call + 1)
            self._may_share = mapped is not None
            self._outbox = mapped and HostOutbox(mapped, self._topology, self._max_tokens, needed)
        return self._outbox

    def _publish(
        self, outbox: HostOutbox, phase: str, payloads: list[Tensor | None]
    ) -> list[Tensor | None]:
        # a peer that is already in the call has its tokens there, at places that the widths give
        self._exchange.open(phase, self.last_call + 1)
        return outbox.publish(payloads, self.last_call)

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
        with self._one_call():
            route = self._route(topk_idx, max_rows, align, is_last=False)
            return *route, *self._dispatch(x, weights, scales, route.layout, max_rows)

    def combine(
        self,
        rows: Tensor,
        weights: Tensor | None,
        values: Tensor | None,
        layout: Tensor,
        *,
        num_tokens: int,
    ) -> tuple[Tensor, Tensor | None]:
        with self._one_call():
            return self._combine(rows, weights, values, layout, num_tokens)

    def _combine(
        self,
        rows: Tensor,
        weights: Tensor | None,
        values: Tensor | None,
        layout: Tensor,
        num_tokens: int,
    ) -> tuple[Tensor, Tensor | None]:
        parts = self._parts(layout)
        row_bytes = rows.element_size() * rows.shape[1]
        sizes = (row_bytes, _number_of(rows.dtype), int(values is not None))
        self._agree("combine", self._fields("combine", sizes, parts))
        place_weights = None if weights is None else gather_or_zero(weights, parts.copy_rows)
        partial = sum_in_order(rows, parts.copy_rows, place_weights)
        inbox = self._return_copies(partial, parts)
        if values is None:
            self._exchange.settle()
            return self._sum_at_home(inbox, parts), None

        home = self._return_copies(gather_or_zero(values, parts.copy_rows), parts)
        self._exchange.settle()
        y = self._sum_at_home(inbox, parts)
        by_place = home.new_zeros((num_tokens, self._topk))
        by_place.index_add_(0, parts.send_tokens.long(), home)  # one rank owns each place
        return y, gather_slots(by_place, parts.positions)

    def _sum_at_home(self, inbox: Tensor, parts: Layout) -> Tensor:
        """Over the ranks of a node in rank order, then over the nodes; rounded after each."""
        nodes = self._topology.num_nodes
        if nodes == 1:
            return sum_in_order(inbox, parts.home_copies)
        ends = torch.tensor(parts.send_counts, dtype=torch.int64, device=self._device).cumsum(0)
        peer = torch.bucketize(parts.home_copies.clamp(min=0), ends, right=True)
        node = torch.where(parts.home_copies >= 0, peer // self._topology.ranks_per_node, -1)
        sums = [
            sum_in_order(inbox, torch.where(node == n, parts.home_copies, -1)) for n in range(nodes)
        ]
        tokens = parts.num_tokens
        number = torch.arange(nodes * tokens, dtype=torch.int64, device=self._device)
        sum_of_node = number.view(nodes, tokens).t()
        touched = torch.stack([(node == n).any(dim=1) for n in range(nodes)], dim=1)
        index = torch.where(touched, sum_of_node, -1)
        return sum_in_order(torch.cat(sums), index)

    def _return_copies(self, received: Tensor, parts: Layout) -> Tensor:
        """Send each copy's result back; what comes home is ordered as ``send_tokens``."""
        home = empty((sum(parts.send_counts), received.shape[1]), received)
        sends = list(received.split(parts.recv_counts))
        recvs = list(home.split(parts.send_counts))
        recvs[self._topology.rank].copy_(sends[self._topology.rank])
        self._exchange(
            [[t] for t in sends], [[t] for t in recvs], phase="combine", call=self.last_call
        )
        return home

    # ---- shared by the verbs

    def _parts(self, layout: Tensor) -> Any:
        return Layout(layout, self._topology.num_ranks, self._max_tokens, self._topk)

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """Around a call: no other thread's beside it, and none after it if it stops half way."""
        with self._turn:
            self._exchange.begin()
            try:
                yield
            except BaseException as error:  # an interrupt as well
                self._exchange.stop(error)
                raise

    def _fields(self, phase: str, sizes: tuple[int, ...], parts: Layout | None = None) -> list[int]:
        """What ranks tell each other at the start of a call; equal if the calls belong together."""
        buffer, call = (0, 0) if parts is None else parts.made_by
        return [_PHASES.index(phase), self.last_call + 1, buffer, call, *sizes]

    def _agree(self, phase: str, fields: list[int], counts: list[int] | None = None) -> list[int]:
        """Start a call: all ranks make the same one. Carries the counts of copies along."""
        counts = self._compare(phase, fields, counts)
        self.last_call += 1
        return counts

    def _compare(self, phase: str, mine: list[int], counts: list[int] | None = None) -> list[int]:
        """Exchange the fields, and a count for each rank; the peers' counts.

        Raises:
            PeerError: the fields of a peer are others.
        """
        me, call = self._topology.rank, self.last_call + 1
        mine = mine + [0] * (_WIDTH - 1 - len(mine))
        told = [[*mine, count] for count in counts or [0] * self._topology.num_ranks]
        sent = torch.tensor(told, dtype=torch.int64, device=self._device)
        got = sent.clone()
        self._exchange([[row] for row in sent], [[row] for row in got], phase=phase, call=call)
        heard = got.tolist()
        for peer, (*theirs, _) in enumerate(heard):
            if theirs != mine:
                self._exchange.failure = PeerError(
                    rank=me, peer=peer, phase=phase, call=call, reason=_difference(mine, theirs)
                )
                raise self._exchange.failure
        return [count for *_, count in heard]

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
        self._exchange([[t] for t in sends], [[t] for t in recvs], phase=phase, call=self.last_call)
        return received


def _number_of(dtype: torch.dtype) -> int:
    """The same on all ranks, as they run the same torch; never 0, which stands for no tensor."""
    return 1 + _DTYPES.index(dtype)


def _difference(mine: list[int], theirs: list[int]) -> str:
    """In which of the fields two calls differ, in words."""
    phase = _PHASES[mine[0]]
    if theirs[0] != mine[0]:
        return f"the peer made another call: {phase} here, {_PHASES[theirs[0]]} there"
    if theirs[1] != mine[1]:
        return f"the peer made another call: its number is {mine[1]} here, {theirs[1]} there"
    differing = [
        f"{name} is {_told(name, here)} here, {_told(name, there)} there"
        for name, here, there in zip(_SIZES[phase], mine[_COMMON:], theirs[_COMMON:], strict=False)
        if here != there
    ]
    if differing:
        return f"the peer made another call: {'; '.join(differing)}"
    here, there = (f"call {fields[3]} of Buffer {fields[2]}" for fields in (mine, theirs))
    return (
        f"the peer replays the layout of another route: that of {here} here, that of {there} there"
    )


def _told(name: str, value: int) -> str:
    if "dtype" in name:
        return str(_DTYPES[value - 1]).removeprefix("torch.") if value else "none"
    return str(value)


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
