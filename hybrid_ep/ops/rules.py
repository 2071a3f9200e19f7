"""The rules that one call's tensors obey, checked before anything is sent.

Each function raises ValueError with the rule and the value, or TypeError with the argument and what
was got. All but ``check_experts`` look at shapes, dtypes and devices alone, so they may run while a
graph is captured or traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, float32, float64, is_grad_enabled
from torch.compiler import is_compiling

from hybrid_ep.communicator import Communicator
from hybrid_ep.handle import Dispatched, Handle
from hybrid_ep.integers import as_integer, index_of, round_up
from hybrid_ep.shape import (
    MAX_ROW_NUMBER,
    MAX_ROWS,
    MAX_SCALE_BYTES,
    MAX_SUMMED_BYTES,
    ROW_ALIGN,
    SUM_DTYPES,
    Shape,
    unaligned,
)

TOPK_DTYPES = (torch.int16, torch.int32, torch.int64)


def check_route(
    communicator: Communicator, topk_idx: Tensor, max_rows: int | None, align: int
) -> tuple[int | None, int]:
    """The routing of a fresh dispatch, and how its rows are sized: max_rows and align, as ints."""
    shape = communicator.shape
    _check_device(communicator, "topk_idx", topk_idx)
    if topk_idx.dtype not in TOPK_DTYPES:
        raise ValueError(f"topk_idx must be int16, int32 or int64, got {topk_idx.dtype}")
    sizes = topk_idx.shape
    if len(sizes) != 2 or sizes[1] != shape.topk:
        raise ValueError(f"topk_idx must have shape [T, topk={shape.topk}], got {list(sizes)}")
    if sizes[0] > shape.max_tokens:
        raise ValueError(
            f"topk_idx must have at most max_tokens={shape.max_tokens} tokens, got {sizes[0]}"
        )
    if isinstance(align, bool) or not isinstance(align, int) or align < 1:
        align = as_integer("align", align, 1)  # seldom: a call less for the host
    if align > 1 and align * shape.num_local_experts > MAX_ROWS:
        raise ValueError(
            f"align times the {shape.num_local_experts} experts of a rank must be at most "
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


def check_most(communicator: Communicator, most: Tensor) -> None:
    """What says how many experts a token has, for a device that is not asked."""
    _check_device(communicator, "most", most)
    if most.dtype != torch.int32 or most.numel() == 0:
        raise ValueError(
            "most must be int32 with one element or more, as map_to_topk returns it, got "
            f"{most.dtype} {list(most.shape)}"
        )


def check_num_sms(communicator: Communicator, verb: str, num_sms: int | None) -> int:
    """The SMs that a call may take; 0 for those of the Config.

    A dispatch and a combine obey the same bounds, as each is the backward of the other.
    """
    if num_sms is None:
        return 0
    if isinstance(num_sms, bool) or not isinstance(num_sms, int):
        num_sms = as_integer("num_sms", num_sms, 1)
    least, most = communicator.backend.sms_of_a_call
    if num_sms < least or (most is not None and num_sms > most):
        bound = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"num_sms of a {verb} must be {bound}, got {num_sms}")
    return num_sms


def check_experts(communicator: Communicator, topk_idx: Tensor) -> None:
    """The experts themselves, on the CPU; on a GPU the kernels look at them."""
    if topk_idx.device.type != "cpu" or topk_idx.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(topk_idx))
    num_experts = communicator.shape.num_experts
    if low < -1 or high >= num_experts:
        raise ValueError(
            f"topk_idx must lie in [-1, {num_experts=}), got values from {low} to {high}"
        )


def check_dispatch(
    communicator: Communicator,
    x: Tensor,
    weights: Tensor | None,
    scales: Tensor | None,
    num_tokens: int,
) -> None:
    """The tokens of a dispatch, ``num_tokens`` being those that its routing speaks of."""
    _check_device(communicator, "x", x)
    sizes, hidden = x.shape, communicator.shape.hidden
    if len(sizes) != 2 or sizes[1] != hidden:
        raise ValueError(f"x must have shape [T, {hidden=}], got {list(sizes)}")
    if sizes[0] != num_tokens:
        raise ValueError(
            f"x must have as many tokens as its routing, got {sizes[0]} and {num_tokens}"
        )
    may_return = x.dtype in communicator.two_way_dtypes
    scale_bytes = 0
    if scales is not None:
        _check_device(communicator, "scales", scales)
        if scales.dim() != 2 or scales.shape[0] != num_tokens:
            raise ValueError(
                f"scales must have shape [T={num_tokens}, S], got {list(scales.shape)}"
            )
        scale_bytes = round_up(scales.shape[1] * scales.element_size(), 16)
    if scales is not None or not may_return:
        check_outbox(communicator, x, scale_bytes)
    if weights is not None:
        sizes = num_tokens, communicator.shape.topk
        _check_weights(communicator, "topk_weights", weights, sizes, x.dtype)
    if not may_return and is_grad_enabled():
        check_dispatch_gradient(communicator, x, weights)


def check_combine(
    communicator: Communicator,
    rows: Tensor,
    weights: Tensor | None,
    values: Tensor | None = None,
) -> None:
    """The rows of a combine."""
    _check_device(communicator, "rows", rows)
    hidden = communicator.shape.hidden
    if rows.dim() != 2 or rows.shape[1] != hidden:
        raise ValueError(f"rows must have shape [M, {hidden=}], got {list(rows.shape)}")
    # under a compiler M may be a symbol; the op looks again
    if communicator.has_kernels and not is_compiling():
        summed_bytes = rows.shape[0] * hidden * rows.element_size()
        if summed_bytes > MAX_SUMMED_BYTES:
            raise ValueError(
                f"rows must have at most {MAX_SUMMED_BYTES} bytes in all, got {summed_bytes}: "
                "dispatch and combine fewer tokens at a time"
            )
    may_return = rows.dtype in communicator.two_way_dtypes
    if not may_return:
        check_inbox(communicator, rows)
    if weights is not None:
        _check_weights(communicator, "weights", weights, (rows.shape[0],), rows.dtype)
    if values is not None:
        _check_weights(communicator, "values", values, (rows.shape[0],), rows.dtype)
    if not may_return and is_grad_enabled():
        check_combine_gradient(communicator, rows, weights, values)


def check_outbox(communicator: Communicator, x: Tensor, scale_bytes: int = 0) -> None:
    """A row of ``x`` and its scales have room in the outbox."""
    if scale_bytes > MAX_SCALE_BYTES and communicator.has_kernels:
        raise ValueError(
            f"scales must have at most {MAX_SCALE_BYTES} bytes per token, got {scale_bytes}"
        )
    shape = communicator.shape
    row_bytes = round_up(_row_bytes(communicator, x), 16)
    needed = row_bytes + scale_bytes
    if needed > shape.row_capacity and not _may_be_float64(communicator, x.dtype):
        raise ValueError(
            f"rows of {x.dtype}{' and their scales' if scale_bytes else ''} need {needed} bytes, "
            f"more than the {shape.row_capacity} that {_reserving(shape)}: "
            + (
                _remedy(shape, x)
                if row_bytes > shape.row_capacity
                else f"make the Buffer with dtype={x.dtype} and scale_bytes={scale_bytes}"
            )
        )


def check_inbox(communicator: Communicator, rows: Tensor) -> None:
    """The rows can be summed, and a sum has room on its way to the source rank."""
    if _may_be_float64(communicator, rows.dtype):
        return
    if rows.dtype not in SUM_DTYPES:
        raise ValueError(f"combine sums bfloat16, float16 or float32 rows, got {rows.dtype}")
    shape, needed = communicator.shape, _row_bytes(communicator, rows)
    if needed > shape.inbox_row_bytes:
        raise ValueError(
            f"rows of {rows.dtype} need {needed} bytes, more than the {shape.inbox_row_bytes} "
            f"that dtype={shape.dtype} of the Buffer reserves: {_remedy(shape, rows)}"
        )


def check_dispatch_gradient(communicator: Communicator, x: Tensor, weights: Tensor | None) -> None:
    """The backward of a dispatch, a combine, can carry the gradients that are wanted."""
    if x.requires_grad:
        dtype = x.dtype
    elif weights is not None and weights.requires_grad:
        dtype = summable_dtype(x)
    else:
        return
    if _may_be_float64(communicator, dtype):
        return
    if dtype not in SUM_DTYPES:
        raise ValueError(
            f"the gradient of x is a sum, so x must be bfloat16, float16 or float32 to require "
            f"one, got {dtype}: detach x, or dispatch under torch.no_grad()"
        )
    shape = communicator.shape
    needed = shape.hidden * dtype.itemsize
    if needed > shape.inbox_row_bytes:
        raise ValueError(
            f"the backward of this dispatch combines rows of {dtype}, which need {needed} bytes, "
            f"more than the {shape.inbox_row_bytes} that dtype={shape.dtype} of the Buffer "
            f"reserves: make the Buffer with dtype={dtype}, or dispatch under torch.no_grad()"
        )


def check_combine_gradient(
    communicator: Communicator, rows: Tensor, *others: Tensor | None
) -> None:
    """The backward of a combine, a dispatch, can carry the gradient, where one is wanted."""
    if not any(tensor is not None and tensor.requires_grad for tensor in (rows, *others)):
        return
    shape = communicator.shape
    needed = round_up(shape.hidden * rows.dtype.itemsize, 16)
    if needed > shape.row_capacity and not _may_be_float64(communicator, rows.dtype):
        raise ValueError(
            f"the backward of this combine dispatches rows of {rows.dtype}, which need {needed} "
            f"bytes, more than the {shape.row_capacity} that {_reserving(shape)}: make the "
            f"Buffer with dtype={rows.dtype}, or combine under torch.no_grad()"
        )


def check_combine_backward(communicator: Communicator, grad_y: Tensor, rows: Tensor) -> None:
    """The gradient of a weighted combine's sums, beside the rows that it summed."""
    _check_device(communicator, "grad_y", grad_y)
    shape = communicator.shape
    if grad_y.dtype != rows.dtype or grad_y.dim() != 2 or grad_y.shape[1] != shape.hidden:
        raise ValueError(
            f"grad_y must have shape [T, hidden={shape.hidden}] and the dtype of rows, "
            f"{rows.dtype}, got {list(grad_y.shape)} of {grad_y.dtype}"
        )
    check_outbox(communicator, grad_y)


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
    communicator: Communicator,
    *,
    layout_size: int,
    experts: int | None = None,
    topk: int | None = None,
) -> None:
    """The sizes that an op got as arguments are those of its Buffer."""
    given = {
        "layout_size": (layout_size, communicator.layout_size),
        "experts": (experts, communicator.shape.num_local_experts),
        "topk": (topk, communicator.shape.topk),
    }
    for name, (value, expected) in given.items():
        if value is not None and value != expected:
            raise ValueError(f"{name} must be that of the Buffer, {expected}, got {value}")


