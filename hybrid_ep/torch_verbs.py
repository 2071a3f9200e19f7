"""Route, dispatch and combine as torch sees them: three ways to run one verb of a backend.

    someone watches ops    the op ``hybrid_ep::dispatch``: torch.compile, export, a dispatch mode
                           (selective checkpoint, FakeTensor), functorch, torch.jit, the profiler;
                           ``torch_ops`` defines its two overloads
    a gradient is wanted   an autograd Function
    neither                the backend, at once

An op costs the host some ten microseconds more than a Function and that several more than a call,
so ops are made only for those who look at them. What a verb does, what it saves and its gradient
are written once, for all three. Dispatch and combine are each other's transpose: the backward of
one is a call of the other with the same layout.

The arguments of a verb are the same in each way. An op cannot return None: an optional tensor that
is absent comes back empty from it, and None from the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from hybrid_ep import rules, torch_ops
from hybrid_ep.backends import Route
from hybrid_ep.buffer import Buffer, find_buffer
from hybrid_ep.torch_ops import backward_order, forward_order

try:
    from torch._C import (
        _are_functorch_transforms_active,
        _get_tracing_state,
        _len_torch_dispatch_stack,
    )
    from torch._C._autograd import _profiler_enabled
except ImportError:  # a torch that keeps them elsewhere: there is always somebody who watches

    def _len_torch_dispatch_stack() -> int:
        return 1


_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
_PART = 1 << 25  # elements of a product in float32 that is alive at once: 128 MB


def dispatch_fresh(
    buffer: Buffer,
    topk_idx: Tensor,
    x: Tensor,
    weights: Tensor | None,
    scales: Tensor | None,
    max_rows: int | None,
    align: int,
) -> tuple[Tensor | None, ...]:
    """Who sends what into which row, the fields of ``backends.Route``, and then what dispatch does.

    One call of the backend where that can be.
    """
    if scales is not None and scales.requires_grad:
        scales = scales.detach()
    if _watched(topk_idx, x, weights, scales):
        order = forward_order(buffer.device)
        sizes = buffer.num_local_experts, buffer.layout_size
        made = _route_op(topk_idx, max_rows, align, *sizes, buffer.id, order)
        num_rows = max_rows
        if max_rows is None and order is not None:
            num_rows = _rows_op(made[3], buffer.id).shape[0]
        num_tokens = topk_idx.shape[0]
        return *made, *dispatch(buffer, x, weights, scales, made[0], num_tokens, num_rows)
    rules.check_experts(buffer, topk_idx)
    if _needs_grad(x, weights):
        made = []
        moved = _apply_dispatch_fresh(x, weights, scales, topk_idx, max_rows, align, buffer, made)
        return *made, *moved
    return buffer.verbs.dispatch_fresh(topk_idx, x, weights, scales, max_rows=max_rows, align=align)


def dispatch(
    buffer: Buffer,
    x: Tensor,
    weights: Tensor | None,
    scales: Tensor | None,
    layout: Tensor,
    num_tokens: int,
    num_rows: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Rows, and their weights and scales; differentiable in x and weights."""
    if scales is not None and scales.requires_grad:
        scales = scales.detach()
    inputs = x, weights, scales, layout, num_tokens, num_rows, buffer.id
    if _watched(x, weights, scales, layout):
        return _dispatch_op(*inputs, forward_order(buffer.device))
    way = _apply_dispatch if _needs_grad(x, weights) else _dispatch_now
    return way(*inputs)


def combine(
    buffer: Buffer,
    rows: Tensor,
    weights: Tensor | None,
    layout: Tensor,
    num_tokens: int,
) -> Tensor:
    """The sums ``y [T, H]``; differentiable in rows and weights."""
    inputs = rows, weights, None, layout, num_tokens, buffer.topk, buffer.id
    if _watched(rows, weights, layout):
        return _combine_op(*inputs, forward_order(buffer.device))[0]
    way = _apply_combine if _needs_grad(rows, weights) else _combine_now
    return way(*inputs)[0]


def _watched(*tensors: Tensor | None) -> bool:
    """Whether anybody wants to see ops; the compiler takes this for the constant True."""
    return (
        is_compiling()
        or _len_torch_dispatch_stack() > 0
        or _are_functorch_transforms_active()
        or _get_tracing_state() is not None
        or _profiler_enabled()
        or not _PLAIN.issuperset(map(type, tensors))
    )


