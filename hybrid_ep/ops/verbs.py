"""Route, dispatch and combine of a Communicator: at once, and as ops of torch.

What a verb does is written once, for both. The arguments are the same, but that an op cannot return
None: an optional tensor that is absent comes back empty from it. ``num_sms`` 0 means: the Config's.
An op costs the host some ten microseconds more than a call, so ops are for those who look at them:
``watched``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hybrid_ep.communicator import find
from hybrid_ep.ops import registration, replay, rules

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


PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def watched(*tensors: Tensor | None) -> bool:
    """Whether anybody wants to see ops; the compiler takes this for the constant True.

    The profiler does, and whoever does something else than run them.
    """
    return transformed(*tensors) or _profiler_enabled()


def transformed(*tensors: Tensor | None) -> bool:
    """Whether anybody does something else with ops than run them; True while compiling.

    torch.compile, export, a dispatch mode (selective checkpoint, FakeTensor), functorch and
    torch.jit do, and whoever passes tensors of another type.
    """
    return (
        is_compiling()
        or _len_torch_dispatch_stack() > 0
        or _are_functorch_transforms_active()
        or _get_tracing_state() is not None
        or not PLAIN.issuperset(map(type, tensors))
    )


# ---- at once; the arguments are those of the ops


def dispatch_now(
    x: Tensor,
    weights: Tensor | None,
    scales: Tensor | None,
    layout: Tensor,
    num_tokens: int,
    num_rows: int | None,
    num_sms: int,
    buffer_id: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Move tokens into the rows of their experts."""
    verbs = find(buffer_id).verbs
    return verbs.dispatch(x, weights, scales, layout, num_rows=num_rows, num_sms=num_sms)


def combine_now(
    rows: Tensor,
    weights: Tensor | None,
    values: Tensor | None,
    layout: Tensor,
    num_tokens: int,
    topk: int,
    num_sms: int,
    buffer_id: int,
) -> tuple[Tensor, Tensor | None]:
    """Sum rows at the source of their tokens; ``values``, one per row, return unsummed."""
    verbs = find(buffer_id).verbs
    sizes = {"num_tokens": num_tokens, "num_sms": num_sms}
    return verbs.combine(rows, weights, values, layout, **sizes)


