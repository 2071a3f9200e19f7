"""Buffers that end, on fake extensions: dropped, destroyed, and while a CUDA graph is captured."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import hybrid_ep
from hybrid_ep.backends import endings
from tests.launch import Rank
from tests.ranks import fake_nvshmem
from tests.ranks.raised import what_it_raises
from tools import fake_nvlink

MakeBuffer = Callable[[], hybrid_ep.Buffer]
Calls = Callable[[], list[str]]  # so far, of the extension


@contextlib.contextmanager
def on_nvlink(me: Rank) -> Iterator[tuple[MakeBuffer, Calls]]:
    fake = fake_nvlink.Fake()
    sizes = {**fake_nvshmem.CASE.on(me.num_ranks).sizes(), "ranks_per_node": None}
    with fake_nvlink.gpu_with(fake):
        yield (
            lambda: me.buffer(**sizes, device="cuda:0", backend="nvlink"),
            lambda: [call for call, _ in fake.events],
        )


@contextlib.contextmanager
def on_nvshmem(me: Rank) -> Iterator[tuple[MakeBuffer, Calls]]:
    fake = fake_nvshmem.Fake()
    sizes = fake_nvshmem.CASE.on(me.num_ranks).sizes()
    with fake_nvshmem.gpu_with(fake):
        yield (
            lambda: me.buffer(**sizes, device="cuda:0", backend="nvshmem"),
            lambda: list(fake.calls),
        )


@contextlib.contextmanager
def on_torch(me: Rank) -> Iterator[tuple[MakeBuffer, Calls]]:
    sizes = fake_nvshmem.CASE.on(me.num_ranks).sizes()
    yield lambda: me.buffer(**sizes), list


FAKES = {"nvlink": on_nvlink, "nvshmem": on_nvshmem, "torch": on_torch}


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def captured() -> contextlib.AbstractContextManager:
    return mock.patch.object(endings, "is_capturing", lambda: True)


def begin_a_call(buffer: hybrid_ep.Buffer) -> None:
    backend = buffer.communicator.verbs
    backend._streams = SimpleNamespace(current=lambda: 0, are_several=False)
    backend._begin()


def drop(me: Rank, backend: str) -> tuple[bool, int]:
    """Whether a Buffer is gone with its last name, and how often its runtime was destroyed."""
    with FAKES[backend](me) as (make, calls), no_collector():
        buffer = make()
        reference = weakref.ref(buffer)
        del buffer
        return reference() is None, calls().count("destroy")


def end_in_a_capture(me: Rank, backend: str, way: str, then: str) -> list[int]:
    """How often the runtime was destroyed: in the capture, after it, and once a Buffer was used."""
    with FAKES[backend](me) as (make, calls), no_collector():
        buffer, other, seen = make(), make(), []
        with captured():
            if way == "destroyed":
                buffer.destroy()
            buffer = None  # as where another takes its place
            if then == "called in the capture":
                begin_a_call(other)
            seen.append(calls().count("destroy"))
        seen.append(calls().count("destroy"))
        if then == "made":
            third = make()
            seen.append(calls().count("destroy"))
            third.destroy()
        elif then == "destroyed":
            other.destroy()
            seen.append(calls().count("destroy") - 1)
        else:
            begin_a_call(other)
            seen.append(calls().count("destroy"))
        other.destroy()
        return seen


def what_waits(me: Rank) -> dict[str, str]:
    """What the calls that always wait for the GPU raise while a graph is captured."""
    with on_nvlink(me) as (make, calls):
        buffer = make()
        before = len(calls())
        with captured():
            told = {
                "made": what_it_raises(make),
                "released": what_it_raises(buffer.release),
                "restored": what_it_raises(buffer.restore),
            }
        assert len(calls()) == before
        buffer.release()
        buffer.restore()
        buffer.destroy()
    return told