def check_handle(communicator: Communicator, handle: Handle) -> None:
    """The handle is of this Buffer, as far as its size can tell."""
    if not isinstance(handle, Handle):
        hint = ": pass its field .handle" if isinstance(handle, Dispatched) else ""
        raise wrong_type("handle", "a hybrid_ep.Handle", handle, hint)
    if handle.layout.shape[0] != communicator.layout_size:
        raise ValueError(
            "the handle must be of this Buffer, whose layouts have "
            f"{communicator.layout_size} words, got one of {handle.layout.shape[0]}"
        )


def wrong_type(name: str, wanted: str, got: Any, hint: str = "") -> TypeError:
    """An exception for an argument of another type; ``hint`` says what to do."""
    kind = "None" if got is None else f"one of type {type(got).__name__}"
    return TypeError(f"{name} must be {wanted}, got {kind}{hint}")


def _reserving(shape: Shape) -> str:
    """Which arguments of the Buffer size a row of the outbox, with their verb."""
    if shape.scale_bytes:
        return f"dtype={shape.dtype} and scale_bytes={shape.scale_bytes} of the Buffer reserve"
    return f"dtype={shape.dtype} of the Buffer reserves"


def _remedy(shape: Shape, rows: Tensor) -> str:
    """What to do about rows that are too wide for the Buffer."""
    convert = f"convert them to {shape.dtype}"
    if rows.dtype.itemsize > 4:  # no backend but torch's carries such rows
        return convert
    return f"{convert}, or make the Buffer with dtype={rows.dtype}"


def _check_device(communicator: Communicator, name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise wrong_type(name, "a tensor", tensor)
    if tensor.device != communicator.device:
        raise ValueError(
            f"{name} must be on the Buffer's {communicator.device}, got {tensor.device}"
        )


def _check_weights(
    communicator: Communicator,
    name: str,
    weights: Tensor,
    sizes: tuple[int, ...],
    payload: torch.dtype,
) -> None:
    _check_device(communicator, name, weights)
    if tuple(weights.shape) != sizes:  # the compiler does not compare a Size with a tuple
        raise ValueError(f"{name} must have shape {list(sizes)}, got {list(weights.shape)}")
    dtype = float64 if payload == float64 else float32
    if weights.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {weights.dtype}")


def _row_bytes(communicator: Communicator, rows: Tensor) -> int:
    hidden = communicator.shape.hidden
    if communicator.has_kernels and (text := unaligned(hidden, rows.dtype)):
        raise ValueError(text)
    return hidden * rows.element_size()


def _may_be_float64(communicator: Communicator, dtype: torch.dtype) -> bool:
    return dtype == torch.float64 and not communicator.has_kernels  # torch.autograd.gradcheck's
