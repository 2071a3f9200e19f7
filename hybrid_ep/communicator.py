"""What the ranks of a Buffer made together for its calls: all that the ops know of it.

A ``Buffer`` makes a Communicator, and ends it; in between the backend may go and come again:

    live --release--> released --restore--> live --destroy--> destroyed

The ops, which lie between a Buffer and its backend, find the Communicator by a number: torch passes
no other object through a graph.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NoReturn

import torch

from hybrid_ep.backends.choose import build, choose
from hybrid_ep.backends.endings import refuse_in_capture
from hybrid_ep.config import Config
from hybrid_ep.group import Group
from hybrid_ep.shape import Shape

_next_id = itertools.count()
_alive: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_REFUSALS = {  # by state
    "released": "this hybrid_ep.Buffer was released: restore() brings it back, on all ranks",
    "destroyed": "this hybrid_ep.Buffer was destroyed",
}


class Communicator:
    """See the module; collective to make.

    Args:
        asked: the backend, one of ``BACKENDS``.
        shape: as below.
        group: likewise; the ranks have met.
        config: equal on all ranks, like the ``number`` of the Buffer.

    Attributes:
        shape: the sizes of its calls.
        group: its ranks.
        device: where its tensors are.
        id: what the ops take in its place.
        state: ``"live"``, ``"released"`` or ``"destroyed"``.
        backend: what moves tokens; destroyed while the Buffer has no memory.
        reason: why it is this backend.
        verbs: the backend, where it may be called; else what raises in its place.
        layout_size: int32 words of a handle's layout.
        has_kernels: whether the limits of the CUDA kernels hold for its tensors.
        two_way_dtypes: rows that dispatch and combine both carry.

    Raises:
        RuntimeError: the backend asked for cannot run here, on all ranks.
    """

    def __init__(self, asked: str, shape: Shape, group: Group, config: Config, number: int) -> None:
        self.shape, self.group, self.device = shape, group, group.device
        self._config, self._number = config, number
        self.backend, self.reason = choose(asked, shape, group, config, number=number)
        self.verbs, self.state = self.backend, "live"
        self.layout_size = self.backend.layout_size
        self.has_kernels = self.backend.name != "torch"
        self.two_way_dtypes = shape.two_way_dtypes(aligned=self.has_kernels)
        self.id = next(_next_id)
        _alive[self.id] = self

    def release(self) -> None:
        """See ``Buffer.release``."""
        with self.group.together():  # afterwards no rank holds any memory
            self._refuse_change("released")
            if self.state == "released":
                return
            self.raise_failures()
            self._last_call = self.backend.last_call
            self._close("released")
            self.group.gather(None)  # now no rank maps a peer's memory
            self.backend.reclaim()

    def restore(self) -> None:
        """See ``Buffer.restore``."""
        with self.group.together():
            self._refuse_change("restored")
            if self.state == "live":
                return
            numbers = {"number": self._number, "last_call": self._last_call}
            made = build(self.backend.name, self.shape, self.group, self._config, **numbers)
        self.backend = self.verbs = made
        self.state = "live"

    def destroy(self) -> None:
        """See ``Buffer.destroy``."""
        self._close("destroyed")

    def raise_failures(self) -> None:
        """Raise what an earlier call left behind on any rank; waits for the GPU; collective."""
        failure = None
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # so that every failure is known
            self.backend.check()
        except (RuntimeError, ValueError) as error:
            failure = error
        try:
            for rank, theirs in enumerate(self.group.gather(failure and str(failure))):
                if theirs is not None:
                    raise failure or RuntimeError(f"a call on rank {rank} failed: {theirs}")
        finally:
            del failure  # with its traceback it would keep the callers' frames alive

    def _close(self, state: str) -> None:
        """Give back what the backend holds; every call raises a RuntimeError that says why."""
        self.verbs, self.state = _Closed(_REFUSALS[state]), state
        self.backend.destroy()

    def _refuse_change(self, what: str) -> None:
        refuse_in_capture(what)
        if self.state == "destroyed":
            raise RuntimeError(_REFUSALS["destroyed"])


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
