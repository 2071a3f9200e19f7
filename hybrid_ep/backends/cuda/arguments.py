"""Tensors as the verbs of a runtime take them: tuples of addresses and sizes.

A tuple holds the fields of a struct of ``csrc/kernels/verbs.h``, in their order. It keeps no tensor
alive: whoever makes one keeps the tensors until the call.
"""

from __future__ import annotations

import torch
from torch import Tensor, float32

from hybrid_ep.backends.empty import Empty
from hybrid_ep.shape import NUMBER_OF_DTYPE, ROW_ALIGN, SUM_DTYPES

SUM_TYPES = {dtype: number for number, dtype in enumerate(SUM_DTYPES)}
DENSE = (1,)  # stride of a vector
NO_ROWS = (0, 0, 0, 0)  # a Received
_WORD = 4  # bytes
_EMPTY = 16  # the address of an empty tensor that is there: 0 means none

Fields = tuple[int, ...]


class Sent:
    """What a dispatch sends: the fields of a ``Sent``, and the tensors whose addresses they hold.

    Keep it until the call, and make the rows by it.
    """

    __slots__ = ("_kept", "_scales", "_weighted", "_x", "fields")

    def __init__(
        self,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        layout: Tensor,
        num_sms: int,
    ) -> None:
        x, address, x_stride = aligned(x)
        num_tokens, hidden = x.shape
        weights_at = weights_stride = scales_at = scale_bytes = 0
        dtypes = NUMBER_OF_DTYPE[x.dtype]
        if weights is not None:
            weights_stride, step = weights.stride()
            if step != 1:
                weights = weights.contiguous()
                weights_stride = weights.shape[1]
            weights_at = weights.data_ptr() or _EMPTY
        if scales is not None:
            scales = _in_words(scales)
            scale_bytes = scales.shape[1] * scales.element_size()
            scales_at = scales.data_ptr() or _EMPTY
            dtypes |= NUMBER_OF_DTYPE[scales.dtype] << 8
        self._x, self._weighted, self._scales = x, weights is not None, scales
        self._kept = weights
        self.fields = (
            address,
            x_stride,
            hidden * x.element_size(),
            weights_at,
            weights_stride,
            scales_at,
            scale_bytes,
            scale_bytes,
            dtypes,
            num_tokens,
            layout.data_ptr(),
            num_sms,
        )

    def make_rows(
        self, empty: Empty, num_rows: int
    ) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], Fields]:
        """Rows, their weights and scales, and the fields of their ``Received``."""
        hidden = self._x.shape[1]
        row_weights = row_scales = None
        row_weights_at = row_scales_at = 0
        rows = empty((num_rows, hidden), (hidden, 1), self._x.dtype)
        if self._weighted:
            row_weights = empty((num_rows,), DENSE, float32)
            row_weights_at = row_weights.data_ptr() or _EMPTY
        if self._scales is not None:
            num_scales = self._scales.shape[1]
            row_scales = empty((num_rows, num_scales), (num_scales, 1), self._scales.dtype)
            row_scales_at = row_scales.data_ptr() or _EMPTY
        received = (rows.data_ptr(), row_weights_at, row_scales_at, num_rows)
        return (rows, row_weights, row_scales), received


def choices_of(
    topk_idx: Tensor, max_rows: int | None, align: int, most: Tensor | None, slots: int
) -> tuple[Tensor, Fields]:
    """The fields of a Choices, and the tensor whose address is among them: keep it until the call.

    The same holds for ``most``, which is dense.

    Raises:
        ValueError: the size is to be exact in a CUDA graph.
    """
    if max_rows is None and torch.cuda.is_current_stream_capturing():
        raise ValueError("a CUDA graph needs max_rows: without it the host waits for M")
    stride, step = topk_idx.stride()
    if step != 1:
        topk_idx = topk_idx.contiguous()
        stride = topk_idx.shape[1]
    bound = -1 if max_rows is None else max_rows
    size, count = topk_idx.element_size(), topk_idx.shape[0]
    fields = topk_idx.data_ptr(), size, stride, count, align, bound
    if most is None:
        return topk_idx, (*fields, 0, 0, 0)
    return topk_idx, (*fields, most.data_ptr(), most.numel(), slots)


def address_of(tensor: Tensor | None) -> int:
    """0 means none, so an empty tensor, which has no address, gets one that nobody looks at."""
    return 0 if tensor is None else tensor.data_ptr() or _EMPTY


def _in_words(scales: Tensor) -> Tensor:
    """Dense scales, at an address from which 4 bytes can be read at once."""
    scales = scales.contiguous()
    return scales.clone() if scales.data_ptr() % _WORD else scales


def aligned(x: Tensor) -> tuple[Tensor, int, int]:
    """Rows whose bytes follow each other and begin where a bulk copy can: x itself if they do.

    Returns:
        tuple: the rows, their address, and the bytes from one to the next.
    """
    stride, step = x.stride()
    stride, address = stride * x.element_size(), x.data_ptr()
    if step == 1 and (stride | address) % ROW_ALIGN == 0:
        return x, address, stride
    x = x.clone(memory_format=torch.contiguous_format)
    return x, x.data_ptr(), x.shape[1] * x.element_size()
