"""``swiglu`` and its gradient as Triton kernels: what swiglu.py says, in one pass over the rows.

One program per row. It asks the device where the last group ends and returns if its row lies
beyond, so a tail of ``max_rows`` costs a launched program and no memory traffic. A program walks
its whole row, so that the gradient of the row's weight is one sum in a fixed order, without
atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_COLUMNS = 1024  # per step of a program
_COLUMNS_PER_WARP = 256  # 8 values per lane: 16 bytes of bf16


@triton.jit
def _swiglu_kernel(
    gate,
    up,
    weights,
    ends,
    act,
    num_experts,
    COLUMNS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(ends + num_experts - 1):
        return
    begin = row.to(tl.int64) * COLUMNS  # M * F may exceed int32
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < COLUMNS
        gates = tl.load(gate + begin + column, mask=inside, other=0.0).to(tl.float32)
        ups = tl.load(up + begin + column, mask=inside, other=0.0).to(tl.float32)
        product = gates * tl.sigmoid(gates) * ups
        if HAS_WEIGHTS:
            product = product * tl.load(weights + row)
        tl.store(act + begin + column, product.to(act.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    grad,
    gate,
    up,
    weights,
    ends,
    grad_gate,
    grad_up,
    grad_weights,
    act,
    num_experts,
    COLUMNS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(ends + num_experts - 1):
        if HAS_WEIGHTS:
            tl.store(grad_weights + row, 0.0)
        return
    begin = row.to(tl.int64) * COLUMNS
    dots = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < COLUMNS
        grads = tl.load(grad + begin + column, mask=inside, other=0.0).to(tl.float32)
        gates = tl.load(gate + begin + column, mask=inside, other=0.0).to(tl.float32)
        ups = tl.load(up + begin + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gates)
        silu = gates * sigmoid
        product = silu * ups
        if HAS_WEIGHTS:
            weight = tl.load(weights + row)
            dots += grads * product
            product = product * weight
            grads = grads * weight
        grad_gates = grads * ups * sigmoid * (1.0 + gates * (1.0 - sigmoid))
        tl.store(grad_gate + begin + column, grad_gates.to(grad_gate.dtype.element_ty), mask=inside)
        grad_ups = grads * silu
        tl.store(grad_up + begin + column, grad_ups.to(grad_up.dtype.element_ty), mask=inside)
        tl.store(act + begin + column, product.to(act.dtype.element_ty), mask=inside)
    if HAS_WEIGHTS:
        tl.store(grad_weights + row, tl.sum(dots, axis=0))


def swiglu(gate: Tensor, up: Tensor, weights: Tensor | None, ends: Tensor) -> Tensor:
    """See ``hybrid_ep.moe.swiglu.swiglu``."""
    gate, up = gate.contiguous(), up.contiguous()
    act = torch.empty_like(gate)
    _launch(_swiglu_kernel, (gate, up, weights, ends, act), weights, ends, gate)
    return act


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """See ``hybrid_ep.moe.swiglu.swiglu_backward``."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up, act = (torch.empty_like(gate) for _ in range(3))
    grad_weights = None if weights is None else torch.empty_like(weights)
    tensors = (grad, gate, up, weights, ends, grad_gate, grad_up, grad_weights, act)
    _launch(_swiglu_backward_kernel, tensors, weights, ends, gate)
    return grad_gate, grad_up, grad_weights, act


def _launch(
    kernel: triton.JITFunction,
    tensors: tuple[Tensor | None, ...],
    weights: Tensor | None,
    ends: Tensor,
    rows: Tensor,
) -> None:
    """A program per row, on the rows' device; nothing where there are none."""
    num_rows, num_columns = rows.shape
    if num_rows == 0 or ends.shape[0] == 0:
        return
    block = min(triton.next_power_of_2(max(num_columns, _COLUMNS_PER_WARP)), _MOST_COLUMNS)
    with torch.cuda.device_of(rows):  # none where Triton interprets on the CPU
        kernel[(num_rows,)](
            *tensors,
            ends.shape[0],
            COLUMNS=num_columns,  # one compilation per F, whose loop has a known length
            HAS_WEIGHTS=weights is not None,
            BLOCK=block,
            num_warps=block // _COLUMNS_PER_WARP,
        )
