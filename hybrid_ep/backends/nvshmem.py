"""The nvshmem backend: CUDA kernels between the GPUs of several nodes.

    route      publish_routing, assign_rows, keep_routing   through the rail peers; the handle
    dispatch   dispatch                                     once to each node, then as on one node
    combine    combine                                      added in each node, then at home

The verbs are those of ``kernels.py``, as the nvlink backend's. The symmetric memory is
NVSHMEM's. A process takes part in one NVSHMEM job, whose ranks are those of its first Buffer: later
Buffers are for the same ranks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hybrid_ep.backends import kernels
from hybrid_ep.backends.kernels import raise_together
from hybrid_ep.backends.nvshmem_library import load_host_library
from hybrid_ep.fabric import nccl_files, network_environment, read_ports
from hybrid_ep.layout.network_window import network_window
from hybrid_ep.limits import round_up
from hybrid_ep.topology import Topology, gpu_uuid

if TYPE_CHECKING:
    from hybrid_ep.buffer import Buffer
    from hybrid_ep.config import Config

HEAP_MARGIN = 2**26  # bytes of a heap that cannot grow, for what NVSHMEM itself keeps there
NOTICE_S = 20.0  # after which a rank that waits inside NVSHMEM says so
MULTI_PORT = "NVSHMEM_IBGDA_ENABLE_MULTI_PORT"
USES_MAPPED = True  # SMs write to rail peers whose memory is mapped; tests have NVSHMEM put all

LEAST_SMS = {"num_sms_dispatch": 2, "num_sms_combine": 3}
"""An SM per role: blocks send or pull tokens; they push or forward sums, or add them at home."""

_log = logging.getLogger("hybrid_ep")
_nvshmem = None


def load_extension() -> Any:
    """Load NVSHMEM and ``hybrid_ep._nvshmem``, and return that; what is in use already stays.

    Raises:
        ImportError: one is not there, or they do not fit each other; the text says which.
    """
    global _nvshmem
    if _nvshmem is not None:
        return _nvshmem
    load_host_library()
    try:
        from hybrid_ep import _nvshmem as extension
    except ImportError as error:
        raise ImportError(
            f"the extension hybrid_ep._nvshmem is not there: it is built where NVSHMEM is found "
            f"({error})"
        ) from error
    built, loaded = extension.built_version(), extension.loaded_version()
    if built.split(".")[:2] != loaded.split(".")[:2]:
        raise ImportError(
            f"hybrid_ep was built with NVSHMEM {built}, this process has {loaded}: install that "
            "version or build again"
        )
    _nvshmem = extension
    return extension


def unavailable_reason(buffer: Buffer) -> str | None:
    """What this rank lacks for the nvshmem backend, as a sentence; None if nothing."""
    return kernels.what_is_lacking("nvshmem", buffer, load_extension)


class Heap:
    """The symmetric heap of this process's NVSHMEM job, shared by its Buffers.

    Allocating and freeing is collective, and a Buffer is destroyed without waiting for its peers:
    so a part that a Buffer gave back is kept until a later Buffer finds that all ranks have.
    """

    def __init__(self) -> None:
        self._ranks: list[int] | None = None
        self._sizes: list[int] = []  # of every allocation that was ever made
        self._given_back: dict[int, int] = {}  # number of an allocation -> its address

    def start(self, buffer: Buffer, heap_bytes: int) -> None:
        """Join the job, or make sure that it is the buffer's.

        Raises:
            RuntimeError: NVSHMEM did not start, or the job has other ranks; on all ranks.
        """
        topology = buffer.topology
        ranks = _world_ranks(buffer)
        states = buffer.gather(self._ranks)
        if any(state is not None for state in states):
            if any(state != ranks for state in states):
                raise RuntimeError(
                    f"a process takes part in one NVSHMEM job, that of its first Buffer: the ranks "
                    f"were {self._ranks}, this Buffer has {ranks}"
                )
            return
        _refuse_uneven_sharing(buffer)
        # All that can fail on one rank alone comes before this gather: NVSHMEM's start has no
        # deadline, so a missing rank would leave its peers there for ever.
        unique_id, failure = None, None
        try:
            _set_environment(buffer, heap_bytes)
            with torch.cuda.device(buffer.device):
                torch.cuda.synchronize()  # NVSHMEM starts on the device that has a context
                if topology.rank == 0:
                    unique_id = _nvshmem.unique_id()
        except RuntimeError as error:
            failure = str(error)
        prepared = buffer.gather((unique_id, failure))
        raise_together([failure for _, failure in prepared])
        unique_id = prepared[0][0]
        try:
            with torch.cuda.device(buffer.device), _notice(topology, "NVSHMEM's start"):
                _nvshmem.start(unique_id, topology.rank, topology.num_ranks)
        except RuntimeError as error:
            failure = str(error)
        raise_together(buffer.gather(failure))
        self._ranks = ranks

    def take(self, buffer: Buffer, num_bytes: int) -> tuple[int, int]:
        """A part of the heap: its number, the same on all ranks, and its address here.

        Raises:
            RuntimeError: a rank has no room; on all ranks.
        """
        self.trim(buffer, keep=num_bytes)
        free = sorted(self._given_back)
        common = set.intersection(*map(set, buffer.gather(free)))
        if fitting := [number for number in sorted(common) if self._sizes[number] == num_bytes]:
            self._complete_puts(buffer)
            return fitting[0], self._given_back.pop(fitting[0])
        address, failure = 0, None
        try:
            what = f"{num_bytes} bytes of NVSHMEM's heap"
            with torch.cuda.device(buffer.device), _notice(buffer.topology, what):
                address = _nvshmem.allocate(num_bytes)
        except RuntimeError as error:
            failure = str(error)
        failures = buffer.gather(failure)
        number = len(self._sizes)
        self._sizes.append(num_bytes)
        try:
            raise_together(failures)
        except RuntimeError:
            if failure is None:  # a peer has none, so nobody uses it
                self.give_back(number, address)
            raise
        return number, address

    def give_back(self, number: int, address: int) -> None:
        """Not needed any more, here."""
        self._given_back[number] = address

    def trim(self, buffer: Buffer, keep: int = -1) -> None:
        """Free what no rank needs any more, but parts of ``keep`` bytes; collective."""
        common = set.intersection(*map(set, buffer.gather(sorted(self._given_back))))
        unwanted = [number for number in sorted(common) if self._sizes[number] != keep]
        if unwanted:
            self._complete_puts(buffer)
        for number in unwanted:
            _nvshmem.free(self._given_back.pop(number))

    def _complete_puts(self, buffer: Buffer) -> None:
        """No put of an earlier Buffer is under way any more, from any rank; collective.

        A Buffer ends when all its ranks have what they waited for. The last credits may come later,
        and would land in the flags of the next Buffer.
        """
        failure = None
        try:
            with torch.cuda.device(buffer.device), _notice(buffer.topology, "its last puts"):
                _nvshmem.complete_puts()
        except RuntimeError as error:
            failure = str(error)
        raise_together(buffer.gather(failure))


_heap = Heap()


class NvshmemBackend(kernels.KernelBackend):
    """See the module; the methods are those of ``Backend``.

    Raises:
        ValueError: the Config gives a kernel fewer SMs than ``LEAST_SMS``.
        RuntimeError: NVSHMEM did not start, or the memory of a rank could not be allocated or
            mapped; on all ranks.
    """

    name = "nvshmem"

    def __init__(self, buffer: Buffer) -> None:
        self._remember(buffer)
        self._buffer = weakref.proxy(buffer)  # which owns the backend
        self._topology = buffer.topology
        _refuse_too_few_sms(buffer.config)
        num_sms = min(buffer.gather(kernels.num_sms(buffer.device)))
        sizes = runtime_config(buffer, num_sms)
        _heap.start(buffer, sizes.symmetric_bytes)
        failure = None
        try:
            self._runtime = _nvshmem.Runtime(sizes)
            self._ends_with(self._runtime.destroy)
        except (RuntimeError, ValueError) as error:  # too large for it
            failure = str(error)
        self._raise_together(buffer.gather(failure))
        number, address = _heap.take(buffer, self._runtime.symmetric_bytes)
        self._end.detach()
        self._ends_with(functools.partial(_give_back, self._runtime, number, address))
        try:
            self._runtime.attach(self._map_node(address))
        except RuntimeError as error:
            failure = str(error)
        self._raise_together(buffer.gather(failure))
        self.layout_size = self._runtime.handle_words

    def _map_node(self, mine: int) -> list[int]:
        """Addresses of the parts of my node's ranks."""
        first = self._topology.node * self._topology.ranks_per_node
        peers = []
        for rank in range(first, first + self._topology.ranks_per_node):
            address = _nvshmem.mapped(mine, rank)
            if address == 0:
                raise RuntimeError(
                    f"the memory of rank {rank} cannot be mapped, so it is of another node: "
                    f"ranks_per_node={self._topology.ranks_per_node} is too large"
                )
            peers.append(address)
        return peers

    def describe(self) -> str:
        megabytes = self._runtime.symmetric_bytes / 1e6
        return (
            f"nvshmem: CUDA kernels, {megabytes:.1f} MB of NVSHMEM's symmetric heap, "
            f"NVSHMEM {_nvshmem.loaded_version()}"
        )

    def reclaim(self) -> None:
        _heap.trim(self._buffer)


