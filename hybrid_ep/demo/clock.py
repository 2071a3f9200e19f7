"""A Buffer that adds up the time its communication takes."""

from __future__ import annotations

import time
from collections.abc import Callable
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
        self._spans: list[tuple[Any, Any]] = []

    @property
    def verbs(self) -> Any:
        """The backend's verbs, timed."""
        return _TimedVerbs(super().verbs, self._timed)

    def take_seconds(self) -> float:
        """Seconds in the verbs since the last call; waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            seconds = sum(begin.elapsed_time(end) for begin, end in self._spans) / 1e3
        else:
            seconds = sum(end - begin for begin, end in self._spans)
        self._spans.clear()
        return seconds

    def _timed(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            result = verb(*args, **kwargs)
            self._spans.append((begin, self._now()))
            return result

        return timed

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_VERBS = ("route", "dispatch", "dispatch_fresh", "combine")


class _TimedVerbs:
    def __init__(self, verbs: Any, timed: Callable[..., Any]) -> None:
        self._verbs, self._timed = verbs, timed

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._verbs, name)
        return self._timed(attribute) if name in _VERBS else attribute
