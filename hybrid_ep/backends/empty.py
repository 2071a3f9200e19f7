"""Tensors without contents, and parts of them, made as the code of torch's compiler makes them.

Past torch's dispatcher, in half the time of ``new_empty`` or less: for callers who know that nobody
watches ops. A torch that has no such way makes them as everybody does.
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
"""``as_strided`` on a tensor without gradient, and no view to autograd: its version is its own."""
part = getattr(_quick, "_reinterpret_tensor", torch.as_strided)


def empty_on(device: torch.device) -> Callable[[], Empty]:
    """What to ask once a call for the function (shape, stride, dtype) -> tensor on ``device``.

    Once a call, because the quick one knows only the current device.
    """

    def slow(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    quick = getattr(_quick, f"_empty_strided_{device.type}", slow)
    current = getattr(torch._C, "_cuda_getDevice", None)
    if device.type == "cpu":
        return lambda: quick
    if current is None:
        return lambda: slow
    index = device.index
    return lambda: quick if current() == index else slow
