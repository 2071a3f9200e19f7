"""The nvshmem backend on ranks without a GPU: an extension and an NVSHMEM that only keep count."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep import group, ops
from hybrid_ep.backends.cuda import maps, nvshmem, settings
from hybrid_ep.ops import round_trip
from tests.cases import Case
from tests.launch import Rank
from tests.ranks.fake_nvlink import built
from tests.ranks.one_rank_fails import failing
from tests.ranks.raised import raised_by, what_it_raises
from tools.fake_nvlink import instead

CASE = Case("fake", num_ranks=3, ranks_per_node=1)
HEAP_CALLS = ("allocate", "free", "complete_puts")


@dataclass
class Fake:
    """``hybrid_ep._nvshmem`` for one rank: remembers what it was asked.

    Attributes:
        fails: what NVSHMEM says, for each call that is to fail.
        faulted: what the kernels left behind.
    """

    fails: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    faulted: Any = None
    unmapped: int = -1

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fails:
            raise RuntimeError(self.fails[call])

    def RuntimeConfig(self, **sizes: Any) -> SimpleNamespace:
        return SimpleNamespace(**sizes, symmetric_bytes=1000 * sizes["max_tokens"])

    def Runtime(self, config: SimpleNamespace) -> SimpleNamespace:
        self.note("Runtime")
        return SimpleNamespace(
            symmetric_bytes=config.symmetric_bytes,
            handle_words=64,
            attach=lambda peers: self.note(f"attach {peers}"),
            destroy=lambda: self.note("destroy"),
            fault=lambda: self.faulted,
            num_routes=lambda: 0,
            is_half_made=False,
        )

    SHARED_MEMORY = 227 << 10

    def shared_memory_per_block(self, device: int) -> int:
        return self.SHARED_MEMORY

    def unique_id(self) -> bytes:
        self.note("unique_id")
        return b"id"

    def start(self, unique_id: bytes, rank: int, num_ranks: int) -> None:
        assert unique_id == b"id"
        self.note(f"start {rank} of {num_ranks}")

    def allocate(self, num_bytes: int) -> int:
        self.note("allocate")
        self.calls[-1] += f" {num_bytes}"
        return 128 * len(self.calls)

    def free(self, address: int) -> None:
        self.note("free")

    def complete_puts(self) -> None:
        self.note("complete_puts")

    def mapped(self, mine: int, rank: int) -> int:
        return 0 if rank == self.unmapped else mine + rank

    @staticmethod
    def loaded_version() -> str:
        return "3.4.5"


def gpu_with(fake: Fake, host: str = "a host", gpu: str = "GPU-0") -> AbstractContextManager:
    """What a Hopper with this NVSHMEM would answer, to a process that has no job yet."""
    return instead(
        (nvshmem, "_nvshmem", fake),
        (nvshmem, "_heap", nvshmem.Heap()),
        (nvshmem, "gpu_uuid", lambda device: gpu),
        (group, "gpu_uuid", lambda device: gpu),
        (settings, "num_sms", lambda device: 132),
        (group, "host_name", lambda: host),
        (round_trip, "verify_once", lambda communicator: None),  # no kernels here
        (torch.cuda, "get_device_capability", lambda device: (9, 0)),
        (torch.cuda, "synchronize", lambda device=None: None),
        (ops, "prepare_order", lambda device: None),
        (torch.cuda, "device", lambda device: contextlib.nullcontext()),
        (maps, "load", lambda device: None),  # the other extension is no fake
    )


def build(
    me: Rank, backend: str, fails: dict[int, dict[str, str]], hosts: list[str], unmapped: int
) -> dict[str, Any]:
    """A Buffer on fake GPUs: how building it went, and what was asked of the extension."""
    fake = Fake(fails.get(me.rank, {}), unmapped=unmapped)
    sizes = {**CASE.sizes(), "ranks_per_node": None}
    with gpu_with(fake, hosts[me.rank % len(hosts)]):
        told = built(lambda: me.buffer(**sizes, device="cuda:0", backend=backend))
    return {**told, "calls": fake.calls}


def build_on_gpus(me: Rank, gpus: list[str], hosts: list[str]) -> dict[str, Any]:
    """A Buffer whose ranks are on these GPUs, by name: what it raises, if anything."""
    fake = Fake()
    sizes = {**CASE.on(me.num_ranks).sizes(), "device": "cuda:0", "backend": "nvshmem"}
    with gpu_with(fake, hosts[me.rank], gpus[me.rank]):
        told = what_it_raises(lambda: me.buffer(**sizes).destroy())
    return {"told": told, "started": any(call.startswith("start") for call in fake.calls)}


def prepare_in_vain(me: Rank, owner: str, name: str, error: Exception) -> tuple[str, str, bool]:
    """Rank 1 cannot take part in NVSHMEM's start: what each rank raises, and whether it started."""
    fake = Fake()
    sizes = {**CASE.on(me.num_ranks).sizes(), "device": "cuda:0", "backend": "nvshmem"}
    place = {"nvshmem": nvshmem, "settings": settings, "torch.cuda": torch.cuda}[owner]
    with gpu_with(fake), failing(me, place, name, error):
        kind, text = raised_by(lambda: me.buffer(**sizes))
    return kind, text, any(call.startswith("start") for call in fake.calls)


