"""Gradients of dispatch and combine: each is the other's transpose, with the same layout.

What a verb saves and its backward are written once, for an op and for an autograd Function, which
costs the host several microseconds less and is taken where nobody watches ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from hybrid_ep.backends import Moved, Route
from hybrid_ep.communicator import Communicator, find
from hybrid_ep.ops import registration, rules, verbs
from hybrid_ep.ops.registration import backward_order


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a gradient of any of them is wanted."""
    if is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, weights, _, layout, ctx.num_tokens, _, ctx.num_sms, ctx.buffer_id = inputs
    ctx.save_for_backward(layout)
    ctx.with_weights = weights is not None
    if output[2] is not None:  # whatever the dtype of scales
        ctx.mark_non_differentiable(output[2])


def _dispatch_backward(
    ctx: Any, grad_rows: Tensor, grad_weights: Tensor | None, grad_scales: Tensor | None
) -> tuple[Tensor | None, ...]:
    (layout,) = ctx.saved_tensors
    values = grad_weights.contiguous() if ctx.with_weights else None
    if not ctx.needs_input_grad[0]:  # only the weights' gradient is wanted, whatever x is
        dtype = rules.summable_dtype(grad_rows)
        if dtype != grad_rows.dtype:
            grad_rows = grad_rows.new_zeros(grad_rows.shape, dtype=dtype)
    grad_x, grad_topk = _bring_back(ctx, grad_rows.contiguous(), values, layout)
    return (
        grad_x if ctx.needs_input_grad[0] else None,
        grad_topk if ctx.with_weights else None,
        *(None,) * 6,
    )


