"""``dispatch`` and ``combine`` of a Communicator, as ``Buffer.dispatch`` and ``combine`` call them.

    dispatch(x, topk_idx, topk_weights)
      route     topk_idx -> layout                             small, no payload; may be kept
      dispatch  x, weights, scales, layout -> rows, weights, scales
    combine(rows, handle, weights)
      combine   rows, weights, layout -> y

The rules are checked here, before anything is sent. Then one of three ways is taken:

    somebody watches ops   an op, ``verbs``; ``registration`` keeps those of a graph in order
    a gradient is wanted   an autograd Function, ``gradients``
    neither                the backend, at once

Splitting route off is what makes recomputation exact: a checkpoint that keeps what ``route`` made
(``replay``, or a policy that saves ``SAC_SAVE_OPS``) replays the forward's layout, whatever the
router says then.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hybrid_ep.backends import Moved, Route
from hybrid_ep.communicator import Communicator
from hybrid_ep.handle import Dispatched, Handle
from hybrid_ep.ops import gradients, replay, rules, verbs
from hybrid_ep.ops.registration import forward_order


@replay.hidden
def dispatch(
    communicator: Communicator,
    x: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    scales: Tensor | None,
    handle: Handle | None,
    most: Tensor | None,
    max_rows: int | None,
    align: int,
    num_sms: int | None,
) -> Dispatched:
    """See ``Buffer.dispatch``."""
    if (handle is None) == (topk_idx is None):
        raise ValueError(
            "dispatch takes either topk_idx or a handle to replay, got "
            + ("neither" if handle is None else "both")
        )
    num_sms = rules.check_num_sms(communicator, "dispatch", num_sms)
    if handle is None:
        given = topk_idx
        topk_idx, topk_weights = _widened(communicator.shape.topk, topk_idx, topk_weights)
        max_rows, align = rules.check_route(communicator, topk_idx, max_rows, align)
        num_tokens = topk_idx.shape[0]
        slots = 0
        if most is not None:
            rules.check_most(communicator, most)
            most, slots = most.contiguous(), given.shape[1]
        rules.check_dispatch(communicator, x, topk_weights, scales, num_tokens)
        made, (rows, weights, row_scales) = _route_and_dispatch(
            communicator,
            topk_idx,
            x,
            topk_weights,
            _constant(scales),
            most,
            slots,
            max_rows,
            align,
            num_sms,
        )
        *tensors, host_offsets = made
        handle = Handle(*tensors, num_tokens, rows.shape[0], max_rows, host_offsets)
        handle = _for_autograd(handle)
    else:
        if max_rows is not None or align != 1 or most is not None:
            raise ValueError(
                "a replayed layout has its max_rows and align, and most is for a new one: pass "
                "none of them"
            )
        rules.check_handle(communicator, handle)
        handle = _for_autograd(handle)
        num_tokens = handle.num_tokens
        if _is_narrow(topk_weights, communicator.shape.topk):
            topk_weights = _padded(topk_weights, communicator.shape.topk, 0.0)
        rules.check_dispatch(communicator, x, topk_weights, scales, num_tokens)
        inputs = x, topk_weights, _constant(scales), handle.layout, num_tokens, handle.num_rows
        rows, weights, row_scales = _dispatch(communicator, *inputs, num_sms)
    return Dispatched(
        rows,
        None if topk_weights is None else weights,
        None if scales is None else row_scales,
        handle.counts,
        handle.offsets,
        handle,
    )


@replay.hidden
def combine(
    communicator: Communicator,
    rows: Tensor,
    weights: Tensor | None,
    values: Tensor | None,
    handle: Handle,
    num_sms: int | None,
) -> tuple[Tensor, Tensor | None]:
    """See ``Buffer.combine`` and ``combine_values``; the second result is for values alone."""
    num_sms = rules.check_num_sms(communicator, "combine", num_sms)
    rules.check_handle(communicator, handle)
    rules.check_combine(communicator, rows, weights, values)
    if rows.shape[0] != handle.num_rows:
        raise ValueError(
            f"rows must be those of the handle's dispatch, {handle.num_rows}, got {rows.shape[0]}"
        )
    handle = _for_autograd(handle)
    num_tokens, topk = handle.num_tokens, communicator.shape.topk
    inputs = rows, weights, values, handle.layout, num_tokens, topk, num_sms, communicator.id
    if verbs.watched(rows, weights, values, handle.layout):
        return verbs.combine_op(*inputs, forward_order(communicator.device))
    wanted = gradients.needs_grad(rows, weights, values)
    way = gradients.apply_combine if wanted else verbs.combine_now
    return way(*inputs)


def _widened(topk: int, topk_idx: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Routing with fewer slots than the Buffer's, with slots of no expert behind them."""
    if not _is_narrow(topk_idx, topk):
        return topk_idx, weights
    if weights is not None and weights.shape == topk_idx.shape:
        weights = _padded(weights, topk, 0.0)
    return _padded(topk_idx, topk, -1), weights


