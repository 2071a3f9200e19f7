"""Gathers between the ranks of a group, and steps that fail on all ranks if they fail on one.

A rank that raises an exception between two gathers would leave its peers in the next gather until
the timeout of the group. Inside ``Ranks.together`` it announces the exception in that gather:

    rank 0   gather ...................................... gather: raises "rank 1: no memory"
    rank 1   gather   MemoryError("no memory")   announces it here, then raises its MemoryError
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# what a peer raises for an exception of a rank: of the first of these types that it is of
_TYPES = (ValueError, TypeError, OSError, MemoryError, RuntimeError, Exception)
_OF_A_PEER = "_hybrid_ep_of_a_peer"  # attribute of an exception


def is_of_a_peer(error: BaseException) -> bool:
    """Whether the exception repeats one that a peer raised."""
    return getattr(error, _OF_A_PEER, False)


class _Failure(NamedTuple):
    """An exception, on its way to the peers of the rank that raised it."""

    type_index: int  # in _TYPES
    text: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        type_index = next(i for i, kind in enumerate(_TYPES) if isinstance(error, kind))
        text = str(error)
        if not text or _TYPES[type_index] in (MemoryError, Exception):
            text = f"{type(error).__name__}: {text}".removesuffix(": ")
        return cls(type_index, text)


class Ranks:
    """The ranks of a group, as one of them sees them.

    Args:
        group: the ``torch.distributed`` group; not used by a single rank.
        rank: of this process in the group.
        num_ranks: size of the group.

    Attributes:
        device: of this rank, once it is known. NCCL gathers objects through the current GPU, so
            that becomes this one.
    """

    def __init__(self, group: Any, rank: int, num_ranks: int) -> None:
        self._group = group
        self._rank = rank
        self._num_ranks = num_ranks
        self.device = torch.device("cpu")
        self._depth = 0  # of steps in steps
        # that all ranks know of; only within a step, since one may be raised again in another
        self._known: list[Exception] = []

    def gather(self, value: Any) -> list[Any]:
        """One Python object from each rank, in rank order; collective.

        Raises:
            Exception: a peer announced an exception; the text names the peer and repeats its text.
        """
        if self._num_ranks == 1:
            return [value]
        everybody = self._exchange((value, None))
        for rank, (_, failure) in enumerate(everybody):
            if failure is not None:
                error = _TYPES[failure.type_index](f"rank {rank}: {failure.text}")
                setattr(error, _OF_A_PEER, True)
                self._known.append(error)
                raise error
        return [value for value, _ in everybody]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A step that all ranks take; collective. It may gather, and it ends with a gather.

        All ranks must gather equally often in it, but for a rank that raises an exception. Steps
        may be nested. A step of a single rank costs nothing.

        Raises:
            Exception: what the step raised on this rank; else, if it raised on a peer, an
                exception of the same kind that names the peer (as ``gather`` raises it).
        """
        if self._depth == 0:
            self._known.clear()
        self._depth += 1
        try:
            yield
        except Exception as error:
            if self._num_ranks > 1 and not any(error is known for known in self._known):
                self._known.append(error)
                self._exchange((None, _Failure.of(error)))
            raise
        else:
            self.gather(None)
        finally:
            self._depth -= 1

    def _exchange(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._num_ranks
        on_gpu = self.device.type == "cuda" and torch.cuda.is_available()
        try:
            with torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
                dist.all_gather_object(values, value, group=self._group)
        except Exception as error:  # the group itself failed: another exchange would only wait
            self._known.append(error)
            raise
        return values
