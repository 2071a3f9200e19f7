"""One matrix product per group of rows, and the gradient of the groups' matrices."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix; differentiable.

    Args:
        rows: ``[M, I]``; group e is ``rows[ends[e - 1]:ends[e]]``.
        weight: ``[E, I, O]``, dtype of rows.
        ends: int32 ``[E]``, ascending; rows after the last belong to no group, and what becomes of
            them is undefined (the kernel leaves them unwritten, NaN may be among them). That is
            harmless between dispatch and combine, which look at no such row in either direction.

    Returns:
        Tensor: ``[M, O]``.
    """
    if _has_kernel(rows, weight):
        return F.grouped_mm(rows, weight, offs=ends)
    return _loop_mm(rows, weight, ends)


def grouped_mm_weight_grad(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """The gradient of ``weight`` in ``grouped_mm``; not differentiable.

    Args:
        rows: ``[M, I]``.
        grad: ``[M, O]``, of the product; dtype of rows.
        ends: as in ``grouped_mm``; rows after the last are not read.

    Returns:
        Tensor: ``[E, I, O]``; zero for a group without rows.
    """
    if _has_kernel(rows, grad):
        return F.grouped_mm(rows.t(), grad, offs=ends)
    return _loop_mm_weight_grad(rows, grad, ends)


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """One kernel for all groups, ends never leave the GPU: bf16 on Hopper and later, torch >= 2.10.

    It wants strides of 16 bytes. torch also takes fp32 and the CPU, but there it loops as we do,
    leaves the tail uninitialised, and its fake implementation refuses fp32, so that
    ``torch.compile`` fails (torch 2.13).
    """
    return (
        rows.is_cuda
        and rows.dtype == weight.dtype == torch.bfloat16
        and rows.shape[1] % 8 == weight.shape[-1] % 8 == 0
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    )


# Elsewhere a loop over the experts. It is an op, because the loop's bounds are data: torch.compile
# sees one node of static shape in place of a graph break. Reading the ends waits for a GPU.


@torch.library.custom_op("hybrid_ep::loop_mm", mutates_args=())
def _loop_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    groups = _groups(ends)
    for expert, group in enumerate(groups):
        torch.mm(rows[group], weight[expert], out=out[group])
    out[groups[-1].stop :] = 0
    return out


@_loop_mm.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.custom_op("hybrid_ep::loop_mm_weight_grad", mutates_args=())
def _loop_mm_weight_grad(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])
    for expert, group in enumerate(_groups(ends)):
        torch.mm(rows[group].t(), grad[group], out=out[expert])
    return out


@_loop_mm_weight_grad.register_fake
def _(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])


def _groups(ends: Tensor) -> list[slice]:
    bounds = [0, *ends.tolist()]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def _save_loop_mm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _loop_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_rows = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_rows = _loop_mm(grad, weight.transpose(1, 2), ends)
    if ctx.needs_input_grad[1]:
        grad_weight = _loop_mm_weight_grad(rows, grad, ends)
    return grad_rows, grad_weight, None


_loop_mm.register_autograd(_loop_mm_backward, setup_context=_save_loop_mm)
