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

import torch
from torch import Tensor

from hybrid_ep.backends import Moved, Route, endings
from hybrid_ep.backends.row_dots import scale_rows
from hybrid_ep.backends.streams import StreamOrder
from hybrid_ep.backends.torch.agreement import NUM_WORDS, combine_sizes, dispatch_sizes
from hybrid_ep.backends.torch.fresh import Fresh, padded
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
from hybrid_ep.backends.torch.sums import gather_or_zero, sum_at_home, sum_in_order
from hybrid_ep.backends.torch.tensors import as_words, empty, trues_first
from hybrid_ep.backends.torch.transport import Transport
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
        self._transport = Transport(shape, group, config.timeout_s, number, last_call)
        self._calls, self._exchange = self._transport.calls, self._transport.calls.exchange
        self._turn = Turn()
        self._streams = StreamOrder(self._device) if self._device.type == "cuda" else None

    @property
    def last_call(self) -> int:
        return self._calls.last

    def describe(self) -> str:
        return f"torch: {self._transport}"

    def check(self) -> None:
        if self._exchange.failure is not None:
            raise self._exchange.failure

    def destroy(self) -> None:
        self._transport.drop()

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

        The first arguments are those of ``route``. A dispatch that follows has ``next_sizes`` and
        sends ``tables`` of each token; none where its ranks tell each other themselves.
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
        if self._transport.may_share:
            mine = as_words(padded(experts, shape))
            everybody = self._transport.share("route", words, [mine])
        told = self._calls.tell("route", words, counts)
        by_peer = trues_first((of_ranks > 0).t().flatten())  # while the tables are under way
        heard = self._calls.hear(told)
        # the tokens first: they keep the device busy
        sent, received = ([Counts.of(row[NUM_WORDS:], topk) for row in rows] for rows in heard)
        for rank, counts in enumerate(received):
            if counts.experts_beyond:  # all ranks see it and end the call here, in step
                self._exchange.settle()
                raise TooManyExperts(rank=rank, experts=counts.experts_beyond, ends=False)
        send_counts = [counts.copies for counts in sent]
        send_tokens = by_peer[: sum(send_counts)] % max(1, len(topk_idx))
        goes_on = self._calls.agree_on_next(heard)
        picked = self._transport.pick(tables, send_tokens) if goes_on else []

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
            fresh.find_copies(everybody[0].view(experts.dtype))
        elif not goes_on:
            self._transport.send_experts(fresh)
        return fresh

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
            if self._transport.carrier.is_nccl:
                tables = [t if t is None else as_words(t) for t in (x, scales)]
                following = dispatch_sizes(x, scales, weights, num_sms), tables
            fresh = self._route(topk_idx, max_rows, align, most, slots, *following)
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
            tables = self._transport.send_with_experts(fresh, by_place)
        else:
            tables = [None if t is None else as_words(t) for t in (x, scales, by_place)]
            sizes = dispatch_sizes(x, scales, weights, num_sms)
            tables, sees_all = self._transport.send_tokens(tables, sizes, layout)

        if fresh is None:
            slots, rows = layout.all_slots()
        else:
            fresh.assign_rows(self._exchange.receive(fresh.arriving))
            slots, rows = fresh.slots, fresh.rows
        slots, padding = slots_of_rows(slots, rows, num_rows, layout.num_filled)
        copies = slots // self._shape.topk
        tables = self._transport.receive(tables)
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
            layout = self._read(layout)
            sizes = combine_sizes(rows, values, num_sms)
            words = self._calls.describe("combine", sizes, layout)
            told = self._calls.tell("combine", words)
            num_terms = layout.row_terms or count_terms(layout.copy_rows).tolist()
            sums = [sum_in_order(rows, layout.copy_rows, num_terms, weights)]
            if values is not None:
                sums.append(gather_or_zero(values, layout.copy_rows))
            picked = [self._exchange.pick(each) for each in sums]
            self._calls.hear(told)
            arriving = self._calls.send(picked, layout, "combine")
            # while the sums are on their way
            of_ranks = experts_of_ranks(layout.named.long(), self._shape)
            home_copies = list_home_copies(of_ranks, self._shape.topk)
            home_terms = count_terms(home_copies).tolist()
            inbox, *home = self._transport.receive(arriving)  # as send_tokens
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
