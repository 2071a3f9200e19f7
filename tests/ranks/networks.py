"""The verbs over networks that ranks of one host do not take by themselves.

``mapped``: what the ranks of one host do take. ``loopback``: the kernels of several nodes over CUDA
IPC, NVSHMEM never started. ``delaying``: the same, where puts and signals come late and in another
order, as far as NVSHMEM's contract allows. ``puts``: all that goes to other nodes is put by
NVSHMEM, also where the SMs could write it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from hybrid_ep import Buffer
from hybrid_ep.backends import kernels, nvshmem
from tests.cases import Case
from tests.launch import Rank
from tests.ranks import verbs


class LoopbackBackend(kernels.KernelBackend):
    """The nvshmem backend on plain stores; its ranks are on one host."""

    name = "nvshmem"
    delay_us = 0  # that puts wait for, at most

    def __init__(self, buffer: Buffer) -> None:
        self._remember(buffer)
        config = nvshmem.runtime_config(buffer, kernels.num_sms(buffer.device))
        self._runtime = nvshmem._nvshmem.Runtime(config, loopback=True)
        self._ends_with(self._runtime.destroy)
        self._runtime.open_peers(buffer.gather(self._runtime.ipc_handle()))
        if self.delay_us > 0:
            self._runtime.delay_puts(self.delay_us)
        buffer.gather(None)
        self.layout_size = self._runtime.handle_words

    def describe(self) -> str:
        return "nvshmem's kernels over CUDA IPC"

    def reclaim(self) -> None:
        pass


@contextlib.contextmanager
def loopback() -> Iterator[None]:
    with mock.patch.object(nvshmem, "NvshmemBackend", LoopbackBackend):
        yield


class DelayingBackend(LoopbackBackend):
    delay_us = 300  # longer than a call of the tests' sizes takes


@contextlib.contextmanager
def delaying() -> Iterator[None]:
    with mock.patch.object(nvshmem, "NvshmemBackend", DelayingBackend):
        yield


@contextlib.contextmanager
def puts() -> Iterator[None]:
    with mock.patch.object(nvshmem, "USES_MAPPED", False):
        yield


NETWORKS = {
    "mapped": contextlib.nullcontext,
    "loopback": loopback,
    "delaying": delaying,
    "puts": puts,
}


# The thread that delays puts asks the driver for copies, which wait while a kernel is loaded; and
# that waits for a kernel that runs, which may wait for the copies. So the same calls are made first
# over the network without the thread.
LOADS_KERNELS = {"delaying": "loopback"}


def all_verbs(me: Rank, case: Case, max_rows: int | None, network: str) -> dict[str, Any]:
    if network in LOADS_KERNELS:
        all_verbs(me, case, max_rows, LOADS_KERNELS[network])
    with NETWORKS[network]():
        return verbs.all_verbs(me, case, max_rows)
