"""A Buffer that adds up the time its communication takes."""

from __future__ import annotations

import time
from typing import Any

import torch

from hybrid_ep.buffer import Buffer


class TimedBuffer(Buffer):
    """Times route, dispatch and combine where the ops reach for them, so in backward as well.

    Wall time on the CPU, GPU time between events on a GPU; both hold the waiting for peers. Made
    like a Buffer.
    """

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._timed = _TimedVerbs(self.communicator.verbs, self.device)
        self.communicator.verbs = self._timed

    def take_seconds(self) -> float:
        """Seconds in the verbs since the last call; waits for the GPU."""
        spans, self._timed.spans = self._timed.spans, []
        if self.device.type != "cuda":
            return sum(end - begin for begin, end in spans)
        torch.cuda.synchronize(self.device)
        return sum(begin.elapsed_time(end) for begin, end in spans) / 1e3


_VERBS = ("route", "dispatch", "dispatch_fresh", "combine")


class _TimedVerbs:
    def __init__(self, verbs: Any, device: torch.device) -> None:
        self._verbs, self._device = verbs, device
        self.spans: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._verbs, name)
        if name not in _VERBS:
            return verb

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            result = verb(*args, **kwargs)
            self.spans.append((begin, self._now()))
            return result

        return timed

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
