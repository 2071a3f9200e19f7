"""What the ranks of a Buffer made together for its calls: all that the ops know of it.

A ``Buffer`` makes a Communicator, and takes its backend away and gives it another. The ops, which
lie between the two, find it by a number: torch passes no other object through a graph.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NoReturn

from hybrid_ep.backends import Backend
from hybrid_ep.group import Group
from hybrid_ep.shape import Shape

_next_id = itertools.count()
_alive: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


class Communicator:
    """See the module.

    Attributes:
        shape: the sizes of its calls.
        group: its ranks.
        device: where its tensors are.
        id: what the ops take in its place.
        backend: what moves tokens; destroyed while the Buffer has no memory.
        verbs: the backend, where it may be called; else what raises in its place.
        layout_size: int32 words of a handle's layout.
        has_kernels: whether the limits of the CUDA kernels hold for its tensors.
        two_way_dtypes: rows that dispatch and combine both carry.
    """

    def __init__(self, shape: Shape, group: Group, backend: Backend) -> None:
        self.shape, self.group, self.device = shape, group, group.device
        self.backend = self.verbs = backend
        self.layout_size = backend.layout_size
        self.has_kernels = backend.name != "torch"
        self.two_way_dtypes = shape.two_way_dtypes(aligned=self.has_kernels)
        self.id = next(_next_id)
        _alive[self.id] = self

    def close(self, reason: str) -> None:
        """Give back what the backend holds; every call raises a RuntimeError with the reason."""
        self.backend.destroy()
        self.verbs = _Closed(reason)

    def reopen(self, backend: Backend) -> None:
        """Go on with another backend of the same kind."""
        self.backend = self.verbs = backend


class _Closed:
    """In the place of the backend of a closed Communicator."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(self._reason)


def find(communicator_id: Any) -> Communicator:
    """The Communicator behind an op's ``buffer_id``."""
    found = _alive.get(int(communicator_id))  # a SymInt where shapes are dynamic
    if found is None:
        raise RuntimeError(f"hybrid_ep.Buffer {communicator_id} no longer exists")
    return found