def _needs_grad(*tensors: Tensor | None) -> bool:
    if is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


# ---- at once; the arguments are those of the ops


def _route_now(
    topk_idx: Tensor,
    max_rows: int | None,
    align: int,
    experts: int,
    layout_size: int,
    buffer_id: int,
) -> Route:
    buffer = find_buffer(buffer_id)
    rules.check_experts(buffer, topk_idx)
    return buffer.verbs.route(topk_idx, max_rows=max_rows, align=align)


def _dispatch_now(
    x: Tensor,
    weights: Tensor | None,
    scales: Tensor | None,
    layout: Tensor,
    num_tokens: int,
    num_rows: int | None,
    buffer_id: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    verbs = find_buffer(buffer_id).verbs
    return verbs.dispatch(x, weights, scales, layout, num_rows=num_rows)


def _combine_now(
    rows: Tensor,
    weights: Tensor | None,
    values: Tensor | None,
    layout: Tensor,
    num_tokens: int,
    topk: int,
    buffer_id: int,
) -> tuple[Tensor, Tensor | None]:
    verbs = find_buffer(buffer_id).verbs
    return verbs.combine(rows, weights, values, layout, num_tokens=num_tokens)


# ---- as ops, which any program may call, so they check the rules themselves


def _run_route(
    topk_idx: Tensor,
    max_rows: int | None,
    align: int,
    experts: int,
    layout_size: int,
    buffer_id: int,
) -> tuple[Tensor, ...]:
    buffer = find_buffer(buffer_id)
    rules.check_route(buffer, topk_idx, max_rows, align)
    rules.check_sizes(buffer, experts=experts, layout_size=layout_size)
    return tuple(_route_now(topk_idx, max_rows, align, experts, layout_size, buffer_id))


def _fake_route(
    topk_idx: Tensor,
    max_rows: int | None,
    align: int,
    experts: int,
    layout_size: int,
    buffer_id: int,
) -> tuple[Tensor, ...]:
    shapes = ([layout_size], [experts], [experts + 1], [])
    return tuple(topk_idx.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _run_rows(required_rows: Tensor, buffer_id: int) -> Tensor:
    num_rows = int(required_rows)  # waits for the route
    find_buffer(buffer_id).verbs.check()  # after a fault it is no number of rows
    return required_rows.new_empty([num_rows, 0])


def _fake_rows(required_rows: Tensor, buffer_id: int) -> Tensor:
    return required_rows.new_empty([torch.library.get_ctx().new_dynamic_size(), 0])


def _run_dispatch(
    x: Tensor,
    weights: Tensor | None,
    scales: Tensor | None,
    layout: Tensor,
    num_tokens: int,
    num_rows: int | None,
    buffer_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    buffer = find_buffer(buffer_id)
    rules.check_dispatch(buffer, x, weights, scales, num_tokens)
    rules.check_sizes(buffer, layout_size=layout.shape[0])
    rows, row_weights, row_scales = _dispatch_now(
        x, weights, scales, layout, num_tokens, num_rows, buffer_id
    )
    return (
        rows,
        x.new_empty(0, dtype=torch.float32) if row_weights is None else row_weights,
        x.new_empty(0) if row_scales is None else row_scales,
    )


def _fake_dispatch(
    x: Tensor,
    weights: Tensor | None,
    scales: Tensor | None,
    layout: Tensor,
    num_tokens: int,
    num_rows: int | None,
    buffer_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if num_rows is None:
        num_rows = torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty([num_rows, x.shape[1]]),
        x.new_empty(0, dtype=torch.float32) if weights is None else weights.new_empty([num_rows]),
        x.new_empty(0) if scales is None else scales.new_empty([num_rows, scales.shape[1]]),
    )


def _run_combine(
    rows: Tensor,
    weights: Tensor | None,
    values: Tensor | None,
    layout: Tensor,
    num_tokens: int,
    topk: int,
    buffer_id: int,
) -> tuple[Tensor, Tensor]:
    buffer = find_buffer(buffer_id)
    rules.check_combine(buffer, rows, weights)
    used_topk = None if values is None else topk
    rules.check_sizes(buffer, topk=used_topk, layout_size=layout.shape[0])
    y, home_values = _combine_now(rows, weights, values, layout, num_tokens, topk, buffer_id)
    return y, rows.new_empty(0, dtype=torch.float32) if home_values is None else home_values


def _fake_combine(
    rows: Tensor,
    weights: Tensor | None,
    values: Tensor | None,
    layout: Tensor,
    num_tokens: int,
    topk: int,
    buffer_id: int,
) -> tuple[Tensor, Tensor]:
    return (
        rows.new_empty([num_tokens, rows.shape[1]]),
        rows.new_empty(0, dtype=torch.float32)
        if values is None
        else values.new_empty([num_tokens, topk]),
    )


# ---- gradients: the transpose of each is the other


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, weights, _, layout, ctx.num_tokens, _, ctx.buffer_id = inputs
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
        *(None,) * 5,
    )


def _bring_back(
    ctx: Any, rows: Tensor, values: Tensor | None, layout: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A combine of gradients, for the inputs of a dispatch."""
    num_tokens, buffer_id = ctx.num_tokens, ctx.buffer_id
    if _watched(rows, values, layout):
        topk = 0 if values is None else _topk(ctx)
        order = backward_order(ctx, rows)
        return _combine_op(rows, None, values, layout, num_tokens, topk, buffer_id, order)
    buffer = find_buffer(buffer_id)
    if rows.dtype not in buffer.two_way_dtypes:
        rules.check_inbox(buffer, rows)
    if not _needs_grad(rows, values):
        return buffer.verbs.combine(rows, None, values, layout, num_tokens=num_tokens)
    rules.check_combine_gradient(buffer, rows, values)
    return _apply_combine(rows, None, values, layout, num_tokens, buffer.topk, buffer_id)


def _topk(ctx: Any) -> int:
    """K: an op saved it, as its graph may be traced for another Buffer than that of this id."""
    return ctx.topk if hasattr(ctx, "topk") else find_buffer(ctx.buffer_id).topk


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    rows, weights, values, layout, _, _, ctx.buffer_id = inputs
    ctx.with_values = values is not None
    ctx.num_rows = rows.shape[0]
    # without weights the rows are not needed again and may be freed by the caller
    ctx.save_for_backward(layout, *(() if weights is None else (rows, weights)))


def _combine_backward(
    ctx: Any, grad_y: Tensor, grad_home: Tensor | None
) -> tuple[Tensor | None, ...]:
    layout, *weighted = ctx.saved_tensors
    grad_home = grad_home.contiguous() if ctx.with_values else None
    grad_rows, grad_values = _send_back(ctx, grad_y.contiguous(), grad_home, layout)
    grad_weights = None
    if weighted:
        grad_rows, grad_weights = _weighted_backward(*weighted, grad_rows)
    return grad_rows, grad_weights, grad_values if ctx.with_values else None, *(None,) * 4


def _send_back(
    ctx: Any, grad_y: Tensor, grad_home: Tensor | None, layout: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A dispatch of gradients, for the inputs of a combine."""
    inputs = grad_y, grad_home, None, layout, grad_y.shape[0], ctx.num_rows, ctx.buffer_id
    if _watched(grad_y, grad_home, layout):
        return _dispatch_op(*inputs, backward_order(ctx, grad_y))[:2]
    buffer = find_buffer(ctx.buffer_id)
    if grad_y.dtype not in buffer.two_way_dtypes:
        rules.check_outbox(buffer, grad_y)
    if not _needs_grad(grad_y, grad_home):
        return buffer.verbs.dispatch(grad_y, grad_home, None, layout, num_rows=ctx.num_rows)[:2]
    rules.check_dispatch_gradient(buffer, grad_y, grad_home)
    return _apply_dispatch(*inputs)[:2]


def _save_dispatch_op(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _save_dispatch(ctx, inputs, output)
    ctx.topk = inputs[1].shape[1] if ctx.with_weights else 0


def _refuse_dispatch(x: Tensor, weights: Tensor | None, *others: Any) -> None:
    if type(x) in _PLAIN:  # a FakeTensor may be of a graph for another Buffer of this id
        rules.check_dispatch_gradient(find_buffer(others[-1]), x, weights)


def _refuse_combine(
    rows: Tensor, weights: Tensor | None, values: Tensor | None, *others: Any
) -> None:
    if type(rows) in _PLAIN:
        rules.check_combine_gradient(find_buffer(others[-1]), rows, weights, values)


_route_op = torch_ops.define(
    "route",
    "Tensor topk_idx, SymInt? max_rows, SymInt align, SymInt experts, SymInt layout_size, "
    "SymInt buffer_id",
    "(Tensor, Tensor, Tensor, Tensor)",
    run=_run_route,
    fake=_fake_route,
)
_rows_op = torch_ops.define_unordered(
    "rows", "Tensor required_rows, SymInt buffer_id", "Tensor", run=_run_rows, fake=_fake_rows
)
_dispatch_op = torch_ops.define(
    "dispatch",
    "Tensor x, Tensor? weights, Tensor? scales, Tensor layout, SymInt num_tokens, "
    "SymInt? num_rows, SymInt buffer_id",
    "(Tensor, Tensor, Tensor)",
    run=_run_dispatch,
    fake=_fake_dispatch,
    save=_save_dispatch_op,
    backward=_dispatch_backward,
    refuse=_refuse_dispatch,
)
_combine_op = torch_ops.define(
    "combine",
    "Tensor rows, Tensor? weights, Tensor? values, Tensor layout, SymInt num_tokens, "
    "SymInt topk, SymInt buffer_id",
    "(Tensor, Tensor)",
    run=_run_combine,
    fake=_fake_combine,
    save=_save_combine,
    backward=_combine_backward,
    refuse=_refuse_combine,
)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        output = _dispatch_now(*inputs)
        _save_dispatch(ctx, inputs, output)
        return output

    backward = staticmethod(_dispatch_backward)


class _DispatchFresh(torch.autograd.Function):
    """The route is put into a list: each output of a Function costs a gradient, be it of zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        topk_idx: Tensor,
        max_rows: int | None,
        align: int,
        buffer: Buffer,
        made: list[Tensor],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        output = buffer.verbs.dispatch_fresh(
            topk_idx, x, weights, scales, max_rows=max_rows, align=align
        )
        made.extend(output[:4])
        inputs = (x, weights, scales, made[0], x.shape[0], max_rows, buffer.id)
        _save_dispatch(ctx, inputs, output[4:])
        return output[4:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return *_dispatch_backward(ctx, *grads), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        output = _combine_now(*inputs)
        _save_combine(ctx, inputs, output)
        return output

    backward = staticmethod(_combine_backward)


# What Function.apply ends in; before that it looks for functorch, as _watched has done, which costs
# a sixth of the call.
_apply_dispatch_fresh = super(torch.autograd.Function, _DispatchFresh).apply
_apply_dispatch = super(torch.autograd.Function, _Dispatch).apply
_apply_combine = super(torch.autograd.Function, _Combine).apply


def _weighted_backward(rows: Tensor, weights: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weights where ``grads [M, H]`` are those of ``weights * rows``.

    In eager mode part by part and into ``grads``, so that no copy of all rows in float32 is made;
    a compiler makes none anyhow, and a second derivative needs ``grads`` as they are.
    """
    if _watched(rows, weights, grads) or torch.is_grad_enabled():
        grad_rows = (grads * weights.unsqueeze(1)).to(grads.dtype)
        return grad_rows, _row_dots(rows, grads, weights.dtype)
    step = max(1, _PART // max(1, rows.shape[1]))
    dots = []
    for row, weight, grad in zip(*(t.split(step) for t in (rows, weights, grads)), strict=True):
        dots.append(_row_dots(row, grad, weight.dtype))
        grad.mul_(weight.unsqueeze(1))  # in weight's dtype, rounded once
    return grads, torch.cat(dots)


def _row_dots(rows: Tensor, grads: Tensor, dtype: torch.dtype) -> Tensor:
    """``[M]``: dot product of each row and its gradient, accumulated in ``dtype``.

    The gradient of padding is zero; what the experts left there, perhaps NaN, does not count.
    """
    dots = (grads.to(dtype) * rows).sum(dim=1)
    return torch.where(grads.any(dim=1), dots, 0.0)
