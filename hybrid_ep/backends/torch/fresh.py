"""A route that the ranks have agreed on, on its way to a layout."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.backends import Route
from hybrid_ep.backends.empty import part
from hybrid_ep.backends.torch.layout import Groups, Layout, local_experts
from hybrid_ep.backends.torch.tensors import runs_ahead, to_device, trues_first
from hybrid_ep.shape import Shape


@dataclass
class Fresh:
    """What a rank knows of a route; the last three follow when the experts of copies have come.

    Attributes:
        shape: sizes.
        rank: this one.
        layout: all but what follows from the rows.
        groups: of the rows.
        experts: int32 ``[T, K]`` of my tokens, by place.
        goes_on: the ranks have agreed on the dispatch that follows as well.
        picked: the tables that it sends, where the ranks have.
        arriving: ``receive`` makes of it the experts of the copies, int32 ``[copies received, K]``
            with, perhaps, more columns behind; None before they are sent.
        slots: where my experts are in the copies, ``copy * K + place``, ordered by expert.
        rows: the row of each slot, -1 where it was dropped; None for ascending rows.
    """

    shape: Shape
    rank: int
    layout: Layout
    groups: Groups
    experts: Tensor
    goes_on: bool
    picked: list[Any]
    arriving: Any = None
    slots: Tensor | None = None
    rows: Tensor | None = None

    def find_copies(self, experts: Tensor) -> None:
        """The copies that this rank gets, from the experts of the tokens of all ranks."""
        has_mine = (self._local(experts) < self.shape.num_local_experts).any(dim=1)
        sources = trues_first(has_mine)[: sum(self.layout.recv_counts)]
        self.layout.sources = sources
        self.arriving = experts.index_select(0, sources)

    def assign_rows(self, copies: Tensor) -> None:
        """Rows ordered by (local expert, source rank, source token), the last two as copies are."""
        groups = self.groups
        num_slots = sum(groups.copies)
        local = self._local(copies[:, : self.shape.topk]).flatten()
        self.slots = self._slots_by_expert(local, num_slots)
        if groups.required == num_slots and not groups.drops:
            return
        rows = torch.arange(num_slots, dtype=torch.int64, device=local.device)
        if groups.required > num_slots:
            before = accumulate(groups.copies, initial=0)
            shifts = [start - row for start, row in zip(groups.starts, before, strict=False)]
            shifts, repeats = (
                to_device(numbers, torch.int64, local.device) for numbers in (shifts, groups.copies)
            )
            rows += shifts.repeat_interleave(repeats, output_size=num_slots)
        self.rows = torch.where(rows < groups.offsets[-1], rows, -1)

    def made(self) -> Route:
        """The layout, whole; of the tensors beside it all share memory."""
        layout, groups, slots, rows = self.layout, self.groups, self.slots, self.rows
        if rows is None:
            rows = torch.arange(slots.numel(), dtype=torch.int64, device=slots.device)
        size = (sum(layout.recv_counts), self.shape.topk)
        layout.copy_rows = torch.full(size, -1, dtype=torch.int64, device=slots.device)
        layout.copy_rows.view(-1).scatter_(0, slots, rows)
        # a word between, so that the padded counts, of 8 bytes each, are at a multiple of that
        numbers = [*groups.counts, *groups.offsets, 0, groups.required, int(groups.drops)]
        numbers += array("i", array("q", groups.padded_counts).tobytes())
        sizes = to_device(numbers, torch.int32, slots.device)
        experts = self.shape.num_local_experts
        counts = part(sizes, (experts,), (1,), 0)
        offsets = part(sizes, (experts + 1,), (1,), experts)
        return Route(layout.write(self.shape), counts, offsets, sizes, groups.offsets)

    def _local(self, experts: Tensor) -> Tensor:
        return local_experts(experts, self.shape, self.rank)

    def _slots_by_expert(self, local: Tensor, num_slots: int) -> Tensor:
        """Where my experts are in ``local``, ordered by expert, then by place."""
        if runs_ahead(local):
            return local.argsort(stable=True)[:num_slots]
        mine = (local < self.shape.num_local_experts).nonzero().squeeze(1)
        return mine.index_select(0, _stable_order(local.index_select(0, mine)))


def padded(experts: Tensor, shape: Shape) -> Tensor:
    """``[max_tokens, K]``: a rank's experts, none for the tokens that it does not have."""
    unused = shape.max_tokens - experts.shape[0]
    return torch.nn.functional.pad(experts, (0, 0, 0, unused), value=shape.num_experts)


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