def _is_narrow(slots: Tensor | None, topk: int) -> bool:
    return isinstance(slots, Tensor) and slots.dim() == 2 and slots.shape[1] < topk


def _padded(slots: Tensor, topk: int, value: float) -> Tensor:
    return torch.nn.functional.pad(slots, (0, topk - slots.shape[1]), value=value)


def _route_and_dispatch(
    communicator: Communicator,
    topk_idx: Tensor,
    x: Tensor,
    weights: Tensor | None,
    scales: Tensor | None,
    most: Tensor | None,
    slots: int,
    max_rows: int | None,
    align: int,
    num_sms: int,
) -> tuple[Route, Moved]:
    """One call of the backend where that can be."""
    if verbs.watched(topk_idx, x, weights, scales, most):
        order = forward_order(communicator.device)
        sizes = communicator.shape.num_local_experts, communicator.layout_size, communicator.id
        made = Route(*verbs.route_op(topk_idx, most, slots, max_rows, align, *sizes, order))
        num_rows = max_rows
        if max_rows is None and order is not None:
            num_rows = verbs.rows_op(made.sizes[0], communicator.id).shape[0]
        inputs = x, weights, scales, made.layout, topk_idx.shape[0], num_rows, num_sms
        return made, _dispatch(communicator, *inputs)
    kept = replay.replayed("route")
    if kept is not None:
        made = _with_own_counts(Route(*kept))
        inputs = x, weights, scales, made.layout, topk_idx.shape[0], _rows_of(made, max_rows)
        return made, _dispatch(communicator, *inputs, num_sms)
    rules.check_experts(communicator, topk_idx)
    sizing = {"max_rows": max_rows, "align": align, "num_sms": num_sms}
    if most is not None:
        sizing |= {"most": most, "slots": slots}
    if gradients.needs_grad(x, weights):
        routes: list[Route] = []
        inputs = x, weights, scales, topk_idx, sizing, communicator, routes
        moved = gradients.apply_dispatch_fresh(*inputs)
        (made,) = routes
    else:
        made, moved = communicator.verbs.dispatch_fresh(topk_idx, x, weights, scales, **sizing)
    if replay.in_region():
        replay.keep("route", _with_own_counts(made))
    return made, moved


def _with_own_counts(made: Route) -> Route:
    """The counts are the caller's, who may sum them over the ranks in place."""
    return made._replace(counts=made.counts.clone())


def _rows_of(made: Route, max_rows: int | None) -> int:
    """M of a route that is replayed; an op, which keeps no numbers of the host, makes it wait."""
    if max_rows is not None:
        return max_rows
    return int(made.offsets[-1]) if made.host_offsets is None else made.host_offsets[-1]


def _dispatch(
    communicator: Communicator,
    x: Tensor,
    weights: Tensor | None,
    scales: Tensor | None,
    layout: Tensor,
    num_tokens: int,
    num_rows: int | None,
    num_sms: int,
) -> Moved:
    """Rows, and their weights and scales, by a layout."""
    inputs = x, weights, scales, layout, num_tokens, num_rows, num_sms, communicator.id
    if verbs.watched(x, weights, scales, layout):
        return verbs.dispatch_op(*inputs, forward_order(communicator.device))
    wanted = gradients.needs_grad(x, weights)
    way = gradients.apply_dispatch if wanted else verbs.dispatch_now
    return way(*inputs)


def _constant(scales: Tensor | None) -> Tensor | None:
    """Scales have no gradient, also where they require one."""
    return scales.detach() if scales is not None and scales.requires_grad else scales


def _for_autograd(handle: Handle) -> Handle:
    """The handle, with tensors that autograd may save: those of inference mode it may not.

    A graph compiled under inference mode hands out such tensors, and Dynamo traces no question
    about them, so a handle is looked at where it is made and where it is used.
    """
    if is_compiling() or not handle.layout.is_inference():
        return handle
    return handle.outside_inference_mode()