def _give_back(runtime: Any, number: int, address: int) -> None:
    """Once for each part of the heap; after a fault, puts for it may still be under way."""
    faulted = runtime.fault() is not None
    runtime.destroy()
    if not faulted:
        _heap.give_back(number, address)


def runtime_config(buffer: Buffer, num_sms: int) -> Any:
    """The sizes of the buffer's memory and kernels, as the extension takes them."""
    settings = kernels.runtime_settings(buffer, num_sms)
    return _nvshmem.RuntimeConfig(**settings, uses_mapped=USES_MAPPED)


@contextlib.contextmanager
def _notice(topology: Topology, what: str) -> Iterator[None]:
    """Log a warning if a collective call of NVSHMEM, which has no deadline, takes long."""
    warning = threading.Timer(
        NOTICE_S,
        _log.warning,
        (
            "rank %d of %d has waited %g s for %s, which takes all ranks; NVSHMEM_DEBUG=INFO shows "
            "what NVSHMEM does",
            topology.rank,
            topology.num_ranks,
            NOTICE_S,
            what,
        ),
    )
    warning.daemon = True
    warning.start()
    try:
        yield
    finally:
        warning.cancel()


def _refuse_too_few_sms(config: Config) -> None:
    """A Config says at most how many SMs a kernel gets, so none is given more in silence."""
    for name, least in LEAST_SMS.items():
        if getattr(config, name) < least:
            raise ValueError(
                f"Config.{name} must be at least {least} with the nvshmem backend, one for each "
                f"role of its blocks, got {getattr(config, name)}"
            )


