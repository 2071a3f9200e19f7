"""The activation between the products, ``silu(gate) * up``, and its gradient: one pass each.

A row may have a weight, by which its activation is multiplied. The arithmetic is in float32 (in
float64 for rows of float64) and each result is rounded once. Triton kernels do it on a GPU, torch
ops elsewhere. Rows from ``ends[-1]`` on belong to no group: they may be uninitialised memory, and
what is returned for them means nothing. The kernels neither read nor write them.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor, weights: Tensor | None, ends: Tensor) -> Tensor:
    """``silu(gate) * up``, times the weight of the row.

    Args:
        gate: ``[M, F]``.
        up: ``[M, F]``, dtype of gate.
        weights: float32 ``[M]``, or None.
        ends: int32 ``[E]``, ascending; rows after the last belong to no group.

    Returns:
        Tensor: ``[M, F]``, dtype of gate.
    """
    if kernels := _kernels_for(gate):
        return kernels.swiglu(gate, up, weights, ends)
    wide_gate, wide_up = _wide(gate), _wide(up)
    product = wide_gate * wide_gate.sigmoid() * wide_up
    if weights is not None:
        product = product * weights[:, None]
    return product.to(gate.dtype)


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The gradients, and once more the activation, which is not kept from the forward.

    Args:
        grad: ``[M, F]``, of the activation; dtype of gate.
        gate: as in ``swiglu``.
        up: likewise.
        weights: likewise.
        ends: likewise.

    Returns:
        tuple: the gradients of gate and up ``[M, F]``, that of weights ``[M]`` (a dot product per
        row; zero where a row belongs to no group) or None, and the activation ``[M, F]``.
    """
    if kernels := _kernels_for(gate):
        return kernels.swiglu_backward(grad, gate, up, weights, ends)
    wide_grad, wide_gate, wide_up = _wide(grad), _wide(gate), _wide(up)
    sigmoid = wide_gate.sigmoid()
    silu = wide_gate * sigmoid
    product = silu * wide_up
    grad_weights = None
    if weights is not None:
        dots = (wide_grad * product).sum(dim=1)
        in_a_group = torch.arange(len(dots), device=dots.device) < ends[-1]
        grad_weights = torch.where(in_a_group, dots, 0).to(weights.dtype)
        product = product * weights[:, None]
        wide_grad = wide_grad * weights[:, None]
    grad_gate = wide_grad * wide_up * sigmoid * (1 + wide_gate * (1 - sigmoid))
    grad_up = wide_grad * silu
    return (
        grad_gate.to(gate.dtype),
        grad_up.to(up.dtype),
        grad_weights,
        product.to(gate.dtype),
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _kernels_for(rows: Tensor) -> ModuleType | None:
    """The module of the Triton kernels where they can run on these rows."""
    if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return _kernels()
    return None


@functools.cache
def _kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from hybrid_ep.moe import swiglu_triton

    return swiglu_triton
