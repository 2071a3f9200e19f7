"""The layer in plain torch: sort, all_to_all_single, and their gradients.

It is written as well as torch's own ops allow, as ``PlainTorch`` is. A token crosses once for each
rank that has any of its experts. Gathering and summing are each other's gradient, and sums are
fused gathers that add in fp32, in either direction. The host waits once, in the forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hybrid_ep.bench.baselines import PlainTorch, Route, sum_bags
from hybrid_ep.moe import GroupedExperts, Router


class PlainMoves:
    """Dispatch and combine of a layer, with gradients.

    Args:
        plain: moves the rows.
    """

    def __init__(self, plain: PlainTorch) -> None:
        self._plain = plain

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Route]:
        """What ``hybrid_ep.dispatch`` does; collective, and the host waits.

        Args:
            x: ``[T, H]``.
            topk_idx: int64 ``[T, K]``, distinct experts per token.
            topk_weights: float32 ``[T, K]``.

        Returns:
            tuple: rows ``[M, H]`` grouped by expert, their weights float32 ``[M]``, offsets int32
            ``[E_local + 1]``, and the route for ``combine``.
        """
        route, _ = self._plain.route(topk_idx)
        sent = _Gather.apply(x, route.token, route.copies, route.copy_ends)
        received = _Move.apply(sent, self._plain, route.sent, route.received)
        rows = _Gather.apply(received, route.copy, route.rows, route.row_ends)
        weights = topk_weights.index_select(0, route.token)
        weights = _Move.apply(weights, self._plain, route.sent, route.received)
        weights = weights.flatten().index_select(0, route.slot)
        offsets = torch.nn.functional.pad(route.counts.cumsum(0), (1, 0)).int()
        return rows, weights, offsets, route

    def combine(self, rows: Tensor, route: Route) -> Tensor:
        """``[M, H]`` to ``[T, H]``, the plain sum of each token's rows; collective."""
        sums = _Sum.apply(rows, route.copy, route.rows, route.row_ends)
        home = _Move.apply(sums, self._plain, route.received, route.sent)
        return _Sum.apply(home, route.token, route.copies, route.copy_ends)


class PlainLayer:
    """Router and experts of a MoELayer with plain torch between them.

    Args:
        router: the router.
        experts: those of this rank.
        plain: moves the rows.
        weight_at: of ``hybrid_ep.moe.WEIGHT_PLACES``.
    """

    def __init__(
        self, router: Router, experts: GroupedExperts, plain: PlainTorch, weight_at: str
    ) -> None:
        self._router, self._experts, self._moves = router, experts, PlainMoves(plain)
        self._weight_at = weight_at

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, H]`` to ``[T, H]``; collective."""
        topk_idx, topk_weights, _ = self._router(x)
        rows, weights, offsets, route = self._moves.dispatch(x, topk_idx, topk_weights)
        if self._weight_at == "activation":
            rows = self._experts(rows, offsets, weights)
        else:
            rows = self._experts(rows, offsets) * weights[:, None].to(rows.dtype)
        return self._moves.combine(rows, route)


class _Move(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, plain: PlainTorch, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.plain, ctx.sent, ctx.received = plain, sent, received
        return plain.move(rows, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.plain.move(grad, ctx.received, ctx.sent), None, None, None


class _Gather(Function):
    """``rows[index]``; bag n of (bags, ends) names the results that row n went to."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, bags: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(bags, ends)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return sum_bags(grad, *ctx.saved_tensors), None, None, None


class _Sum(Function):
    """Sums of bags; ``index`` has the bag of each row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, bags: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return sum_bags(rows, bags, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None, None