def combine_backward_now(
    grad_y: Tensor, rows: Tensor, weights: Tensor, layout: Tensor, num_sms: int, buffer_id: int
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and weights of a weighted combine."""
    verbs = find(buffer_id).verbs
    return verbs.combine_backward(grad_y, rows, weights, layout, num_sms=num_sms)


# ---- as ops, which any program may call, so they check the rules themselves; the inputs are those
# of the schemas below


def _run_route(*inputs: Any) -> tuple[Tensor, ...]:
    topk_idx, most, slots, max_rows, align, experts, layout_size, buffer_id = inputs
    communicator = find(buffer_id)
    rules.check_route(communicator, topk_idx, max_rows, align)
    rules.check_sizes(communicator, experts=experts, layout_size=layout_size)
    rules.check_experts(communicator, topk_idx)
    sizing = {"max_rows": max_rows, "align": align}
    if most is not None:
        rules.check_most(communicator, most)
        sizing |= {"most": most.contiguous(), "slots": slots}
    made = replay.copied("route", lambda: communicator.verbs.route(topk_idx, **sizing))
    return tuple(made[:4])  # what is on the host is left


def _fake_route(*inputs: Any) -> tuple[Tensor, ...]:
    topk_idx, *_, experts, layout_size, _ = inputs
    shapes = ([layout_size], [experts], [experts + 1], [2 + 2 * experts])
    return tuple(topk_idx.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _run_rows(required_rows: Tensor, buffer_id: int) -> Tensor:
    (num_rows,) = replay.copied("rows", lambda: (int(required_rows),))  # waits for the route
    find(buffer_id).verbs.check()  # after a fault it is no number of rows
    return required_rows.new_empty([num_rows, 0])


def _fake_rows(required_rows: Tensor, buffer_id: int) -> Tensor:
    return required_rows.new_empty([torch.library.get_ctx().new_dynamic_size(), 0])


def _run_dispatch(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, weights, scales, layout, num_tokens, _, num_sms, buffer_id = inputs
    communicator = find(buffer_id)
    rules.check_num_sms(communicator, "dispatch", num_sms or None)
    rules.check_dispatch(communicator, x, weights, scales, num_tokens)
    rules.check_sizes(communicator, layout_size=layout.shape[0])
    rows, row_weights, row_scales = dispatch_now(*inputs)
    return (
        rows,
        x.new_empty(0, dtype=torch.float32) if row_weights is None else row_weights,
        x.new_empty(0) if row_scales is None else row_scales,
    )


def _fake_dispatch(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, weights, scales, _, _, num_rows, _, _ = inputs
    if num_rows is None:
        num_rows = torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty([num_rows, x.shape[1]]),
        x.new_empty(0, dtype=torch.float32) if weights is None else weights.new_empty([num_rows]),
        x.new_empty(0) if scales is None else scales.new_empty([num_rows, scales.shape[1]]),
    )


def _run_combine(*inputs: Any) -> tuple[Tensor, Tensor]:
    rows, weights, values, layout, _, topk, num_sms, buffer_id = inputs
    communicator = find(buffer_id)
    rules.check_num_sms(communicator, "combine", num_sms or None)
    rules.check_combine(communicator, rows, weights, values)
    used_topk = None if values is None else topk
    rules.check_sizes(communicator, topk=used_topk, layout_size=layout.shape[0])
    y, home_values = combine_now(*inputs)
    return y, rows.new_empty(0, dtype=torch.float32) if home_values is None else home_values


def _fake_combine(*inputs: Any) -> tuple[Tensor, Tensor]:
    rows, _, values, _, num_tokens, topk, _, _ = inputs
    y = rows.new_empty([num_tokens, rows.shape[1]])
    if values is None:
        return y, rows.new_empty(0, dtype=torch.float32)
    return y, values.new_empty([num_tokens, topk])


def _run_combine_backward(*inputs: Any) -> tuple[Tensor, Tensor]:
    grad_y, rows, weights, layout, num_sms, buffer_id = inputs
    communicator = find(buffer_id)
    rules.check_num_sms(communicator, "dispatch", num_sms or None)
    rules.check_combine(communicator, rows, weights)
    rules.check_combine_backward(communicator, grad_y, rows)
    rules.check_sizes(communicator, layout_size=layout.shape[0])
    return combine_backward_now(*inputs)


def _fake_combine_backward(*inputs: Any) -> tuple[Tensor, Tensor]:
    _, rows, weights, _, _, _ = inputs
    # contiguous, whatever the strides of the inputs
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


route_op = registration.define(
    "route",
    "Tensor topk_idx, Tensor? most, SymInt slots, SymInt? max_rows, SymInt align, SymInt experts, "
    "SymInt layout_size, SymInt buffer_id",
    "(Tensor, Tensor, Tensor, Tensor)",
    run=_run_route,
    fake=_fake_route,
)
rows_op = registration.define_unordered(
    "rows", "Tensor required_rows, SymInt buffer_id", "Tensor", run=_run_rows, fake=_fake_rows
)
dispatch_op = registration.define(
    "dispatch",
    "Tensor x, Tensor? weights, Tensor? scales, Tensor layout, SymInt num_tokens, "
    "SymInt? num_rows, SymInt num_sms, SymInt buffer_id",
    "(Tensor, Tensor, Tensor)",
    run=_run_dispatch,
    fake=_fake_dispatch,
)
combine_op = registration.define(
    "combine",
    "Tensor rows, Tensor? weights, Tensor? values, Tensor layout, SymInt num_tokens, "
    "SymInt topk, SymInt num_sms, SymInt buffer_id",
    "(Tensor, Tensor)",
    run=_run_combine,
    fake=_fake_combine,
)

combine_backward_op = registration.define(
    "combine_backward",
    "Tensor grad_y, Tensor rows, Tensor weights, Tensor layout, SymInt num_sms, SymInt buffer_id",
    "(Tensor, Tensor)",
    run=_run_combine_backward,
    fake=_fake_combine_backward,
)

registration.register_without_gradient("route")
registration.register_without_gradient("combine_backward")
ROUTES = (torch.ops.hybrid_ep.route.default, torch.ops.hybrid_ep.route.ordered)