def start_with(me: Rank, name: str, value: str) -> tuple[str, bool]:
    """A variable of the environment is set: what building raises, and whether NVSHMEM started."""
    fake = Fake()
    sizes = {**CASE.on(me.num_ranks).sizes(), "device": "cuda:0", "backend": "nvshmem"}
    with gpu_with(fake), mock.patch.dict(os.environ, {name: value}):
        told = what_it_raises(lambda: me.buffer(**sizes).destroy())
    return told, any(call.startswith("start") for call in fake.calls)


def start_slowly(me: Rank) -> str:
    """NVSHMEM is slow on rank 0, at its start and when it allocates: what a rank logs then."""
    fake = Fake()
    honest = fake.note

    def note(call: str) -> None:
        if me.rank == 0 and call.split()[0] in ("start", "allocate"):
            time.sleep(0.3)
        honest(call)

    fake.note = note
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger("hybrid_ep").addHandler(handler)
    sizes = {**CASE.on(me.num_ranks).sizes(), "device": "cuda:0", "backend": "nvshmem"}
    try:
        with gpu_with(fake), mock.patch.object(nvshmem, "NOTICE_S", 0.1):
            me.buffer(**sizes).destroy()
    finally:
        logging.getLogger("hybrid_ep").removeHandler(handler)
    return logged.getvalue()


def share_the_heap(me: Rank) -> dict[str, Any]:
    """Buffers one after another, side by side and after a fault; what each asked of the heap."""
    fake = Fake()
    asked = {}

    def make(tokens: int, name: str) -> hybrid_ep.Buffer:
        before = len(fake.calls)
        sizes = {**CASE.sizes(), "max_tokens": tokens}
        buffer = me.buffer(**sizes, device="cuda:0", backend="nvshmem")
        asked[name] = [c for c in fake.calls[before:] if c.split()[0] in HEAP_CALLS]
        return buffer

    with gpu_with(fake):
        first = make(16, "first")
        second = make(16, "beside it")
        first.destroy()
        first.destroy()
        third = make(16, "after it")
        if me.rank == 1:
            second.destroy()  # here alone
        fourth = make(32, "larger")
        second.destroy()
        third.destroy()
        fifth = make(64, "larger still")
        fake.faulted = object()
        fourth.destroy()
        fake.faulted = None
        sixth = make(32, "after a fault")
        fake.calls.clear()
        sixth.release()
        asked["release"] = list(fake.calls)
        fake.calls.clear()
        sixth.restore()
        asked["restore"] = [c.split(" [")[0] for c in fake.calls]
        dropped = make(8, "to be dropped")
        del dropped
        gc.collect()
        dropped = make(8, "after one was dropped")
        dropped.destroy()
        pair = dist.new_group([0, 1])
        if me.rank < 2:
            sizes = {**CASE.on(2).sizes(), "device": "cuda:0", "backend": "nvshmem"}
            asked["pair"] = what_it_raises(lambda: me.buffer(pair, **sizes))
        fifth.destroy()
        sixth.destroy()
    return asked


def build_with(me: Rank, settings: dict[str, int], backend: str) -> tuple[str, str, list[str]]:
    """What building raises with these settings, and what was asked of the extension."""
    fake = Fake()
    sizes = {**CASE.on(me.num_ranks).sizes(), "ranks_per_node": None, "device": "cuda:0"}
    config = hybrid_ep.Config(**settings, timeout_s=20)
    with gpu_with(fake, host=f"host {me.rank}"):
        kind, text = raised_by(lambda: me.buffer(**sizes, backend=backend, config=config).destroy())
    return kind, text, fake.calls
