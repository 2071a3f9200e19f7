"""Results are tensors as torch makes them, and the calls do not depend on torch's defaults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hybrid_ep
from hybrid_ep.moe import MoELayer
from tests.cases import Case
from tests.launch import Rank

# ---- results are changed in place and freed early


def double_in_place(tensor: Tensor) -> Tensor:
    return tensor.mul_(2.0)


def add_in_place(tensor: Tensor) -> Tensor:
    tensor += torch.ones_like(tensor)
    return tensor


def drop_in_place(tensor: Tensor) -> Tensor:
    return F.dropout(tensor, 0.5, training=True, inplace=True)


def fill_a_part(tensor: Tensor) -> Tensor:
    tensor[::2] = 1.0
    return tensor


CHANGES = {change.__name__: change for change in (double_in_place, add_in_place, drop_in_place)}
CHANGES["fill_a_part"] = fill_a_part


def _step(
    me: Rank, case: Case, change: Callable[[Tensor], Tensor], needs_grad: bool
) -> tuple[Any, ...]:
    """A layer whose results go through ``change``: y and the gradients of x and the weights."""
    buffer = me.buffer(**case.sizes())
    inputs = case.inputs(me.rank)
    x = case.values(me.rank, "x", len(inputs.x)).to(me.device).requires_grad_(needs_grad)
    gate = inputs.weights.to(me.device).requires_grad_(needs_grad)
    topk_idx = inputs.topk_idx.to(me.device)
    torch.manual_seed(me.rank)
    out = hybrid_ep.dispatch(buffer, x, topk_idx, gate)
    rows, weights = change(out.rows), change(out.weights)
    y = change(hybrid_ep.combine(buffer, rows, out.handle, weights=weights))
    grads: tuple[Tensor, ...] = ()
    if needs_grad:
        grads = torch.autograd.grad(y, (x, gate), torch.ones_like(y))
    buffer.destroy()
    return y, *grads


def change_in_place(me: Rank, case: Case, name: str, needs_grad: bool) -> list[tuple[Any, Any]]:
    """Pairs that must be equal: changed in place, and changed in a copy."""
    change = CHANGES[name]
    in_place = _step(me, case, change, needs_grad)
    in_copies = _step(me, case, lambda tensor: change(tensor.clone()), needs_grad)
    return list(zip(in_place, in_copies, strict=True))


def describe_results(me: Rank, case: Case, needs_grad: bool) -> dict[str, dict[str, Any]]:
    """Of each result and gradient: what tells torch's own tensors from others."""
    buffer = me.buffer(**case.sizes())
    inputs = case.inputs(me.rank)
    x = case.values(me.rank, "x", len(inputs.x)).to(me.device).requires_grad_(needs_grad)
    gate = inputs.weights.to(me.device).requires_grad_(needs_grad)
    scales = None if inputs.scales is None else inputs.scales.to(me.device)
    out = hybrid_ep.dispatch(buffer, x, inputs.topk_idx.to(me.device), gate, scales=scales)
    y = hybrid_ep.combine(buffer, out.rows, out.handle, weights=out.weights)
    made = {"rows": out.rows, "weights": out.weights, "y": y}
    if scales is not None:
        made["scales"] = out.scales
    if needs_grad:
        for name, tensor in (("rows", out.rows), ("x", x), ("gate", gate)):
            tensor.register_hook(lambda grad, name=name: made.update({f"grad of {name}": grad}))
        y.backward(torch.ones_like(y))
    told = {}
    for name, tensor in made.items():
        storage = tensor.untyped_storage()
        told[name] = {
            "is a view": tensor._is_view(),
            "bytes beyond it": storage.nbytes() - tensor.numel() * tensor.element_size(),
            "resizable": storage.resizable(),
            "is contiguous": tensor.is_contiguous(),
        }
        storage.resize_(0)
        told[name]["bytes after it was freed"] = tensor.untyped_storage().nbytes()
    buffer.destroy()
    return told


def free_rows_before_the_backward(me: Rank, case: Case) -> list[tuple[Tensor, Tensor]]:
    """Without weights combine needs its rows no more: their memory may go at once."""
    pairs = []
    for free in (False, True):
        buffer = me.buffer(**case.sizes())
        inputs = case.inputs(me.rank)
        x = case.values(me.rank, "x", len(inputs.x)).to(me.device).requires_grad_()
        out = hybrid_ep.dispatch(buffer, x, inputs.topk_idx.to(me.device))
        y = hybrid_ep.combine(buffer, out.rows, out.handle)
        if free:
            out.rows.untyped_storage().resize_(0)
        y.backward(torch.ones_like(y))
        pairs.append((y.detach(), x.grad))
        buffer.destroy()
    return list(zip(*pairs, strict=True))
