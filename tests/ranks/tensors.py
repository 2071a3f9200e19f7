"""Results are tensors as torch makes them, and the calls do not depend on torch's defaults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import hybrid_ep
from hybrid_ep.backends.torch import host_memory
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
    x, topk_idx, gate, _ = case.leaves(me.rank, me.device, needs_grad)
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
    x, topk_idx, gate, scales = case.leaves(me.rank, me.device, needs_grad)
    out = hybrid_ep.dispatch(buffer, x, topk_idx, gate, scales=scales)
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
        x, topk_idx, _, _ = case.leaves(me.rank, me.device)
        out = hybrid_ep.dispatch(buffer, x, topk_idx)
        y = hybrid_ep.combine(buffer, out.rows, out.handle)
        if free:
            out.rows.untyped_storage().resize_(0)
        y.backward(torch.ones_like(y))
        pairs.append((y.detach(), x.grad))
        buffer.destroy()
    return list(zip(*pairs, strict=True))


# ---- the defaults of torch


@contextlib.contextmanager
def defaults(name: str) -> Iterator[None]:
    """What a program may have set before it calls: ``DEFAULTS``."""
    dtype = torch.get_default_dtype()
    try:
        if name == "with_meta":
            with torch.device("meta"):
                yield
            return
        if name == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(getattr(torch, name))
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)


DEFAULTS = ("with_meta", "meta", "float64", "bfloat16")


def verbs_under(me: Rank, case: Case, name: str | None, max_rows: int | None) -> dict[str, Tensor]:
    """A forward, a replay and a backward, with torch's own defaults where there is no name."""
    x, topk_idx, gate, scales = case.leaves(me.rank, me.device)
    grad = case.values(me.rank, "grad y", len(x)).to(me.device)
    with contextlib.nullcontext() if name is None else defaults(name):
        buffer = me.buffer(**case.sizes())
        sizes = {"max_rows": max_rows, "align": case.align}
        out = hybrid_ep.dispatch(buffer, x, topk_idx, gate, scales=scales, **sizes)
        y = hybrid_ep.combine(buffer, out.rows, out.handle, weights=out.weights)
        y.backward(grad)
        again = hybrid_ep.dispatch(buffer, x, topk_weights=gate, handle=out.handle)
        buffer.destroy()
    layout = out.handle.layout[6:]  # behind the numbers of the Buffer and of the call
    return {
        # the kernels' layouts have words that nobody writes
        "layout": layout[:0] if me.target.has_kernels else layout,
        "rows": out.rows,
        "weights": out.weights,
        "scales": out.scales,
        "counts": out.counts,
        "offsets": out.offsets,
        "overflow": out.handle.overflow,
        "y": y,
        "grad of x": x.grad,
        "grad of gate": gate.grad,
        "rows of the replay": again.rows,
    }


def layer_under(me: Rank, case: Case, name: str | None) -> dict[str, Tensor]:
    """The layer's results and gradients; its weights are those of the Buffer's device."""
    x = case.values(me.rank, "x", case.num_tokens(me.rank)).float().to(me.device)
    x.requires_grad_()
    with contextlib.nullcontext() if name is None else defaults(name):
        buffer = me.buffer(**case.sizes())
        layer = MoELayer(buffer, 24, seed=3, device=me.device)
        out = layer(x)
        (out.y.square().sum() + out.aux_loss).backward()
        buffer.destroy()
    grads = {f"grad of {name}": weight.grad for name, weight in layer.named_parameters()}
    return {"y": out.y, "counts": out.counts, "x.grad": x.grad, **grads}


# ---- a handle that was made where no gradient was wanted


MODES = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}


def replay_in_training(
    me: Rank, case: Case, mode: str | None, max_rows: int | None
) -> dict[str, Tensor]:
    """Dispatch under a mode, then replay its handle with gradients; None: in training as well."""
    buffer = me.buffer(**case.sizes())
    x, topk_idx, gate, _ = case.leaves(me.rank, me.device)
    with contextlib.nullcontext() if mode is None else MODES[mode]():
        first = hybrid_ep.dispatch(buffer, x, topk_idx, gate, max_rows=max_rows)
        before = hybrid_ep.combine(buffer, first.rows, first.handle, weights=first.weights)
    kept = vars(first.handle).values()
    assert not any(t.is_inference() for t in kept if isinstance(t, Tensor))
    for tensor in (first.rows, first.weights, before):
        assert tensor.is_inference() == (mode == "inference_mode")
        assert tensor.requires_grad == (mode is None)

    out = hybrid_ep.dispatch(buffer, x, topk_weights=gate, handle=first.handle)
    # autograd saves what selects rows, as a grouped product does with the offsets
    scale = torch.linspace(1.0, 2.0, 8, device=me.device).requires_grad_()
    factors = (
        scale.index_select(0, out.offsets[1:].long() % 8).sum() + (scale[0] * out.counts).sum()
    )
    y = hybrid_ep.combine(buffer, out.rows * factors.to(out.rows), out.handle, weights=out.weights)
    y.backward(case.values(me.rank, "grad y", len(y)).to(me.device))
    with torch.no_grad():  # the same memory goes on in any mode
        last = hybrid_ep.dispatch(buffer, x, topk_idx, gate, max_rows=max_rows)
    buffer.destroy()
    return {
        "before": before,
        "y": y,
        "grad of x": x.grad,
        "grad of gate": gate.grad,
        "grad of scale": scale.grad,
        "rows of another call": last.rows,
    }


def without_shared_memory(me: Rank, case: Case, name: str) -> dict[str, Tensor]:
    """``verbs_under`` where all goes by messages."""
    with mock.patch.object(host_memory, "mmap", mock.Mock(side_effect=OSError)):
        return verbs_under(me, case, name, None)
