"""Tensors without contents, and parts of them, made as the code of torch's compiler makes them.

Past torch's dispatcher, in half the time of ``new_empty`` or a slice: for callers who know that
nobody watches ops. Where torch has no such way they are made as everybody makes them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

try:
    from torch._C._dynamo import guards as _quick
except ImportError:
    _quick = None

Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]

part: Callable[[Tensor, tuple[int, ...], tuple[int, ...], int], Tensor]
part = getattr(_quick, "_reinterpret_tensor", torch.as_strided)
"""``as_strided`` of a tensor that has no gradient; not a view to autograd, with a version of its
own."""


def empty_on(device: torch.device) -> Callable[[], Empty]:
    """Whom to ask, once a call, for the function (shape, stride, dtype) -> tensor on ``device``.

    Once a call, because the quick one takes the current device, whichever it is.
    """

    def slow(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    quick = getattr(_quick, f"_empty_strided_{device.type}", None)
    current = getattr(torch._C, "_cuda_getDevice", None)
    if quick is None or (device.type == "cuda" and current is None):
        return lambda: slow
    if device.type != "cuda":
        return lambda: quick
    index = device.index
    return lambda: quick if current() == index else slow
