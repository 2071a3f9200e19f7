"""The rules that one call's tensors obey, checked before anything is sent.

Each function raises ValueError with the rule and the value, or TypeError with the argument and what
was got. All but ``check_experts`` look at
shapes, dtypes and devices alone, so they may run while a graph is captured or traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, float32, float64, is_grad_enabled
from torch.compiler import is_compiling

from hybrid_ep.handle import Dispatched, Handle
from hybrid_ep.limits import (
    MAX_ROW_NUMBER,
    MAX_ROWS,
    MAX_SCALE_BYTES,
    MAX_SUMMED_BYTES,
    ROW_ALIGN,
    as_integer,
    index_of,
    round_up,
)

if TYPE_CHECKING:
    from hybrid_ep.buffer import Buffer

TOPK_DTYPES = (torch.int16, torch.int32, torch.int64)
SUM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_route(
    buffer: Buffer, topk_idx: Tensor, max_rows: int | None, align: int
) -> tuple[int | None, int]:
    """The routing of a fresh dispatch, and how its rows are sized: max_rows and align, as ints."""
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
        align = as_integer("align", align, 1)  # seldom: a call less for the host
    if align * buffer.num_local_experts > MAX_ROWS:
        raise ValueError(
            f"align times the {buffer.num_local_experts} experts of a rank must be at most "
            f"{MAX_ROWS}, got align={align}"
        )
    if max_rows is None:
        return None, align
    bound = max_rows
    if isinstance(max_rows, bool) or not isinstance(max_rows, int):
        bound = index_of(max_rows)
    if bound is None or bound < 0 or bound % align:
        raise ValueError(
            f"max_rows must be a non-negative multiple of align={align}, got {max_rows!r}"
        )
    if bound > MAX_ROW_NUMBER:
        raise ValueError(f"max_rows must be at most {MAX_ROW_NUMBER}, got {bound}")
    return bound, align


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
    may_return = x.dtype in buffer.two_way_dtypes
    scale_bytes = 0
    if scales is not None:
        _check_device(buffer, "scales", scales)
        if scales.dim() != 2 or scales.shape[0] != num_tokens:
            raise ValueError(
                f"scales must have shape [T={num_tokens}, S], got {list(scales.shape)}"
            )
        scale_bytes = round_up(scales.shape[1] * scales.element_size(), 16)
    if scales is not None or not may_return:
        check_outbox(buffer, x, scale_bytes)
    if weights is not None:
        _check_weights(buffer, "topk_weights", weights, (num_tokens, buffer.topk), x.dtype)
    if not may_return and is_grad_enabled():
        check_dispatch_gradient(buffer, x, weights)


def check_combine(buffer: Buffer, rows: Tensor, weights: Tensor | None) -> None:
    """The rows of a combine."""
    _check_device(buffer, "rows", rows)
    if rows.dim() != 2 or rows.shape[1] != buffer.hidden:
        raise ValueError(
            f"rows must have shape [M, hidden={buffer.hidden}], got {list(rows.shape)}"
        )
    if buffer.backend != "torch" and not is_compiling():  # M may be a symbol; the op looks again
        _check_summed_bytes(rows)
    may_return = rows.dtype in buffer.two_way_dtypes
    if not may_return:
        check_inbox(buffer, rows)
    if weights is not None:
        _check_weights(buffer, "weights", weights, (rows.shape[0],), rows.dtype)
    if not may_return and is_grad_enabled():
        check_combine_gradient(buffer, rows, weights)


def _check_summed_bytes(rows: Tensor) -> None:
    summed_bytes = rows.shape[0] * rows.shape[1] * rows.element_size()
    if summed_bytes > MAX_SUMMED_BYTES:
        raise ValueError(
            f"rows must have at most {MAX_SUMMED_BYTES} bytes in all, got {summed_bytes}: dispatch "
            "and combine fewer tokens at a time"
        )


def two_way_dtypes(buffer: Buffer) -> tuple[torch.dtype, ...]:
    """The dtypes of rows that dispatch and combine both carry: each is the other's backward."""
    return tuple(
        dtype
        for dtype in SUM_DTYPES
        if buffer.hidden * dtype.itemsize <= min(buffer.row_capacity, buffer.inbox_row_bytes)
        and (buffer.hidden * dtype.itemsize % ROW_ALIGN == 0 or buffer.backend == "torch")
    )


def check_outbox(buffer: Buffer, x: Tensor, scale_bytes: int = 0) -> None:
    """A row of ``x`` and its scales have room in the outbox."""
    if scale_bytes > MAX_SCALE_BYTES and buffer.backend != "torch":
        raise ValueError(
            f"scales must have at most {MAX_SCALE_BYTES} bytes per token, got {scale_bytes}"
        )
    row_bytes = round_up(_row_bytes(buffer, x), 16)
    needed = row_bytes + scale_bytes
    if needed > buffer.row_capacity and not _may_be_float64(buffer, x.dtype):
        raise ValueError(
            f"rows of {x.dtype}{' and their scales' if scale_bytes else ''} need {needed} bytes, "
            f"more than the {buffer.row_capacity} that {_reserving(buffer)}: "
            + (
                _remedy(buffer, x)
                if row_bytes > buffer.row_capacity
                else f"make the Buffer with dtype={x.dtype} and scale_bytes={scale_bytes}"
            )
        )


