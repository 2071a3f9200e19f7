"""The torch backend: the specification of the library, and what runs where nothing faster can.

It needs no extension and runs on any device: gloo on the CPU, NCCL on GPUs, and gloo with host
copies where several ranks share a GPU or the group has no NCCL. The other backends are compared
with it bit by bit, so the places where it adds and where it rounds are part of the contract:

    expert side   acc = sum over the token's local experts, in expert order, in fp32
                  (weight * row is rounded to fp32 before it is added), rounded to the payload dtype
    home          y = sum over the ranks of a node in rank order in fp32, rounded; with several
                  nodes, then the sum of those over the nodes, in order, rounded once more

Sums start with their first term, not with zero, so that a sum of one row is that row.

    token t of rank s --send_tokens--> copy c of rank r --copy_rows--> rows of the local experts
    y[t] <--home_copies-- sum of copy c <--copy_rows-- rows

On a GPU the host is ahead of the device. It waits for what the ranks tell each other at the start
of a call and takes all sizes from that: ``trues_first`` and not ``nonzero``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.backends import Route, endings
from hybrid_ep.backends.agreement import (
    NUM_WORDS,
    combine_sizes,
    describe_call,
    difference,
    dispatch_sizes,
    goes_on,
    next_difference,
)
from hybrid_ep.backends.carrier import NOTHING, choose_carrier
from hybrid_ep.backends.collectives import Collectives
from hybrid_ep.backends.empty import part
from hybrid_ep.backends.host_memory import HostOutbox, map_together
from hybrid_ep.backends.messages import Messages, Told, tag_of
from hybrid_ep.backends.streams import StreamOrder
from hybrid_ep.backends.sums import gather_or_zero, sum_in_order
from hybrid_ep.backends.tensors import as_words, empty, runs_ahead, to_device, trues_first
from hybrid_ep.backends.torch_layout import (
    Counts,
    Groups,
    Layout,
    count_for_peers,
    count_terms,
    experts_at_places,
    experts_of_ranks,
    gather_slots,
    list_home_copies,
    name_experts,
    slots_of_rows,
    sum_slots,
)
from hybrid_ep.backends.turns import Turn
from hybrid_ep.topology import Topology

_WORD = 1 << 31  # numbers wrap, to fit into a word of a layout


@dataclass
class _Fresh:
    """A route that the ranks have agreed on, on its way to a layout.

    Attributes:
        layout: all but what follows from the rows.
        groups: of the rows.
        experts: ``[T, K]`` of my tokens, by place.
        goes_on: the ranks have agreed on the dispatch that follows as well.
        picked: the tables that it sends, where the ranks have.
        arriving: ``receive`` makes of it the experts of the copies, int32 ``[copies received, K]``
            with, perhaps, more columns behind; None before they are sent.
        slots: where my experts are in the copies, ``copy * K + place``, ordered by expert.
        rows: the row of each slot, -1 where it was dropped; None for ascending rows.
    """

    layout: Layout
    groups: Groups
    experts: Tensor
    goes_on: bool
    picked: list[Any]
    arriving: Any = None
    slots: Tensor | None = None
    rows: Tensor | None = None


class TorchBackend:
    """See the module; the methods are those of ``Backend``.

    Args:
        number: of the Buffer, equal on all ranks and its own among the Buffers of the group.
        shares_gpus: some ranks have the same GPU.
        last_call: number of the last call of the Buffer, where a backend served it before.

    Raises:
        SetupError: the group has no backend that carries tensors on ``device``.
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
        shares_gpus: bool = False,
        last_call: int = 0,
    ) -> None:
        self._topology = topology
        self._num_experts = num_experts
        self._num_local_experts = num_experts // topology.num_ranks
        self._max_tokens = max_tokens
        self._topk = topk
        self._device = device
        self.number, self.last_call = number % _WORD, last_call
        self._layout_sizes = topology.num_ranks, max_tokens, topk
        self.layout_size = Layout.size(*self._layout_sizes)
        self._carrier = NOTHING
        if topology.num_ranks > 1:
            self._carrier = choose_carrier(group, device, shares_gpus)
        self._exchange: Messages | Collectives
        if self._carrier.is_nccl:
            self._exchange = Collectives(group, topology, timeout_s, device)
        else:
            self._exchange = Messages(group, topology, timeout_s, tag_of(number))
        self._turn = Turn()
        self._streams = StreamOrder(device) if device.type == "cuda" else None
        self._outbox: HostOutbox | None = None
        self._may_share = device.type == "cpu" and not (
            self._carrier.is_nothing or self._carrier.is_nccl
        )

    def describe(self) -> str:
        way = "all_to_all_single" if self._carrier.is_nccl else "point-to-point messages"
        shared = ", tokens by shared memory on one host" if self._may_share else ""
        return f"torch: {way}, carried by {self._carrier}{shared}"

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
            fresh = self._route(topk_idx, max_rows, align)
            self._send_experts(fresh)
            copies = self._exchange.receive(fresh.arriving)
            self._exchange.settle()
            self._assign_rows(fresh, copies)
            layout, counts, offsets, sizes = self._made(fresh)
            return Route(layout, counts.clone(), offsets.clone(), sizes[-1].clone())

    def _route(
        self,
        topk_idx: Tensor,
        max_rows: int | None,
        align: int,
        next_sizes: tuple[int, ...] = (),
        tables: Sequence[Tensor | None] = (),
    ) -> _Fresh:
        """Agree on who sends how much to whom.

        Args:
            topk_idx: as of ``route``.
            max_rows: likewise.
            align: likewise.
            next_sizes: of a dispatch that follows; none where its ranks tell them themselves.
            tables: what that sends of each token.
        """
        ranks, topk = self._topology.num_ranks, topk_idx.shape[1]
        named = name_experts(topk_idx, self._num_experts)
        experts = experts_at_places(named, self._num_experts)
        # copies: the token once for each rank that has one of its experts
        of_ranks = experts_of_ranks(experts, self._num_experts, ranks)
        counts = count_for_peers(named, experts, of_ranks, self._num_experts)
        experts = experts.int()

        words = self._describe("route", (topk,), next_sizes=next_sizes)
        everybody = None
        outbox = self._outbox_for("route", words, topk * experts.element_size())
        if outbox is not None:
            everybody = self._publish(outbox, "route", [as_words(self._padded(experts))])[0]
        told = self._tell("route", words, counts)
        by_peer = trues_first((of_ranks > 0).t().flatten())  # while the tables are under way
        heard = self._hear(told)
        # the tokens first: they keep the device busy
        sent, received = ([Counts.of(row[NUM_WORDS:], topk) for row in rows] for rows in heard)
        send_counts = [counts.copies for counts in sent]
        send_tokens = by_peer[: sum(send_counts)] % max(1, len(topk_idx))
        goes_on = self._agree_on_next(heard)
        picked = self._pick(tables, send_tokens) if goes_on else []

        groups = Groups.of(_sum(counts.of_experts for counts in received), max_rows, align)
        layout = Layout(
            # no peer can take another layout in a world of one, where opcheck runs route twice and
            # wants the same bytes
            made_by=(self.number, self.last_call % _WORD) if ranks > 1 else (0, 0),
            num_tokens=len(topk_idx),
            num_rows=groups.required,
            num_filled=sum(groups.counts),
            num_repeats=sent[0].num_named - sum(sum(counts.of_experts) for counts in sent),
            send_counts=send_counts,
            recv_counts=[counts.copies for counts in received],
            row_terms=None if groups.drops else _sum(counts.of_terms for counts in received),
            named=named,
            send_tokens=send_tokens,
        )
        fresh = _Fresh(layout, groups, experts, goes_on, picked)
        if everybody is not None:  # now: a later call publishes there
            self._find_copies(fresh, everybody.view(experts.dtype))
        return fresh

    def _pick(self, tables: Sequence[Tensor | None], tokens: Tensor) -> list[Any]:
        return [t if t is None else self._exchange.pick(t, tokens) for t in tables]

    def _send_experts(self, fresh: _Fresh, by_place: Tensor | None = None) -> None:
        """Those of each copy to the rank that gets it, over NCCL; else all to all ranks.

        ``by_place``, weights, go along.
        """
        if fresh.arriving is not None:
            return
        layout, experts = fresh.layout, fresh.experts
        if self._carrier.is_nccl:
            if by_place is not None:
                experts = torch.cat([experts, by_place.view(torch.int32)], dim=1)
            picked = self._exchange.pick(experts, layout.send_tokens)
            counts = layout.send_counts, layout.recv_counts
            fresh.arriving = self._send(picked, *counts, "route")
            return
        if not self._carrier.is_nothing:
            padded, call = self._padded(experts), self.last_call
            experts = self._exchange.gather(padded, phase="route", call=call)
        self._find_copies(fresh, experts)

    def _find_copies(self, fresh: _Fresh, experts: Tensor) -> None:
        """The copies that this rank gets, from the experts of the tokens of all ranks."""
        has_mine = (self._local(experts) < self._num_local_experts).any(dim=1)
        sources = trues_first(has_mine)[: sum(fresh.layout.recv_counts)]
        fresh.layout.sources = sources
        fresh.arriving = experts.index_select(0, sources)

    def _assign_rows(self, fresh: _Fresh, copies: Tensor) -> None:
        """Rows ordered by (local expert, source rank, source token), the last two as copies are."""
        groups = fresh.groups
        num_slots = sum(groups.copies)
        local = self._local(copies[:, : self._topk]).flatten()
        fresh.slots = self._slots_by_expert(local, num_slots)
        if groups.required == num_slots and not groups.drops:
            return
        rows = torch.arange(num_slots, dtype=torch.int64, device=self._device)
        if groups.required > num_slots:
            before = accumulate(groups.copies, initial=0)
            shifts = [start - row for start, row in zip(groups.starts, before, strict=False)]
            shifts, repeats = (
                to_device(numbers, torch.int64, self._device) for numbers in (shifts, groups.copies)
            )
            rows += shifts.repeat_interleave(repeats, output_size=num_slots)
        fresh.rows = torch.where(rows < groups.offsets[-1], rows, -1)

    def _slots_by_expert(self, local: Tensor, num_slots: int) -> Tensor:
        """Where my experts are in ``local``, ordered by expert, then by place."""
        if runs_ahead(local):
            return local.argsort(stable=True)[:num_slots]
        mine = (local < self._num_local_experts).nonzero().squeeze(1)
        return mine.index_select(0, _stable_order(local.index_select(0, mine)))

    def _local(self, experts: Tensor) -> Tensor:
        """The number of each expert on this rank; from E / R on where it is another's, or none."""
        first = self._topology.rank * self._num_local_experts
        return (experts - first).remainder(self._num_experts + 1)

    def _padded(self, experts: Tensor) -> Tensor:
        unused = self._max_tokens - experts.shape[0]
        return torch.nn.functional.pad(experts, (0, 0, 0, unused), value=self._num_experts)

    def _made(self, fresh: _Fresh) -> Route:
        layout, groups, slots, rows = fresh.layout, fresh.groups, fresh.slots, fresh.rows
        if rows is None:
            rows = torch.arange(slots.numel(), dtype=torch.int64, device=self._device)
        shape = (sum(layout.recv_counts), self._topk)
        layout.copy_rows = torch.full(shape, -1, dtype=torch.int64, device=self._device)
        layout.copy_rows.view(-1).scatter_(0, slots, rows)
        numbers = [*groups.counts, *groups.offsets, groups.required]
        sizes = to_device(numbers, torch.int32, self._device)
        experts = self._num_local_experts
        counts, offsets = (
            part(sizes, (experts,), (1,), 0),
            part(sizes, (experts + 1,), (1,), experts),
        )
        return Route(layout.write(*self._layout_sizes), counts, offsets, sizes)

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
            return self._dispatch(x, weights, scales, self._read(layout), num_rows)

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
            # what ranks publish for each other needs an exchange of its own
            following = ()
            if self._carrier.is_nccl:
                tables = [t if t is None else as_words(t) for t in (x, scales)]
                following = dispatch_sizes(x, scales, weights), tables
            fresh = self._route(topk_idx, max_rows, align, *following)
            if not fresh.goes_on:
                self._send_experts(fresh)
            moved = self._dispatch(x, weights, scales, fresh.layout, max_rows, fresh)
            return *self._made(fresh), *moved

    def _dispatch(
        self,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        layout: Layout,
        num_rows: int | None,
        fresh: _Fresh | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Rows of a ``fresh`` route are assigned here, once the tokens are on their way."""
        num_rows = layout.num_rows if num_rows is None else num_rows
        by_place = None if weights is None else sum_slots(weights, layout)
        sees_all = False  # tables hold the tokens of all ranks; else copies, once they are here
        if fresh is not None and fresh.goes_on:
            tables = self._send_with_experts(fresh, by_place)
        else:
            tables = [None if t is None else as_words(t) for t in (x, scales, by_place)]
            sizes = dispatch_sizes(x, scales, weights)
            tables, sees_all = self._tell_and_send(tables, sizes, layout)

        if fresh is None:
            slots, rows = layout.all_slots()
        else:
            self._assign_rows(fresh, self._exchange.receive(fresh.arriving))
            slots, rows = fresh.slots, fresh.rows
        slots, padding = slots_of_rows(slots, rows, num_rows, layout.num_filled)
        copies = slots // self._topk
        tables = [t if t is None else self._exchange.receive(t) for t in tables]
        self._exchange.settle()
        if sees_all and layout.num_filled:
            copies = layout.sources.index_select(0, copies)
            if weights is not None:
                slots = copies * self._topk + slots % self._topk

        def move(table: Tensor, index: Tensor, rows: Tensor) -> None:
            if layout.num_filled == 0:
                rows.zero_()
                return
            torch.index_select(table, 0, index, out=rows)
            if padding is not None:
                rows.index_fill_(0, padding, 0)

        rows = empty((num_rows, x.shape[1]), x)
        move(tables[0], copies, rows.view(tables[0].dtype))
        row_scales = row_weights = None
        if scales is not None:
            row_scales = empty((num_rows, scales.shape[1]), scales)
            move(tables[1], copies, row_scales.view(tables[1].dtype))
        if weights is not None:
            row_weights = weights.new_empty(num_rows)
            width = self._topk * weights.element_size() // tables[2].element_size()
            by_place = tables[2][:, -width:].contiguous()  # behind the experts, perhaps
            move(by_place.view(weights.dtype).flatten(), slots, row_weights)
        return rows, row_weights, row_scales

    def _tell_and_send(
        self, tables: list[Tensor | None], sizes: tuple[int, ...], layout: Layout
    ) -> tuple[list[Any], bool]:
        """Tell all ranks that the tables come, and send or publish them.

        Returns:
            tuple: what ``receive`` makes the tables of; and whether they hold the tokens of all
            ranks.
        """
        words = self._describe("dispatch", sizes, layout)
        outbox = self._outbox_for("dispatch", words, sum(sizes[:3]))
        if outbox is not None:
            tables = self._publish(outbox, "dispatch", tables)
        told = self._tell("dispatch", words)
        if outbox is not None or self._carrier.is_nothing:
            self._hear(told)
            return tables, True
        picked = self._pick(tables, layout.send_tokens)
        self._hear(told)
        return self._send_all(picked, layout), False

    def _send_with_experts(self, fresh: _Fresh, by_place: Tensor | None) -> list[Any]:
        """Send what was picked, as the ranks have agreed, and weights with the experts."""
        self._send_experts(fresh, by_place)
        self.last_call += 1
        sent = self._send_all(fresh.picked, fresh.layout)
        return [*sent, None if by_place is None else fresh.arriving]

    def _send_all(self, picked: list[Any], layout: Layout) -> list[Any]:
        counts = layout.send_counts, layout.recv_counts
        return [p if p is None else self._send(p, *counts, "dispatch") for p in picked]

    def _outbox_for(self, phase: str, words: list[int], needed: int) -> HostOutbox | None:
        """The shared outbox with room for such tokens, made anew for wider ones; or None."""
        if self._may_share and (self._outbox is None or self._outbox.token_bytes < needed):
            self._compare(self._tell(phase, words))  # so that all ranks are here
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
        with self._one_call():
            return self._combine(rows, weights, values, self._read(layout))

    def _combine(
        self, rows: Tensor, weights: Tensor | None, values: Tensor | None, layout: Layout
    ) -> tuple[Tensor, Tensor | None]:
        words = self._describe("combine", combine_sizes(rows, values), layout)
        told = self._tell("combine", words)
        num_terms = layout.row_terms or count_terms(layout.copy_rows).tolist()
        sums = [sum_in_order(rows, layout.copy_rows, num_terms, weights)]
        if values is not None:
            sums.append(gather_or_zero(values, layout.copy_rows))
        picked = [self._exchange.pick(each) for each in sums]
        self._hear(told)
        counts = layout.recv_counts, layout.send_counts
        arriving = [self._send(each, *counts, "combine") for each in picked]
        # while the sums are on their way
        of_ranks = experts_of_ranks(
            layout.named.long(), self._num_experts, self._topology.num_ranks
        )
        home_copies = list_home_copies(of_ranks, self._topk)
        home_terms = count_terms(home_copies).tolist()
        inbox, *home = [self._exchange.receive(each) for each in arriving]  # as send_tokens
        self._exchange.settle()
        y = self._sum_at_home(inbox, home_copies, home_terms, layout)
        if values is None:
            return y, None
        by_place = values.new_zeros((layout.num_tokens, self._topk))
        by_place.index_add_(0, layout.send_tokens, home[0])  # one rank owns each place
        return y, gather_slots(by_place, layout)

    def _sum_at_home(
        self, inbox: Tensor, home_copies: Tensor, home_terms: list[int], layout: Layout
    ) -> Tensor:
        """Over the ranks of a node in rank order, then over the nodes; rounded after each."""
        nodes = self._topology.num_nodes
        if nodes == 1:
            return sum_in_order(inbox, home_copies, home_terms)
        ends = to_device(list(accumulate(layout.send_counts)), torch.int64, self._device)
        peer = torch.bucketize(home_copies.clamp(min=0), ends, right=True)
        node = torch.where(home_copies >= 0, peer // self._topology.ranks_per_node, -1)
        sums = []
        for n in range(nodes):
            of_node = torch.where(node == n, home_copies, -1)
            sums.append(sum_in_order(inbox, of_node, count_terms(of_node).tolist()))
        number = torch.arange(nodes * layout.num_tokens, dtype=torch.int64, device=self._device)
        sum_of_node = number.view(nodes, layout.num_tokens).t()
        touched = torch.stack([(node == n).any(dim=1) for n in range(nodes)], dim=1)
        index = torch.where(touched, sum_of_node, -1)
        return sum_in_order(torch.cat(sums), index, count_terms(index).tolist())

    # ---- shared by the verbs

    def _read(self, layout: Tensor) -> Layout:
        if self._streams is not None and self._streams.are_several:
            layout.record_stream(self._streams.last)  # made on another one, perhaps
        return Layout.read(layout, *self._layout_sizes)

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """Around a call: no other thread's beside it, and none after it if it stops half way."""
        with self._turn:
            if self._device.type == "cuda" and endings.is_capturing():
                raise ValueError(
                    "the torch backend must not be called while a CUDA graph is captured: its host "
                    "waits for its peers. Use the nvlink or the nvshmem backend"
                )
            endings.finish_kept()
            if self._streams is not None:
                self._streams.current()
            self._exchange.begin()
            try:
                yield
            except BaseException as error:  # an interrupt as well
                self._exchange.stop(error)
                raise

    def _describe(
        self,
        phase: str,
        sizes: tuple[int, ...],
        layout: Layout | None = None,
        next_sizes: tuple[int, ...] = (),
    ) -> list[int]:
        made_by = (0, 0) if layout is None else layout.made_by
        return describe_call(phase, self.number, self.last_call + 1, made_by, sizes, next_sizes)

    def _tell(self, phase: str, words: list[int], counts: Tensor | None = None) -> Any:
        """Start a call: tell all ranks which, and each rank its counts."""
        num_counts = 1 + self._topk + self._num_local_experts
        call = self.last_call + 1
        return self._exchange.tell(words, counts, num_counts, phase=phase, call=call)

    def _hear(self, told: Any) -> Told:
        """All ranks make the same call, so it counts; what I told each of them, and it me."""
        tables = self._compare(told)
        self.last_call += 1
        return tables

    def _compare(self, told: Any) -> Told:
        """What I told each rank, and it me.

        Raises:
            PeerError: a peer makes another call.
        """
        tables = self._exchange.hear(told)
        for peer, rows in enumerate(zip(*tables, strict=True)):
            if text := difference(*rows):
                raise self._exchange.lacks(peer, text)
        return tables

    def _agree_on_next(self, tables: Told) -> bool:
        """Whether all ranks make a dispatch next; then they need not tell each other again.

        Raises:
            PeerError: all do, and a peer's has other sizes.
        """
        if not all(map(goes_on, tables.theirs)):  # on all ranks alike
            return False
        for peer, rows in enumerate(zip(*tables, strict=True)):
            if text := next_difference(*rows):
                self._exchange.open("dispatch", self.last_call + 1)
                raise self._exchange.lacks(peer, text)
        return True

    def _send(self, picked: Any, counts: list[int], back: list[int], phase: str) -> Any:
        return self._exchange.send(picked, counts, back, phase=phase, call=self.last_call)


def _sum(lists: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*lists, strict=True)]


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
