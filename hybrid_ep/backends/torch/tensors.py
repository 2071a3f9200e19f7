"""Tensors of the torch backend: how they are made, seen as words, and asked without waiting."""

from __future__ import annotations

import ctypes
import sys
from mmap import PAGESIZE

import torch
from torch import Tensor

_HUGE_BYTES = 4 << 20  # from here on a block holds at least one huge page
_MADV_HUGEPAGE = 14  # of Linux
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """As ``like.new_empty(shape)``; the system is asked for huge pages under a large one.

    malloc gives blocks of this size back to the system. Faulting their pages in anew, 4 kB at a
    time, costs twice the copy that fills them, and with huge pages a third of it (67 MB on one
    core: 19 ms and 4 ms beside 11 ms). The tensor is torch's own in every respect, so callers may
    change, resize and keep it.
    """
    made = like.new_empty(shape)
    num_bytes = made.numel() * made.element_size()
    if num_bytes >= _HUGE_BYTES and made.device.type == "cpu" and _madvise is not None:
        begin = -(-made.data_ptr() // PAGESIZE) * PAGESIZE
        end = (made.data_ptr() + num_bytes) // PAGESIZE * PAGESIZE
        # where the system has no huge pages it says so, and nothing else changes
        _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
    return made


def as_words(tensor: Tensor) -> Tensor:
    """The same bytes as the widest integers that divide a row: moving knows no dtype."""
    width, offset = (n * tensor.element_size() for n in (tensor.shape[1], tensor.storage_offset()))
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    size = next(size for size in words if width % size == 0)
    is_aligned = offset % size == 0
    if is_aligned and tensor.is_contiguous() and tensor.stride(0) == tensor.shape[1]:
        return tensor.view(words[size])
    # to one dimension, since the one row of a wider tensor is contiguous and keeps its stride
    flat = tensor.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % size:
        flat = flat.clone()
    return flat.view(words[size]).view(tensor.shape[0], width // size)


def runs_ahead(tensor: Tensor) -> bool:
    """Whether the host is ahead of the device, so that to ask for a value makes it wait."""
    return tensor.device.type != "cpu"


def to_device(numbers: list[int] | int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers in one tensor; the host does not wait for what the device has to do."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)


def trues_first(mask: Tensor) -> Tensor:
    """Where ``mask [N]`` is true, in order; on a device behind them more, which the caller cuts."""
    if runs_ahead(mask):
        return mask.view(torch.uint8).argsort(descending=True, stable=True)
    return mask.nonzero().squeeze(1)
