"""The torch backend: the specification of the library, and what runs where nothing faster can.

It needs no extension and runs on any device: gloo on the CPU, NCCL on GPUs, and gloo with host
copies where several ranks share a GPU or the group has no NCCL. The other backends are compared
with it bit by bit, so the places where it adds and where it rounds are part of the contract:

    expert side   acc = sum over the token's local experts, in expert order, in fp32
                  (weight * row is rounded to fp32 before it is added), rounded to the payload dtype
    home          y = sum over the ranks of a node in rank order in fp32, rounded; with several
                  nodes, then the sum of those over the nodes, in order, rounded once more
    gradients     of the weights of a combine: the order of ``row_dots``

Sums start with their first term, not with zero, so that a sum of one row is that row.

    token t of rank s --send_tokens--> copy c of rank r --copy_rows--> rows of the local experts
    y[t] <--home_copies-- sum of copy c <--copy_rows-- rows

On a GPU the host is ahead of the device. It waits for what the ranks tell each other at the start
of a call and takes all sizes from that: ``trues_first`` and not ``nonzero``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.backends import Moved, Route, endings
from hybrid_ep.backends.row_dots import scale_rows
from hybrid_ep.backends.streams import StreamOrder
from hybrid_ep.backends.torch.agreement import NUM_WORDS, Calls, combine_sizes, dispatch_sizes
from hybrid_ep.backends.torch.carrier import NOTHING, choose_carrier
from hybrid_ep.backends.torch.collectives import Collectives
from hybrid_ep.backends.torch.fresh import Fresh, padded
from hybrid_ep.backends.torch.host_memory import HostOutbox, map_together
from hybrid_ep.backends.torch.layout import (
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
from hybrid_ep.backends.torch.messages import Messages, tag_of
from hybrid_ep.backends.torch.sums import gather_or_zero, sum_at_home, sum_in_order
from hybrid_ep.backends.torch.tensors import as_words, empty, trues_first
from hybrid_ep.backends.turns import Turn
from hybrid_ep.config import Config
from hybrid_ep.errors import TooManyExperts
from hybrid_ep.group import Group
from hybrid_ep.shape import Shape


class TorchBackend:
    """See the module; the methods are those of ``Backend``.

    Args:
        number: of the Buffer, equal on all ranks and its own among the Buffers of the group.
        last_call: number of the last call of the Buffer, where a backend served it before.

    Raises:
        SetupError: the group has no backend that carries tensors on its device.
    """

    name = "torch"
    sms_of_a_call = (1, None)

    def __init__(
        self, shape: Shape, group: Group, config: Config, *, number: int, last_call: int = 0
    ) -> None:
        self._shape, self._rank, self._device = shape, group.rank, group.device
        self.layout_size = Layout.size(shape)
        self._carrier = NOTHING
        if group.num_ranks > 1:
            self._carrier = choose_carrier(group.process_group, group.device, group.shares_gpus())
        exchange = Messages(group, config.timeout_s, tag_of(number))
        if self._carrier.is_nccl:
            exchange = Collectives(group, config.timeout_s)
            exchange.meet()
        self._calls = Calls(exchange, shape, number, last_call)
        self._turn = Turn()
        self._streams = StreamOrder(self._device) if self._device.type == "cuda" else None
        self._outbox: HostOutbox | None = None
        self._may_share = self._device.type == "cpu" and not (
            self._carrier.is_nothing or self._carrier.is_nccl
        )

    @property
    def last_call(self) -> int:
        return self._calls.last

    @property
    def _exchange(self) -> Messages | Collectives:
        return self._calls.exchange

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

    def route(
        self,
        topk_idx: Tensor,
        *,
        max_rows: int | None,
        align: int,
        most: Tensor | None = None,
        slots: int = 0,
    ) -> Route:
        with self._one_call():
            fresh = self._route(topk_idx, max_rows, align, most, slots)
            self._send_experts(fresh)
            copies = self._exchange.receive(fresh.arriving)
            self._exchange.settle()
            fresh.assign_rows(copies)
            layout, counts, offsets, sizes, on_host = fresh.made()
            sizes = sizes[-2 - 2 * len(counts) :].clone()
            return Route(layout, counts.clone(), offsets.clone(), sizes, on_host)

    def _route(
        self,
        topk_idx: Tensor,
        max_rows: int | None,
        align: int,
        most: Tensor | None,
        slots: int,
        next_sizes: tuple[int, ...] = (),
        tables: Sequence[Tensor | None] = (),
    ) -> Fresh:
        """Agree on who sends how much to whom.

        Args:
            topk_idx: as of ``route``.
            max_rows: likewise.
            align: likewise.
            most: likewise.
            slots: likewise.
            next_sizes: of a dispatch that follows; none where its ranks tell them themselves.
            tables: what that sends of each token.
        """
        shape, topk = self._shape, self._shape.topk
        named = name_experts(topk_idx, shape.num_experts)
        experts = experts_at_places(named, shape.num_experts)
        # copies: the token once for each rank that has one of its experts
        of_ranks = experts_of_ranks(experts, shape)
        counts = count_for_peers(named, experts, of_ranks, shape.num_experts, most, slots)
        experts = experts.int()

        words = self._calls.describe("route", (topk,), next_sizes=next_sizes)
        everybody = None
        outbox = self._outbox_for("route", words, topk * experts.element_size())
        if outbox is not None:
            everybody = self._publish(outbox, "route", [as_words(padded(experts, shape))])[0]
        told = self._calls.tell("route", words, counts)
        by_peer = trues_first((of_ranks > 0).t().flatten())  # while the tables are under way
        heard = self._calls.hear(told)
        # the tokens first: they keep the device busy
        sent, received = ([Counts.of(row[NUM_WORDS:], topk) for row in rows] for rows in heard)
        self._refuse_more_experts(received)
        send_counts = [counts.copies for counts in sent]
        send_tokens = by_peer[: sum(send_counts)] % max(1, len(topk_idx))
        goes_on = self._calls.agree_on_next(heard)
        picked = self._pick(tables, send_tokens) if goes_on else []

        groups = Groups.of(_sum(counts.of_experts for counts in received), max_rows, align)
        layout = Layout(
            # no peer can take another layout in a world of one, where opcheck runs route twice and
            # wants the same bytes
            made_by=self._calls.made_by if shape.num_ranks > 1 else (0, 0),
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
        fresh = Fresh(shape, self._rank, layout, groups, experts, goes_on, picked)
        if everybody is not None:  # now: a later call publishes there
            fresh.find_copies(everybody.view(experts.dtype))
        return fresh

    def _refuse_more_experts(self, received: list[Counts]) -> None:
        """All ranks know the same, so all end the call here, and the next one is in step."""
        for rank, counts in enumerate(received):
            if counts.experts_beyond:
                self._exchange.settle()
                raise TooManyExperts(rank=rank, experts=counts.experts_beyond, ends=False)

    def _pick(self, tables: Sequence[Tensor | None], tokens: Tensor) -> list[Any]:
        return [t if t is None else self._exchange.pick(t, tokens) for t in tables]

    def _send_experts(self, fresh: Fresh, by_place: Tensor | None = None) -> None:
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
            fresh.arriving = self._calls.send(picked, *counts, "route")
            return
        if not self._carrier.is_nothing:
            mine = padded(experts, self._shape)
            experts = self._exchange.gather(mine, phase="route", call=self.last_call)
        fresh.find_copies(experts)

    # ---- dispatch

    def dispatch(
        self,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        layout: Tensor,
        *,
        num_rows: int | None,
        num_sms: int = 0,
    ) -> Moved:
        with self._one_call():
            return self._dispatch(x, weights, scales, self._read(layout), num_rows, num_sms)

    def dispatch_fresh(
        self,
        topk_idx: Tensor,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        *,
        max_rows: int | None,
        align: int,
        most: Tensor | None = None,
        slots: int = 0,
        num_sms: int = 0,
    ) -> tuple[Route, Moved]:
        with self._one_call():
            # what ranks publish for each other needs an exchange of its own
            following = ()
            if self._carrier.is_nccl:
                tables = [t if t is None else as_words(t) for t in (x, scales)]
                following = dispatch_sizes(x, scales, weights, num_sms), tables
            fresh = self._route(topk_idx, max_rows, align, most, slots, *following)
            if not fresh.goes_on:
                self._send_experts(fresh)
            moved = self._dispatch(x, weights, scales, fresh.layout, max_rows, num_sms, fresh)
            return fresh.made(), moved

    def _dispatch(
        self,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        layout: Layout,
        num_rows: int | None,
        num_sms: int,
        fresh: Fresh | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Rows of a ``fresh`` route are assigned here, once the tokens are on their way."""
        num_rows = layout.num_rows if num_rows is None else num_rows
        by_place = None if weights is None else sum_slots(weights, layout)
        sees_all = False  # tables hold the tokens of all ranks; else copies, once they are here
        if fresh is not None and fresh.goes_on:
            tables = self._send_with_experts(fresh, by_place)
        else:
            tables = [None if t is None else as_words(t) for t in (x, scales, by_place)]
            sizes = dispatch_sizes(x, scales, weights, num_sms)
            tables, sees_all = self._tell_and_send(tables, sizes, layout)

        if fresh is None:
            slots, rows = layout.all_slots()
        else:
            fresh.assign_rows(self._exchange.receive(fresh.arriving))
            slots, rows = fresh.slots, fresh.rows
        slots, padding = slots_of_rows(slots, rows, num_rows, layout.num_filled)
        copies = slots // self._shape.topk
        tables = [t if t is None else self._exchange.receive(t) for t in tables]
        self._exchange.settle()
        if sees_all and layout.num_filled:
            copies = layout.sources.index_select(0, copies)
            if weights is not None:
                slots = copies * self._shape.topk + slots % self._shape.topk

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
            width = self._shape.topk * weights.element_size() // tables[2].element_size()
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
        words = self._calls.describe("dispatch", sizes, layout)
        outbox = self._outbox_for("dispatch", words, sum(sizes[:3]))
        if outbox is not None:
            tables = self._publish(outbox, "dispatch", tables)
        told = self._calls.tell("dispatch", words)
        if outbox is not None or self._carrier.is_nothing:
            self._calls.hear(told)
            return tables, True
        picked = self._pick(tables, layout.send_tokens)
        self._calls.hear(told)
        return self._send_all(picked, layout), False

    def _send_with_experts(self, fresh: Fresh, by_place: Tensor | None) -> list[Any]:
        """Send what was picked, as the ranks have agreed, and weights with the experts."""
        self._send_experts(fresh, by_place)
        self._calls.last += 1  # as the ranks have agreed
        sent = self._send_all(fresh.picked, fresh.layout)
        return [*sent, None if by_place is None else fresh.arriving]

    def _send_all(self, picked: list[Any], layout: Layout) -> list[Any]:
        counts = layout.send_counts, layout.recv_counts
        return [p if p is None else self._calls.send(p, *counts, "dispatch") for p in picked]

    def _outbox_for(self, phase: str, words: list[int], needed: int) -> HostOutbox | None:
        """The shared outbox with room for such tokens, made anew for wider ones; or None."""
        if self._may_share and (self._outbox is None or self._outbox.token_bytes < needed):
            self._calls.compare(self._calls.tell(phase, words))  # so that all ranks are here
            size = HostOutbox.size(self._shape, needed)
            mapped = map_together(self._exchange, size, phase, self.last_call + 1)
            self._may_share = mapped is not None
            self._outbox = mapped and HostOutbox(mapped, self._shape, self._rank, needed)
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
        num_sms: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        with self._one_call():
            sizes = combine_sizes(rows, values, num_sms)
            return self._combine(rows, weights, values, self._read(layout), sizes)

    def _combine(
        self,
        rows: Tensor,
        weights: Tensor | None,
        values: Tensor | None,
        layout: Layout,
        sizes: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        words = self._calls.describe("combine", sizes, layout)
        told = self._calls.tell("combine", words)
        num_terms = layout.row_terms or count_terms(layout.copy_rows).tolist()
        sums = [sum_in_order(rows, layout.copy_rows, num_terms, weights)]
        if values is not None:
            sums.append(gather_or_zero(values, layout.copy_rows))
        picked = [self._exchange.pick(each) for each in sums]
        self._calls.hear(told)
        counts = layout.recv_counts, layout.send_counts
        arriving = [self._calls.send(each, *counts, "combine") for each in picked]
        # while the sums are on their way
        of_ranks = experts_of_ranks(layout.named.long(), self._shape)
        home_copies = list_home_copies(of_ranks, self._shape.topk)
        home_terms = count_terms(home_copies).tolist()
        inbox, *home = [self._exchange.receive(each) for each in arriving]  # as send_tokens
        self._exchange.settle()
        y = sum_at_home(inbox, home_copies, home_terms, layout, self._shape)
        if values is None:
            return y, None
        by_place = values.new_zeros((layout.num_tokens, self._shape.topk))
        by_place.index_add_(0, layout.send_tokens, home[0])  # one rank owns each place
        return y, gather_slots(by_place, layout)

    def combine_backward(
        self, grad_y: Tensor, rows: Tensor, weights: Tensor, layout: Tensor, *, num_sms: int = 0
    ) -> tuple[Tensor, Tensor]:
        with self._one_call():
            read = self._read(layout)
            grads = self._dispatch(grad_y, None, None, read, rows.shape[0], num_sms)[0]
            # a row more for -1, no copy's, which counts from the end
            is_padding = torch.ones(len(rows) + 1, dtype=torch.bool, device=rows.device)
            is_padding[read.copy_rows.flatten().long()] = False
            return grads, scale_rows(grads, rows, weights, is_padding[:-1])

    # ---- shared by the verbs

    def _read(self, layout: Tensor) -> Layout:
        if self._streams is not None and self._streams.are_several:
            layout.record_stream(self._streams.last)  # made on another one, perhaps
        return Layout.read(layout, self._shape)

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


def _sum(lists: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*lists, strict=True)]