def _refuse_uneven_sharing(buffer: Buffer) -> None:
    """NVSHMEM never ends its start where some ranks share a GPU and others do not.

    Raises:
        RuntimeError: the GPUs in use have different numbers of ranks, one of them more than one; on
            all ranks.
    """
    gpus = buffer.gather((gpu_uuid(buffer.device), socket.gethostname()))
    ranks_of: dict[str, list[int]] = {}
    for rank, (uuid, _) in enumerate(gpus):
        ranks_of.setdefault(uuid, []).append(rank)
    most, fewest = (pick(ranks_of.values(), key=len) for pick in (max, min))
    if len(most) == len(fewest):
        return
    shares = [
        f"{len(ranks)} on GPU {gpus[ranks[0]][0]} of {gpus[ranks[0]][1]} (ranks {ranks})"
        for ranks in (most, fewest)
    ]
    raise RuntimeError(
        "NVSHMEM needs the same number of ranks on each GPU in use, got "
        f"{' and '.join(shares)}; start one rank per GPU, or equally many on each"
    )


def _world_ranks(buffer: Buffer) -> list[int]:
    if buffer.topology.num_ranks == 1:
        return [dist.get_rank() if dist.is_available() and dist.is_initialized() else 0]
    return dist.get_process_group_ranks(buffer.group)


def _set_environment(buffer: Buffer, heap_bytes: int) -> None:
    """Tell NVSHMEM what the user has not told it, before it starts."""
    if os.environ.get(MULTI_PORT, "0") not in ("", "0"):
        raise RuntimeError(
            f"{MULTI_PORT} must be 0 or unset, got {os.environ[MULTI_PORT]!r}: signals add "
            "to flags, and atomic operations of several ports do not see each other"
        )
    config = buffer.config
    window = network_window(config, num_nodes=buffer.topology.num_nodes)
    given = {**nccl_files(os.environ), **os.environ}
    os.environ.update(
        network_environment(
            given,
            channels=config.network_channels,
            queue_depth=window.queue_depth,
            heap_bytes=round_up(heap_bytes, 2**21) + HEAP_MARGIN,
            ports=read_ports(),
        )
    )
