"""Exceptions on one rank alone, while all ranks build, release, restore or trace a Buffer."""

from __future__ import annotations

import contextlib
import gc
import weakref
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import hybrid_ep
from hybrid_ep.backends import choose
from hybrid_ep.backends.cuda import nvlink, nvshmem
from hybrid_ep.config import Config
from hybrid_ep.group import Group
from tests.cases import Case
from tests.launch import Rank
from tests.ranks.raised import raised_by

CASE = Case("one rank fails", tokens=(6, 4), topk=3, experts_per_rank=6)


def build(me: Rank, by_rank: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Build a Buffer with arguments that are the rank's own, then one without any."""
    arguments = [{**CASE.on(me.num_ranks).sizes(), **mine} for mine in (by_rank[me.rank], {})]
    return [raised_by(lambda each=each: me.buffer(**each).destroy()) for each in arguments]


class Local:
    """Something that a caller holds."""


def fail_and_go_on(me: Rank) -> bool:
    """Whether a step that failed on rank 1 keeps alive what its caller held, without a gc."""
    group = Group()

    def caller() -> weakref.ref[Local]:
        held = Local()

        def step() -> None:
            with group.together():
                if me.rank == 1:
                    raise ValueError("hidden must be even")

        assert "hidden must be even" in raised_by(step)[1]
        return weakref.ref(held)

    gc.disable()
    try:
        return caller()() is not None
    finally:
        gc.enable()


def failing(me: Rank, owner: Any, name: str, error: Exception) -> AbstractContextManager:
    """On rank 1 the function raises."""
    raises = mock.patch.object(owner, name, mock.Mock(side_effect=error))
    return raises if me.rank == 1 else contextlib.nullcontext()


def backend_class(me: Rank) -> tuple[Any, str]:
    """Where a Buffer finds the class of the target's backend, or of its memory, and its name."""
    return {
        "torch": (choose, "TorchBackend"),
        "nvlink": (nvlink, "Memory"),
        "nvshmem": (nvshmem, "Memory"),
    }[me.backend]


def build_the_backend(me: Rank, error: Exception) -> list[tuple[str, str]]:
    sizes = CASE.on(me.num_ranks).sizes()
    with failing(me, *backend_class(me), error):
        first = raised_by(lambda: me.buffer(**sizes))
    return [first, raised_by(lambda: me.buffer(**sizes).destroy())]


def release(me: Rank, error: Exception) -> list[tuple[str, str]]:
    buffer = me.buffer(**CASE.on(me.num_ranks).sizes())
    with failing(me, buffer.communicator.verbs, "reclaim", error):
        told = [raised_by(buffer.release)]
    buffer.restore()
    return [*told, raised_by(buffer.destroy)]


def restore(me: Rank, error: Exception) -> list[tuple[str, str]]:
    """A restore that fails on one rank, and a second one."""
    buffer = me.buffer(**CASE.on(me.num_ranks).sizes())
    buffer.release()
    with failing(me, *backend_class(me), error):
        told = [raised_by(buffer.restore)]
    assert "was released" in raised_by(lambda: buffer.communicator.verbs.route)[1]
    told.append(raised_by(buffer.restore))
    buffer.destroy()
    return told


def write_trace(me: Rank, paths: list[str]) -> list[tuple[str, str]]:
    """Write an empty trace; the torch backend, which has none, stands in for nvlink's."""
    config = Config(timeout_s=20, trace=True)
    buffer = me.buffer(**CASE.on(me.num_ranks).sizes(), config=config)
    with contextlib.ExitStack() as stack:
        if me.backend == "torch":
            buffer.communicator.verbs.take_trace = list
            stack.enter_context(mock.patch.object(hybrid_ep.Buffer, "backend", "nvlink"))
        told = [raised_by(lambda path=path: buffer.write_trace(path)) for path in paths]
    buffer.destroy()
    return told


def use_after_destroy(me: Rank, name: str) -> list[tuple[str, str]]:
    """Rank 1 alone has destroyed its Buffer when all ranks release or restore theirs."""
    buffer = me.buffer(**CASE.on(me.num_ranks).sizes())
    if name == "restore":
        buffer.release()
    if me.rank == 1:
        buffer.destroy()
    told = raised_by(getattr(buffer, name))
    buffer.destroy()
    return [told, raised_by(lambda: me.buffer(**CASE.on(me.num_ranks).sizes()).destroy())]
