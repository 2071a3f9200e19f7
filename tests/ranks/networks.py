"""The verbs over networks that ranks of one host do not take by themselves.

``mapped``: what the ranks of one host do take. ``loopback``: the kernels of several nodes over CUDA
IPC, NVSHMEM never started. ``delaying``: the same, where puts and signals come late and in another
order, as far as NVSHMEM's contract allows. ``puts``: all that goes to other nodes is put by
NVSHMEM, also where the SMs could write it.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from hybrid_ep import Config
from hybrid_ep.backends.cuda import nvshmem
from hybrid_ep.group import Group
from hybrid_ep.shape import Shape
from tests.cases import Case
from tests.launch import Rank
from tests.ranks import verbs


class LoopbackMemory:
    """The kernels of several nodes on plain stores; the ranks are on one host."""

    name = "nvshmem"
    least_sms = nvshmem.Memory.least_sms
    delay_us = 0  # that puts wait for, at most

    def __init__(
        self, shape: Shape, group: Group, config: Config, settings: dict[str, Any]
    ) -> None:
        sizes = nvshmem.runtime_config(settings)
        self.runtime = nvshmem._nvshmem.Runtime(sizes, loopback=True)
        self.give_back = self.runtime.destroy
        self.runtime.open_peers(group.gather(self.runtime.ipc_handle()))
        if self.delay_us > 0:
            self.runtime.delay_puts(self.delay_us)
        group.gather(None)

    def describe(self) -> str:
        return "memory through CUDA IPC"

    def reclaim(self) -> None:
        pass


class DelayingMemory(LoopbackMemory):
    delay_us = 300  # longer than a call of the tests' sizes takes


NETWORKS = {
    "mapped": contextlib.nullcontext,
    "loopback": lambda: mock.patch.object(nvshmem, "Memory", LoopbackMemory),
    "delaying": lambda: mock.patch.object(nvshmem, "Memory", DelayingMemory),
    "puts": lambda: mock.patch.object(nvshmem, "USES_MAPPED", False),
}


def all_verbs(me: Rank, case: Case, max_rows: int | None, network: str) -> dict[str, Any]:
    with NETWORKS[network]():
        return verbs.all_verbs(me, case, max_rows)
