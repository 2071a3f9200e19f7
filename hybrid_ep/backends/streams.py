"""Calls in their order, whatever stream each is made on."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


class StreamOrder:
    """The calls of a Buffer follow each other, also where the current stream changes.

    Calls inside and outside of a CUDA graph that is being captured do not follow each other: a
    graph has the place of its replay.

    Attributes:
        last: the stream of the last call, None before the first.
        are_several: whether calls have come on more than one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read = stream_reader(device)
        self.last: torch.cuda.Stream | None = None
        self.are_several = False
        self._last_of: dict[bool, torch.cuda.Stream] = {}  # by whether a graph is captured
        self._last_key = -1, False  # address, 0 is the default stream's; whether it captures

    def current(self) -> int:
        """Address of the current stream, which now waits for the stream of the last call."""
        address, captures = self._read(), torch.cuda.is_current_stream_capturing()
        if (address, captures) != self._last_key:
            self._follow(captures)
            self._last_key = address, captures
        return address

    def _follow(self, captures: bool) -> None:
        stream = torch.cuda.current_stream(self._device)
        self.are_several = self.last is not None
        last = self._last_of.get(captures)
        # of a capture that has ended, no event may be waited for in the next one
        if last not in (None, stream) and _is_capturing(last) == captures:
            stream.wait_stream(last)
        self.last = self._last_of[captures] = stream


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


@functools.cache
def stream_reader(device: torch.device) -> Callable[[], int]:
    """What tells the address of the current stream, without a Stream object where torch can."""
    read = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # as torch's own compiler does
    if read is None:
        return lambda: torch.cuda.current_stream(device).cuda_stream
    return functools.partial(read, device.index)