def check_inbox(buffer: Buffer, rows: Tensor) -> None:
    """The rows can be summed, and a sum has room on its way to the source rank."""
    if _may_be_float64(buffer, rows.dtype):
        return
    if rows.dtype not in SUM_DTYPES:
        raise ValueError(f"combine sums bfloat16, float16 or float32 rows, got {rows.dtype}")
    needed = _row_bytes(buffer, rows)
    if needed > buffer.inbox_row_bytes:
        raise ValueError(
            f"rows of {rows.dtype} need {needed} bytes, more than the {buffer.inbox_row_bytes} "
            f"that dtype={buffer.dtype} of the Buffer reserves: {_remedy(buffer, rows)}"
        )


def check_dispatch_gradient(buffer: Buffer, x: Tensor, weights: Tensor | None) -> None:
    """The backward of a dispatch, a combine, can carry the gradients that are wanted."""
    if x.requires_grad:
        dtype = x.dtype
    elif weights is not None and weights.requires_grad:
        dtype = summable_dtype(x)
    else:
        return
    if _may_be_float64(buffer, dtype):
        return
    if dtype not in SUM_DTYPES:
        raise ValueError(
            f"the gradient of x is a sum, so x must be bfloat16, float16 or float32 to require "
            f"one, got {dtype}: detach x, or dispatch under torch.no_grad()"
        )
    needed = buffer.hidden * dtype.itemsize
    if needed > buffer.inbox_row_bytes:
        raise ValueError(
            f"the backward of this dispatch combines rows of {dtype}, which need {needed} bytes, "
            f"more than the {buffer.inbox_row_bytes} that dtype={buffer.dtype} of the Buffer "
            f"reserves: make the Buffer with dtype={dtype}, or dispatch under torch.no_grad()"
        )


def check_combine_gradient(buffer: Buffer, rows: Tensor, *others: Tensor | None) -> None:
    """The backward of a combine, a dispatch, can carry the gradient, where one is wanted."""
    if not any(tensor is not None and tensor.requires_grad for tensor in (rows, *others)):
        return
    needed = round_up(buffer.hidden * rows.dtype.itemsize, 16)
    if needed > buffer.row_capacity and not _may_be_float64(buffer, rows.dtype):
        raise ValueError(
            f"the backward of this combine dispatches rows of {rows.dtype}, which need {needed} "
            f"bytes, more than the {buffer.row_capacity} that {_reserving(buffer)}: make the "
            f"Buffer with dtype={rows.dtype}, or combine under torch.no_grad()"
        )


def summable_dtype(rows: Tensor) -> torch.dtype:
    """Of the zeros that go home in the place of rows whose own gradient is not wanted.

    bfloat16 has sums and fits every Buffer; where its rows are no multiple of ``ROW_ALIGN`` bytes,
    rows of four-byte values keep their dtype.
    """
    if rows.dtype in (torch.bfloat16, torch.float16):
        return rows.dtype
    if rows.dtype.itemsize > 2 and rows.shape[1] * 2 % ROW_ALIGN:
        return rows.dtype
    return torch.bfloat16


def check_sizes(
    buffer: Buffer,
    *,
    layout_size: int,
    experts: int | None = None,
    topk: int | None = None,
) -> None:
    """The sizes that an op got as arguments are those of its Buffer."""
    given = {
        "layout_size": (layout_size, buffer.layout_size),
        "experts": (experts, buffer.num_local_experts),
        "topk": (topk, buffer.topk),
    }
    for name, (value, expected) in given.items():
        if value is not None and value != expected:
            raise ValueError(f"{name} must be that of the Buffer, {expected}, got {value}")


def check_handle(buffer: Buffer, handle: Handle) -> None:
    """The handle is of this Buffer, as far as its size can tell."""
    if not isinstance(handle, Handle):
        hint = ": pass its field .handle" if isinstance(handle, Dispatched) else ""
        raise wrong_type("handle", "a hybrid_ep.Handle", handle, hint)
    if handle.layout.shape[0] != buffer.layout_size:
        raise ValueError(
            f"the handle must be of this Buffer, whose layouts have {buffer.layout_size} words, "
            f"got one of {handle.layout.shape[0]}"
        )


def wrong_type(name: str, wanted: str, got: Any, hint: str = "") -> TypeError:
    """An exception for an argument of another type; ``hint`` says what to do."""
    kind = "None" if got is None else f"one of type {type(got).__name__}"
    return TypeError(f"{name} must be {wanted}, got {kind}{hint}")


def _reserving(buffer: Buffer) -> str:
    """Which arguments of the Buffer size a row of the outbox, with their verb."""
    if buffer.scale_bytes:
        return f"dtype={buffer.dtype} and scale_bytes={buffer.scale_bytes} of the Buffer reserve"
    return f"dtype={buffer.dtype} of the Buffer reserves"


def _remedy(buffer: Buffer, rows: Tensor) -> str:
    """What to do about rows that are too wide for the Buffer."""
    convert = f"convert them to {buffer.dtype}"
    if rows.dtype.itemsize > 4:  # no backend but torch's carries such rows
        return convert
    return f"{convert}, or make the Buffer with dtype={rows.dtype}"


def _check_device(buffer: Buffer, name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise wrong_type(name, "a tensor", tensor)
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
