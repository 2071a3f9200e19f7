"""The torch ops ``hybrid_ep::{route, dispatch, combine}`` and the two functions built from them.

    dispatch(buffer, x, topk_idx, topk_weights)
      route     topk_idx -> layout                             small, no payload; saved by SAC
      dispatch  x, weights, scales, layout -> rows, weights, scales
    combine(buffer, rows, handle, weights)
      combine   rows, weights, layout -> y

Dispatch and combine are each other's transpose: the backward of one is a call of the other with the
same layout. Splitting route off is what makes recomputation exact: a checkpoint that saves the
outputs of ``route`` (``SAC_SAVE_OPS``) replays the forward's layout, whatever the router says then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from hybrid_ep import rules
from hybrid_ep.buffer import Buffer, find_buffer
from hybrid_ep.handle import Dispatched, Handle


def dispatch(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    handle: Handle | None = None,
    max_rows: int | None = None,
    align: int = 1,
) -> Dispatched:
    """Send every token to the ranks of its experts; differentiable in x and topk_weights.

    Collective: all ranks of the buffer's group call it, each with its own T.

    Args:
        buffer: the group's Buffer.
        x: ``[T, hidden]``, any dtype of 1, 2 or 4 bytes whose rows are a multiple of 16 bytes.
        topk_idx: int16, int32 or int64 ``[T, topk]``, experts in ``[0, num_experts)``; -1 is no
            expert; the same expert twice in a row counts once and its weights add. None with a
            ``handle``.
        topk_weights: float32 ``[T, topk]``, or None.
        scales: ``[T, S]`` of any dtype, moved along with x; not differentiable.
        handle: replay this layout instead of routing anew (recompute; the peers replay it too).
        max_rows: bound on M. With it nothing waits for the host, rows beyond the bound are dropped
            (the last experts lose theirs first) and ``handle.overflow`` says so. None: M is exact.
        align: each expert's group of rows is padded with zero rows to a multiple of this.

    Returns:
        Dispatched: the rows of this rank's experts and the handle that leads home.

    Raises:
        ValueError: an argument breaks a rule; nothing was sent.
        PeerError: a peer died, was too late, or made another call.
    """
    if (handle is None) == (topk_idx is None):
        raise ValueError(
            "dispatch takes either topk_idx or a handle to replay, got "
            + ("neither" if handle is None else "both")
        )
    if handle is None:
        rules.check_route(buffer, topk_idx, max_rows, align)
        num_tokens, num_rows = topk_idx.shape[0], max_rows
        rules.check_dispatch(buffer, x, topk_weights, scales, num_tokens)  # before route sends
        layout, counts, offsets, required_rows = _route(topk_idx, max_rows, align, buffer.id)
    else:
        if max_rows is not None or align != 1:
            raise ValueError("a replayed layout has its max_rows and align, pass neither")
        rules.check_handle(buffer, handle)
        num_tokens, num_rows, max_rows = handle.num_tokens, handle.num_rows, handle.max_rows
        layout, counts, offsets = handle.layout, handle.counts, handle.offsets
        required_rows = handle.required_rows
    rows, weights, row_scales = _dispatch(
        x, topk_weights, scales, layout, num_tokens, num_rows, buffer.id
    )
    made = Handle(layout, counts, offsets, required_rows, num_tokens, rows.shape[0], max_rows)
    return Dispatched(
        rows,
        None if topk_weights is None else weights,
        None if scales is None else row_scales,
        counts,
        offsets,
        made,
    )


def combine(
    buffer: Buffer, rows: Tensor, handle: Handle, *, weights: Tensor | None = None
) -> Tensor:
    """Bring the experts' rows home and sum them; differentiable in rows and weights.

    Sums are made in float32 in a fixed order: over a rank's experts in expert order, rounded to the
    dtype of rows, then over the ranks in rank order, rounded again (with several nodes: once more).
    A token without experts gets zeros.

    Args:
        buffer: the group's Buffer.
        rows: bfloat16, float16 or float32 ``[M, hidden]``, in the order of the dispatch's rows.
        handle: of that dispatch.
        weights: float32 ``[M]``, to make it a weighted sum; usually ``Dispatched.weights``.

    Returns:
        Tensor: ``[T, hidden]``, dtype of rows.

    Raises:
        ValueError: an argument breaks a rule; nothing was sent.
        PeerError: a peer died, was too late, or made another call.
    """
    rules.check_handle(buffer, handle)
    if rows.shape[0] != handle.num_rows:
        raise ValueError(
            f"rows must be those of the handle's dispatch, {handle.num_rows}, got {rows.shape[0]}"
        )
    y, _ = _combine(rows, weights, None, handle.layout, handle.num_tokens, buffer.id)
    return y


# ---- the ops; an optional tensor that is absent comes back empty


@torch.library.custom_op("hybrid_ep::route", mutates_args=())
def _route(
    topk_idx: Tensor, max_rows: int | None, align: int, buffer_id: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    buffer = find_buffer(buffer_id)
    rules.check_route(buffer, topk_idx, max_rows, align)
    rules.check_experts(buffer, topk_idx)
    return tuple(buffer.verbs.route(topk_idx, max_rows=max_rows, align=align))


@_route.register_fake
def _(topk_idx: Tensor, max_rows: int | None, align: int, buffer_id: int) -> tuple[Tensor, ...]:
    buffer = find_buffer(buffer_id)
    experts = buffer.num_local_experts
    shapes = ([buffer.layout_size], [experts], [experts + 1], [])
    return tuple(topk_idx.new_empty(shape, dtype=torch.int32) for shape in shapes)


@torch.library.custom_op("hybrid_ep::dispatch", mutates_args=())
def _dispatch(
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
    rows, row_weights, row_scales = buffer.verbs.dispatch(
        x, weights, scales, layout, num_rows=num_rows
    )
    return (
        rows,
        x.new_empty(0, dtype=torch.float32) if row_weights is None else row_weights,
        x.new_empty(0) if row_scales is None else row_scales,
    )


@_dispatch.register_fake
def _(
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


@torch.library.custom_op("hybrid_ep::combine", mutates_args=())
def _combine(
    rows: Tensor,
    weights: Tensor | None,
    values: Tensor | None,
    layout: Tensor,
    num_tokens: int,
    buffer_id: int,
) -> tuple[Tensor, Tensor]:
    buffer = find_buffer(buffer_id)
    rules.check_combine(buffer, rows, weights)
    y, home_values = buffer.verbs.combine(rows, weights, values, layout, num_tokens=num_tokens)
    return y, rows.new_empty(0, dtype=torch.float32) if home_values is None else home_values


@_combine.register_fake
def _(
    rows: Tensor,
    weights: Tensor | None,
    values: Tensor | None,
    layout: Tensor,
    num_tokens: int,
    buffer_id: int,
) -> tuple[Tensor, Tensor]:
    topk = find_buffer(buffer_id).topk
    return (
        rows.new_empty([num_tokens, rows.shape[1]]),
        rows.new_empty(0, dtype=torch.float32)
        if values is None
        else values.new_empty([num_tokens, topk]),
    )


# ---- gradients: each op's transpose is the other


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, scales, layout, ctx.num_tokens, _, ctx.buffer_id = inputs
    ctx.save_for_backward(layout)
    ctx.with_weights = weights is not None
    ctx.with_scales = scales is not None
    ctx.dtype = x.dtype


def _dispatch_backward(
    ctx: Any, grad_rows: Tensor, grad_weights: Tensor, grad_scales: Tensor
) -> tuple[Tensor | None, ...]:
    (layout,) = ctx.saved_tensors
    values = grad_weights.contiguous() if ctx.with_weights else None
    grad_x, grad_topk = _combine(
        grad_rows.contiguous(), None, values, layout, ctx.num_tokens, ctx.buffer_id
    )
    return grad_x, grad_topk if ctx.with_weights else None, None, None, None, None, None


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, weights, values, layout, _, ctx.buffer_id = inputs
    ctx.weighted = weights is not None
    ctx.with_values = values is not None
    ctx.num_rows = rows.shape[0]
    # without weights the rows are not needed again and may be freed by the caller
    ctx.save_for_backward(layout, *((rows, weights) if ctx.weighted else ()))


def _combine_backward(ctx: Any, grad_y: Tensor, grad_home: Tensor) -> tuple[Tensor | None, ...]:
    layout, *weighted = ctx.saved_tensors
    grad_home = grad_home.contiguous() if ctx.with_values else None
    grad_rows, grad_values, _ = _dispatch(
        grad_y.contiguous(), grad_home, None, layout, grad_y.shape[0], ctx.num_rows, ctx.buffer_id
    )
    grad_weights = None
    if weighted:
        rows, weights = weighted
        grad_weights = _row_dots(rows, grad_rows, weights.dtype)
        grad_rows = (grad_rows * weights.unsqueeze(1)).to(grad_rows.dtype)
    return grad_rows, grad_weights, grad_values if ctx.with_values else None, None, None, None


_dispatch.register_autograd(_dispatch_backward, setup_context=_save_dispatch)
_combine.register_autograd(_combine_backward, setup_context=_save_combine)


def _row_dots(rows: Tensor, grads: Tensor, dtype: torch.dtype) -> Tensor:
    """``[M]``: dot product of each row and its gradient, accumulated in ``dtype``.

    The gradient of padding is zero; what the experts left there, perhaps NaN, does not count.
    """
    dots = (rows.to(dtype) * grads.to(dtype)).sum(dim=1)
    return torch.where(grads.any(dim=1), dots, 0.0)


# ---- recomputation

SAC_SAVE_OPS = (torch.ops.hybrid_ep.route.default,)
"""What a selective-checkpoint policy must save so that recomputation replays the layout: a few MB a
layer, no payload. Add ``torch.ops.aten.topk.default`` if the router is inside the region, so that
the weights stay those of the saved experts."""

_REPLAYED = frozenset((*SAC_SAVE_OPS, torch.ops.aten.topk.default))


def _save_routing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _REPLAYED else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``torch.utils.checkpoint`` that recomputes everything but the routing.

    A plain checkpoint runs the router again, and a near tie that falls the other way gives other
    rows than the forward saw. Here the choice of experts and the layout are those of the forward.

    Args:
        function: what to checkpoint; it may call dispatch and combine.
        args: passed to it.
        kwargs: passed to it.

    Returns:
        Any: what ``function`` returns.
    """
    contexts = functools.partial(create_selective_checkpoint_contexts, _save_routing)
    return _torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