def _bring_back(
    ctx: Any, rows: Tensor, values: Tensor | None, layout: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A combine of gradients, for the inputs of a dispatch."""
    num_tokens, num_sms, buffer_id = ctx.num_tokens, ctx.num_sms, ctx.buffer_id
    if verbs.watched(rows, values, layout):
        topk = 0 if values is None else _topk(ctx)
        order = backward_order(ctx, rows)
        inputs = rows, None, values, layout, num_tokens, topk, num_sms, buffer_id
        return verbs.combine_op(*inputs, order)
    communicator = find(buffer_id)
    if rows.dtype not in communicator.two_way_dtypes:
        rules.check_inbox(communicator, rows)
    if not needs_grad(rows, values):
        sizes = {"num_tokens": num_tokens, "num_sms": num_sms}
        return communicator.verbs.combine(rows, None, values, layout, **sizes)
    rules.check_combine_gradient(communicator, rows, values)
    topk = communicator.shape.topk
    return apply_combine(rows, None, values, layout, num_tokens, topk, num_sms, buffer_id)


def _topk(ctx: Any) -> int:
    """K: an op saved it, as its graph may be traced for another Buffer than that of this id."""
    return ctx.topk if hasattr(ctx, "topk") else find(ctx.buffer_id).shape.topk


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    rows, weights, values, layout, _, _, ctx.num_sms, ctx.buffer_id = inputs
    ctx.with_values = values is not None
    ctx.num_rows = rows.shape[0]
    # without weights the rows are not needed again and may be freed by the caller
    ctx.save_for_backward(layout, *(() if weights is None else (rows, weights)))


def _combine_backward(
    ctx: Any, grad_y: Tensor, grad_home: Tensor | None
) -> tuple[Tensor | None, ...]:
    layout, *weighted = ctx.saved_tensors
    grad_y = grad_y.contiguous()
    grad_weights = grad_values = None
    if weighted and not ctx.with_values and not is_grad_enabled():
        grad_rows, grad_weights = _send_back_weighted(ctx, grad_y, *weighted, layout)
    else:
        grad_home = grad_home.contiguous() if ctx.with_values else None
        grad_rows, sent = _send_back(ctx, grad_y, grad_home, layout)
        if ctx.with_values:
            grad_values = sent
        if weighted:
            grad_rows, grad_weights = _scale(*weighted, grad_rows)
    return grad_rows, grad_weights, grad_values, *(None,) * 5


def _send_back_weighted(
    ctx: Any, grad_y: Tensor, rows: Tensor, weights: Tensor, layout: Tensor
) -> tuple[Tensor, Tensor]:
    """A dispatch of gradients that multiplies each by its row's weight and its row."""
    inputs = grad_y, rows, weights, layout, ctx.num_sms, ctx.buffer_id
    if verbs.watched(grad_y, rows, weights, layout):
        return verbs.combine_backward_op(*inputs, backward_order(ctx, grad_y))
    communicator = find(ctx.buffer_id)
    if grad_y.dtype not in communicator.two_way_dtypes:
        rules.check_outbox(communicator, grad_y)
    return verbs.combine_backward_now(*inputs)


def _send_back(
    ctx: Any, grad_y: Tensor, grad_home: Tensor | None, layout: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A dispatch of gradients, for the inputs of a combine."""
    sizes = grad_y.shape[0], ctx.num_rows, ctx.num_sms
    inputs = grad_y, grad_home, None, layout, *sizes, ctx.buffer_id
    if verbs.watched(grad_y, grad_home, layout):
        return verbs.dispatch_op(*inputs, backward_order(ctx, grad_y))[:2]
    communicator = find(ctx.buffer_id)
    if grad_y.dtype not in communicator.two_way_dtypes:
        rules.check_outbox(communicator, grad_y)
    if not needs_grad(grad_y, grad_home):
        return verbs.dispatch_now(*inputs)[:2]
    rules.check_dispatch_gradient(communicator, grad_y, grad_home)
    return apply_dispatch(*inputs)[:2]


def _save_dispatch_op(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _save_dispatch(ctx, inputs, output)
    ctx.topk = inputs[1].shape[1] if ctx.with_weights else 0


def _refuse_dispatch(x: Tensor, weights: Tensor | None, *others: Any) -> None:
    if type(x) in verbs.PLAIN:  # a FakeTensor may be of a graph for another Buffer of this id
        rules.check_dispatch_gradient(find(others[-1]), x, weights)


def _refuse_combine(
    rows: Tensor, weights: Tensor | None, values: Tensor | None, *others: Any
) -> None:
    if type(rows) in verbs.PLAIN:
        rules.check_combine_gradient(find(others[-1]), rows, weights, values)


registration.register_gradient(
    "dispatch", save=_save_dispatch_op, backward=_dispatch_backward, refuse=_refuse_dispatch
)
registration.register_gradient(
    "combine", save=_save_combine, backward=_combine_backward, refuse=_refuse_combine
)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        output = verbs.dispatch_now(*inputs)
        _save_dispatch(ctx, inputs, output)
        return output

    backward = staticmethod(_dispatch_backward)


class _DispatchFresh(torch.autograd.Function):
    """The Route is put into a list: each output of a Function costs a gradient, be it of zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        topk_idx: Tensor,
        sizing: dict[str, Any],
        communicator: Communicator,
        made: list[Route],
    ) -> Moved:
        route, moved = communicator.verbs.dispatch_fresh(topk_idx, x, weights, scales, **sizing)
        made.append(route)
        sizes = x.shape[0], sizing["max_rows"], sizing["num_sms"], communicator.id
        _save_dispatch(ctx, (x, weights, scales, route.layout, *sizes), moved)
        return moved

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return *_dispatch_backward(ctx, *grads)[:2], *(None,) * 5


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        output = verbs.combine_now(*inputs)
        _save_combine(ctx, inputs, output)
        return output

    backward = staticmethod(_combine_backward)


# What Function.apply ends in; before that it looks for functorch, as ``watched`` has done, which
# costs a sixth of the call.
apply_dispatch_fresh = super(torch.autograd.Function, _DispatchFresh).apply
apply_dispatch = super(torch.autograd.Function, _Dispatch).apply
apply_combine = super(torch.autograd.Function, _Combine).apply


def _scale(rows: Tensor, weights: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weights, where ``grads [M, H]`` are those of ``weights * rows``.

    By differentiable ops, for a second derivative. The gradient of padding is zero; what the
    experts left there, perhaps NaN, does not count.
    """
    counts = grads.any(dim=1)
    dots = torch.where(counts, (grads.to(weights.dtype) * rows).sum(dim=1), 0.0)
    weights = torch.where(counts, weights, 0.0)
    return (grads * weights.unsqueeze(1)).to(grads.dtype), dots
