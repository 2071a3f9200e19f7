"""How long dispatch and combine take, in the forward, in a recomputation and in the backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Spans:
    """Sums the time between two moments of a stream (CUDA events), or of the host without CUDA.

    A span holds everything from the inputs of a call to its results, waiting for peers and the work
    of the same stream in between included. Where communication has a stream of its own, spans may
    lie beside other work: then the share is of the time under way, not of the time lost.

    Attributes:
        enabled: set for whole steps, as a recomputation must see what its forward saw.
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled = False
        self._device = device
        self._spans: list[list[Any]] = []

    def around(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """``function(*inputs)``, timed, and so is its backward."""
        if not self.enabled:
            return function(*inputs)
        forward, backward = [None, None], [None, None]
        self._spans += [forward, backward]
        inputs = tree_map_only(Tensor, self._marks(backward, 1), inputs)
        forward[0] = self._moment()
        results = function(*inputs)
        forward[1] = self._moment()
        return tree_map_only(Tensor, self._marks(backward, 0), results)

    def take_seconds(self) -> float:
        """The sum since the last call; waits for the GPU."""
        spans, self._spans = self._spans, []
        spans = [span for span in spans if None not in span]  # a backward that never came
        if self._device.type != "cuda":
            return sum(end - begin for begin, end in spans)
        torch.cuda.synchronize(self._device)
        return sum(begin.elapsed_time(end) for begin, end in spans) / 1e3

    def _marks(self, span: list[Any], place: int) -> Callable[[Tensor], Tensor]:
        """Notes the moment at which the last gradient passes; the first one where it begins."""

        def note() -> None:
            if place == 1 or span[0] is None:
                span[place] = self._moment()

        return lambda tensor: _Mark.apply(tensor, note) if tensor.requires_grad else tensor

    def _moment(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Mark(torch.autograd.Function):
    """Identity, whose backward notes the moment."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return grad, None
