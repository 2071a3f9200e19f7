"""What a Buffer gives back when it ends, and never while a CUDA graph is captured.

Memory is given back once the GPU is done with it, and a wait for the GPU breaks a capture. A Buffer
may end at any time, as when another takes its place in a variable. So what ends during a capture is
kept until a Buffer is called, made or ended outside of one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_kept: list[Callable[[], None]] = []


def is_capturing() -> bool:
    """Whether a CUDA graph is captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def finish(give_back: Callable[[], None]) -> None:
    """Call ``give_back`` now, or as soon as no graph is captured."""
    _kept.append(give_back)
    finish_kept()


def finish_kept() -> None:
    """Give back what was kept, unless a graph is captured."""
    while _kept and not is_capturing():
        try:
            give_back = _kept.pop(0)
        except IndexError:  # another thread was faster
            return
        give_back()


def refuse_in_capture(what: str) -> None:
    """Raise before anything waits for the GPU, in what always does.

    Raises:
        RuntimeError: a graph is captured.
    """
    if is_capturing():
        raise RuntimeError(
            f"a hybrid_ep.Buffer must not be {what} while a CUDA graph is captured: that waits for "
            "the GPU and for the peers. Do it before or after the capture"
        )
