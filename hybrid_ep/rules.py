"""The rules that one call's tensors obey, checked before anything is sent.

Each function raises ValueError with the rule and the value. All but ``check_experts`` look at
shapes, dtypes and devices alone, so they may run while a graph is captured or traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, float32, float64

from hybrid_ep.handle import Handle
from hybrid_ep.limits import ROW_ALIGN, round_up

if TYPE_CHECKING:
    from hybrid_ep.buffer import Buffer

TOPK_DTYPES = (torch.int16, torch.int32, torch.int64)
SUM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_route(buffer: Buffer, topk_idx: Tensor, max_rows: int | None, align: int) -> None:
    """The routing of a fresh dispatch, and how its rows are sized."""
    _check_device(buffer, "topk_idx", topk_idx)
    if topk_idx.dtype not in TOPK_DTYPES:
        raise ValueError(f"topk_idx must be int16, int32 or int64, got {topk_idx.dtype}")
    shape = topk_idx.shape
    if len(shape) != 2 or shape[1] != buffer.topk:
        raise ValueError(f"topk_idx must have shape [T, topk={buffer.topk}], got {list(shape)}")
    if shape[0] > buffer.max_tokens:
        raise ValueError(
            f"topk_idx must have at most max_tokens={buffer.max_tokens} tokens, got {shape[0]}"
        )
    if isinstance(align, bool) or not isinstance(align, int) or align < 1:
        raise ValueError(f"align must be an integer of at least 1, got {align!r}")
    if max_rows is None:
        return
    # a tuple of types: the compiler of torch 2.6 does not know what int | torch.SymInt is
    if not isinstance(max_rows, (int, torch.SymInt)) or max_rows < 0 or max_rows % align:
        raise ValueError(
            f"max_rows must be a non-negative multiple of align={align}, got {max_rows!r}"
        )


def check_experts(buffer: Buffer, topk_idx: Tensor) -> None:
    """The experts themselves, on the CPU; on a GPU the kernels look at them."""
    if topk_idx.device.type != "cpu" or topk_idx.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(topk_idx))
    if low < -1 or high >= buffer.num_experts:
        raise ValueError(
            f"topk_idx must lie in [-1, num_experts={buffer.num_experts}), got values from {low} "
            f"to {high}"
        )


def check_dispatch(
    buffer: Buffer, x: Tensor, weights: Tensor | None, scales: Tensor | None, num_tokens: int
) -> None:
    """The tokens of a dispatch, ``num_tokens`` being those that its routing speaks of."""
    _check_device(buffer, "x", x)
    shape = x.shape
    if len(shape) != 2 or shape[1] != buffer.hidden:
        raise ValueError(f"x must have shape [T, hidden={buffer.hidden}], got {list(shape)}")
    if shape[0] != num_tokens:
        raise ValueError(
            f"x must have as many tokens as its routing, got {shape[0]} and {num_tokens}"
        )
    needed = round_up(_row_bytes(buffer, x), 16)
    if scales is not None:
        _check_device(buffer, "scales", scales)
        if scales.dim() != 2 or scales.shape[0] != num_tokens:
            raise ValueError(
                f"scales must have shape [T={num_tokens}, S], got {list(scales.shape)}"
            )
        needed += round_up(scales.shape[1] * scales.element_size(), 16)
    if needed > buffer.row_capacity and not _may_be_float64(buffer, x.dtype):
        raise ValueError(
            f"a row and its scales need {needed} bytes, more than the {buffer.row_capacity} that "
            f"dtype={buffer.dtype} and scale_bytes={buffer.scale_bytes} of the Buffer reserve"
        )
    if weights is not None:
        _check_weights(buffer, "topk_weights", weights, (num_tokens, buffer.topk), x.dtype)


def check_combine(buffer: Buffer, rows: Tensor, weights: Tensor | None) -> None:
    """The rows of a combine."""
    _check_device(buffer, "rows", rows)
    if rows.dtype not in SUM_DTYPES and not _may_be_float64(buffer, rows.dtype):
        raise ValueError(f"combine sums bfloat16, float16 or float32 rows, got {rows.dtype}")
    if rows.dim() != 2 or rows.shape[1] != buffer.hidden:
        raise ValueError(
            f"rows must have shape [M, hidden={buffer.hidden}], got {list(rows.shape)}"
        )
    row_bytes = _row_bytes(buffer, rows)
    if row_bytes > buffer.inbox_row_bytes and not _may_be_float64(buffer, rows.dtype):
        raise ValueError(
            f"rows of {rows.dtype} need {row_bytes} bytes, more than the "
            f"{buffer.inbox_row_bytes} that dtype={buffer.dtype} of the Buffer reserves"
        )
    if weights is not None:
        _check_weights(buffer, "weights", weights, (rows.shape[0],), rows.dtype)


def check_handle(buffer: Buffer, handle: Handle) -> None:
    """The handle is of this Buffer, as far as its size can tell."""
    if handle.layout.shape[0] != buffer.layout_size:
        raise ValueError(
            f"the handle must be of this Buffer, whose layouts have {buffer.layout_size} words, "
            f"got one of {handle.layout.shape[0]}"
        )


def _check_device(buffer: Buffer, name: str, tensor: Tensor) -> None:
    if tensor.device != buffer.device:
        raise ValueError(f"{name} must be on the Buffer's {buffer.device}, got {tensor.device}")


def _check_weights(
    buffer: Buffer, name: str, weights: Tensor, shape: tuple[int, ...], payload: torch.dtype
) -> None:
    _check_device(buffer, name, weights)
    if tuple(weights.shape) != shape:  # the compiler does not compare a Size with a tuple
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(weights.shape)}")
    dtype = float64 if payload == float64 else float32
    if weights.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {weights.dtype}")


def _row_bytes(buffer: Buffer, rows: Tensor) -> int:
    row_bytes = buffer.hidden * rows.element_size()
    if row_bytes % ROW_ALIGN and buffer.backend != "torch":
        raise ValueError(
            f"rows must be a multiple of {ROW_ALIGN} bytes, got {row_bytes} "
            f"(hidden={buffer.hidden}, {rows.dtype})"
        )
    return row_bytes


def _may_be_float64(buffer: Buffer, dtype: torch.dtype) -> bool:
    return dtype == torch.float64 and buffer.backend == "torch"  # for torch.autograd.gradcheck
