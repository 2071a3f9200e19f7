"""What the forward of a checkpointed region keeps, and what its recomputations take.

    forward          each result of a kind is kept, in order
    recomputation    takes them in the same order, from the first one; there may be several

A region may run inside another. What its forward makes while the other is recomputed is what the
other kept. Each thread has regions of its own: on a GPU, autograd recomputes in another thread than
that of the forward.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes

Result = tuple[Any, ...]
Kept = defaultdict[str, list[tuple[Result, list[int]]]]
"""The results of one region by kind, each with the versions of its tensors."""


class _Run:
    """The forward of a region, or one recomputation."""

    def __init__(self, kept: Kept, *, is_forward: bool) -> None:
        self._kept, self.is_forward = kept, is_forward
        self._taken: Counter[str] = Counter()

    def keep(self, kind: str, result: Result) -> None:
        self._kept[kind].append((result, _versions(result)))

    def take(self, kind: str) -> Result:
        number, kept = self._taken[kind], self._kept[kind]
        if number == len(kept):
            raise RuntimeError(
                f"the recomputation of a checkpointed region must make the calls of its forward: "
                f"that made {kind} {number} times, got one more"
            )
        self._taken[kind] += 1
        result, versions = kept[number]
        if _versions(result) != versions:
            raise RuntimeError(
                f"what {kind} returned in the forward of a checkpointed region must not be "
                "written to: write to a clone of it"
            )
        return result


class _Here(threading.local):
    """The runs that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []


_here = _Here()


def enter(kept: Kept, *, is_forward: bool) -> None:
    """Begin a run of the region that keeps its results there."""
    _here.runs.append(_Run(kept, is_forward=is_forward))


def leave() -> None:
    """End the innermost run."""
    _here.runs.pop()


def in_region() -> bool:
    """Whether this thread runs a region."""
    return bool(_here.runs)


def replayed(kind: str) -> Result | None:
    """The next result that the forward kept; None outside of a recomputation."""
    inner: list[_Run] = []
    for run in reversed(_here.runs):
        if not run.is_forward:
            result = run.take(kind)
            for each in inner:
                each.keep(kind, result)
            return result
        inner.append(run)
    return None


def keep(kind: str, result: Result) -> None:
    """Keep what was made because nothing was to be replayed."""
    for run in _here.runs:
        run.keep(kind, result)


def copied(kind: str, make: Callable[[], Result]) -> Result:
    """What ``make`` returns, kept and replayed as copies: the caller may write to its result.

    Compiled code does: it reuses the memory of a tensor after its last use.
    """
    result = replayed(kind)
    if result is None:
        made = make()
        if in_region():
            keep(kind, _copies(made))
        return made
    return _copies(result)


def hidden(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb, whose own calls of torch do not go through the mode of a region: 2 us for each."""

    @functools.wraps(verb)
    def call(*args: Any) -> Any:
        if is_compiling() or not in_region():
            return verb(*args)
        with torch._C.DisableTorchFunction():
            return verb(*args)

    return call


def _copies(result: Result) -> Result:
    with _disable_current_modes():  # a policy that saves clones must not see these
        return tuple(each.detach().clone() if isinstance(each, Tensor) else each for each in result)


def _versions(result: Result) -> list[int]:
    return [t._version for t in result if isinstance(t, Tensor) and not t.is_inference()]
