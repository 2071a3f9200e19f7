"""The same without the library: the bare all_to_all_single, and expert parallelism in plain torch.

``PlainTorch`` is written as well as torch's own ops allow. A token crosses once for each rank that
has any of its experts; the host waits once in a dispatch, for the numbers of copies and rows; its
sums are fused gathers (``embedding_bag``) that add in fp32. It returns what the library returns:
rows in the same order, their weights and scales, the experts' counts.

    x[t] --gather--> copies by rank --all_to_all--> copies --gather--> rows by expert
    y[t] <--sum over ranks-- copies <--all_to_all-- sums of copies <--sum over local experts-- rows
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.backends.torch.carrier import serving_backend
from hybrid_ep.backends.torch.tensors import as_words
from hybrid_ep.bench.clock import Call
from hybrid_ep.bench.inputs import CopyCounts, Inputs
from hybrid_ep.bench.options import Load


def bare_calls(
    load: Load, copy_counts: CopyCounts, group: Any, device: torch.device
) -> Iterator[Call]:
    """The all_to_all_single of the same copies, and nothing else."""
    rank, copies = dist.get_rank(), copy_counts.copies
    for op, copy_bytes in (("dispatch", load.token_bytes), ("combine", load.sum_bytes)):
        if op == "combine" and load.is_fp8:
            continue
        sent, received = copies[:, rank], copies[:, :, rank]
        if op == "combine":
            sent, received = received, sent
        buffers = [
            tuple(
                torch.zeros(int(n.sum()), copy_bytes, dtype=torch.uint8, device=device)
                for n in (received[i], sent[i])
            )
            for i in range(len(copies))
        ]
        splits = [(received[i].tolist(), sent[i].tolist()) for i in range(len(copies))]

        def bare(i: int, buffers: Any = buffers, splits: Any = splits) -> Callable[[], Any]:
            return lambda: dist.all_to_all_single(*buffers[i], *splits[i], group=group)

        yield Call("all_to_all", op, "cached", bare, copy_counts.between_ranks(copy_bytes))


def plain_calls(
    load: Load, inputs: list[Inputs], copy_counts: CopyCounts, group: Any
) -> Iterator[Call]:
    """Dispatch and combine in plain torch."""
    plain = PlainTorch(load.num_experts, group)
    carrier = serving_backend(group, inputs[0].x.device)
    call = functools.partial(Call, carrier, mode="fresh", host_waits=True)
    yield call(
        "dispatch",
        begin=lambda i: functools.partial(plain.dispatch, inputs[i]),
        link_bytes=copy_counts.between_ranks(load.token_bytes),
    )
    if load.is_fp8:
        return

    def home(i: int) -> Callable[[], Any]:
        out = plain.dispatch(inputs[i])
        return lambda: plain.combine(out.rows, out.route)

    yield call("combine", begin=home, link_bytes=copy_counts.between_ranks(load.sum_bytes))


@dataclass(frozen=True)
class Route:
    """Where copies and rows come from, and the two lists of what is added up on the way home.

    Attributes:
        sent, received: copies for and from each rank.
        token: int64 ``[sum(sent)]``: of each copy sent, its token.
        slot: int64 ``[M]``: of each row, ``copy * K + k`` of the copies received.
        copy: int64 ``[M]``: of each row, its copy.
        rows: int64 ``[M]``: rows, copy by copy; copy c has ``rows[row_ends[c]:row_ends[c + 1]]``.
        copies: int64 ``[sum(sent)]``: copies sent, token by token; likewise.
        counts: int64 ``[E_local]``: rows of each local expert.
    """

    sent: list[int]
    received: list[int]
    token: Tensor
    slot: Tensor
    copy: Tensor
    rows: Tensor
    row_ends: Tensor
    copies: Tensor
    copy_ends: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Dispatched:
    """What a dispatch returns: ``rows [M, H]``, ``weights [M]``, ``scales [M, S]``, ``counts``."""

    rows: Tensor
    weights: Tensor
    scales: Tensor | None
    counts: Tensor
    route: Route


class PlainTorch:
    """Expert parallelism of distinct experts per token, over a group with all_to_all_single."""

    def __init__(self, num_experts: int, group: Any) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._num_local = num_experts // self._ranks
        self._first = dist.get_rank(group) * self._num_local

    def dispatch(self, inputs: Inputs) -> Dispatched:
        """Rows by (local expert, source rank, source token); collective."""
        topk = inputs.topk_idx.shape[1]
        told = [inputs.topk_weights.view(torch.int32)]
        if inputs.scales is not None:
            told.append(inputs.scales.view(torch.int32))
        route, told = self.route(inputs.topk_idx, *told)
        arrived = self.move(inputs.x.index_select(0, route.token), route.sent, route.received)
        rows = arrived.index_select(0, route.copy)
        weights = told[:, :topk].reshape(-1).index_select(0, route.slot).view(torch.float32)
        scales = None
        if inputs.scales is not None:
            scales = told[:, topk:].index_select(0, route.copy).view(torch.float32)
        return Dispatched(rows, weights, scales, route.counts, route)

    def route(self, topk_idx: Tensor, *told: Tensor) -> tuple[Route, Tensor]:
        """Where everything goes; collective. The host waits once.

        Args:
            topk_idx: ``[T, K]``.
            told: int32 ``[T, N]``, what travels with a token's experts.

        Returns:
            tuple: the route, and what was told, ``[sum(received), N]``.
        """
        tokens, topk = topk_idx.shape
        owner = topk_idx // self._num_local
        present = owner.new_zeros((tokens, self._ranks)).scatter_(1, owner, 1)
        ones = torch.ones_like(owner).flatten()
        rows_for = owner.new_zeros(self._ranks).scatter_add_(0, owner.flatten(), ones)
        counts = torch.stack([present.sum(dim=0), rows_for], dim=1)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self._group)
        # everything that does not need the counts is queued before the host waits for them
        by_rank = present.t().flatten().argsort(descending=True, stable=True)
        message = torch.cat([topk_idx.int(), *told], dim=1)

        counts, theirs = torch.stack([counts, theirs]).tolist()
        sent, received = ([copies for copies, _ in each] for each in (counts, theirs))
        num_rows = sum(rows for _, rows in theirs)
        # ones first: copies by (rank, token)
        token = by_rank[: sum(sent)] % tokens
        message = self.move(message.index_select(0, token), sent, received)

        expert = (message[:, :topk].long() - self._first).flatten()
        expert = torch.where((expert >= 0) & (expert < self._num_local), expert, self._num_local)
        slot = expert.argsort(stable=True)[:num_rows]  # copy * K + k, by (expert, copy)
        ones = torch.ones_like(expert)
        route = Route(
            sent,
            received,
            token,
            slot,
            slot // topk,
            slot.argsort(),
            _ends((expert < self._num_local).view(-1, topk).sum(dim=1)),
            token.argsort(stable=True),
            _ends(present.sum(dim=1)),
            expert.new_zeros(self._num_local + 1).scatter_add_(0, expert, ones)[:-1],
        )
        return route, message[:, topk:]

    def move(self, source: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """The all_to_all_single of rows of any dtype; collective."""
        words = as_words(source)
        arrived = words.new_empty((sum(received), words.shape[1]))
        dist.all_to_all_single(arrived, words, received, sent, group=self._group)
        return arrived.view(source.dtype)

    def combine(self, rows: Tensor, route: Route) -> Tensor:
        """``[T, H]``: each token's rows added, rounded per rank and again at home; collective."""
        sums = sum_bags(rows, route.rows, route.row_ends)
        home = self.move(sums, route.received, route.sent)
        return sum_bags(home, route.copies, route.copy_ends)


def _ends(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def sum_bags(rows: Tensor, index: Tensor, ends: Tensor) -> Tensor:
    """``[N, H]``: bag n is the sum of ``rows[index[ends[n]:ends[n + 1]]]``, made in fp32."""
    return torch.nn.functional.embedding_bag(
        index, rows, ends, mode="sum", include_last_offset=True
    )
