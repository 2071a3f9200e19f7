"""The nvshmem backend's memory: CUDA kernels between the GPUs of several nodes.

    route      publish_routing, assign_rows, keep_routing   through the rail peers; the handle
    dispatch   dispatch                                     once to each node, then as on one node
    combine    combine                                      added in each node, then at home

The symmetric memory is NVSHMEM's. A process takes part in one NVSHMEM job, whose ranks are those of
its first Buffer: later Buffers are for the same ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep.backends.cuda import build, maps
from hybrid_ep.backends.cuda.fabric import nccl_files, network_environment, read_ports
from hybrid_ep.backends.cuda.nvshmem_library import load_host_library
from hybrid_ep.config import Config
from hybrid_ep.group import Group, gpu_uuid
from hybrid_ep.integers import round_up
from hybrid_ep.layout.network_window import network_window
from hybrid_ep.shape import Shape

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

        build.refuse_other_build(extension)
    except ImportError as error:
        raise ImportError(
            f"the extension hybrid_ep._nvshmem cannot be imported: {error}"
            f"{build.why_left_out('hybrid_ep._nvshmem')}"
        ) from error
    built, loaded = extension.built_version(), extension.loaded_version()
    if built.split(".")[:2] != loaded.split(".")[:2]:
        raise ImportError(
            f"hybrid_ep was built with NVSHMEM {built}, this process has {loaded}: install that "
            "version or build again"
        )
    _nvshmem = extension
    return extension


class Heap:
    """The symmetric heap of this process's NVSHMEM job, shared by its Buffers.

    Allocating and freeing is collective, and a Buffer is destroyed without waiting for its peers:
    so a part that a Buffer gave back is kept until a later Buffer finds that all ranks have.
    """

    def __init__(self) -> None:
        self._ranks: list[int] | None = None
        self._sizes: list[int] = []  # of every allocation that was ever made
        self._given_back: dict[int, int] = {}  # number of an allocation -> its address

    def start(self, shape: Shape, group: Group, config: Config, heap_bytes: int) -> None:
        """Join the job, or make sure that it is the group's; collective.

        Raises:
            RuntimeError: NVSHMEM did not start, or the job has other ranks; on all ranks.
        """
        ranks = _world_ranks(group)
        states = group.gather(self._ranks)
        if any(state is not None for state in states):
            if any(state != ranks for state in states):
                raise RuntimeError(
                    f"a process takes part in one NVSHMEM job, that of its first Buffer: the ranks "
                    f"were {self._ranks}, this Buffer has {ranks}"
                )
            return
        _refuse_uneven_sharing(group)
        # All that can fail on one rank alone comes before the last gather: NVSHMEM's start has no
        # deadline, so a missing rank would leave its peers there for ever.
        unique_id = None
        with group.alike():
            _set_environment(shape, config, heap_bytes)
            with torch.cuda.device(group.device):
                torch.cuda.synchronize()  # NVSHMEM starts on the device that has a context
                if group.rank == 0:
                    unique_id = _nvshmem.unique_id()
        unique_id = group.gather(unique_id)[0]
        with group.alike(), torch.cuda.device(group.device), _notice(group, "NVSHMEM's start"):
            _nvshmem.start(unique_id, group.rank, group.num_ranks)
        self._ranks = ranks

    def take(self, group: Group, num_bytes: int) -> tuple[int, int]:
        """A part of the heap: its number, the same on all ranks, and its address here; collective.

        Raises:
            RuntimeError: a rank has no room; on all ranks.
        """
        self.trim(group, keep=num_bytes)
        free = sorted(self._given_back)
        common = set.intersection(*map(set, group.gather(free)))
        if fitting := [number for number in sorted(common) if self._sizes[number] == num_bytes]:
            self._complete_puts(group)
            return fitting[0], self._given_back.pop(fitting[0])
        number, address = len(self._sizes), 0
        self._sizes.append(num_bytes)
        what = f"{num_bytes} bytes of NVSHMEM's heap"
        try:
            with group.alike(), torch.cuda.device(group.device), _notice(group, what):
                address = _nvshmem.allocate(num_bytes)
        except RuntimeError:
            if address:  # a peer has none, so nobody uses it
                self.give_back(number, address)
            raise
        return number, address

    def give_back(self, number: int, address: int) -> None:
        """Not needed any more, here."""
        self._given_back[number] = address

    def trim(self, group: Group, keep: int = -1) -> None:
        """Free what no rank needs any more, but parts of ``keep`` bytes; collective."""
        common = set.intersection(*map(set, group.gather(sorted(self._given_back))))
        unwanted = [number for number in sorted(common) if self._sizes[number] != keep]
        if unwanted:
            self._complete_puts(group)
        for number in unwanted:
            _nvshmem.free(self._given_back.pop(number))

    def _complete_puts(self, group: Group) -> None:
        """No put of an earlier Buffer is under way any more, from any rank; collective.

        A Buffer ends when all its ranks have what they waited for. The last credits may come later,
        and would land in the flags of the next Buffer.
        """
        with group.alike(), torch.cuda.device(group.device), _notice(group, "its last puts"):
            _nvshmem.complete_puts()


_heap = Heap()


class Memory:
    """The runtime of a Buffer, made by its ``settings``, and a part of NVSHMEM's heap; collective.

    Raises:
        ValueError: the Config gives a kernel fewer SMs than ``LEAST_SMS``.
        RuntimeError: NVSHMEM did not start, or the memory of a rank could not be allocated or
            mapped; on all ranks.
    """

    name = "nvshmem"
    least_sms = max(LEAST_SMS.values())  # of a call: its backward is one of the other kernel

    def __init__(
        self, shape: Shape, group: Group, config: Config, settings: dict[str, Any]
    ) -> None:
        refuse_too_few_sms(config)
        self._group = group
        sizes = runtime_config(settings)
        _heap.start(shape, group, config, sizes.symmetric_bytes)
        with contextlib.ExitStack() as in_vain:
            with group.alike((RuntimeError, ValueError)):  # it may be too large for it
                self.runtime = _nvshmem.Runtime(sizes)
                in_vain.callback(self.runtime.destroy)
                maps.load(group.device)  # of another extension: the runtime loads its own
            self._number, self._address = _heap.take(group, self.runtime.symmetric_bytes)
            in_vain.pop_all()
            in_vain.callback(self.give_back)
            with group.alike():
                self.runtime.attach(self._map_node(shape))
            in_vain.pop_all()

    def _map_node(self, shape: Shape) -> list[int]:
        """Addresses of the parts of my node's ranks."""
        first = self._group.rank // shape.ranks_per_node * shape.ranks_per_node
        peers = []
        for rank in range(first, first + shape.ranks_per_node):
            address = _nvshmem.mapped(self._address, rank)
            if address == 0:
                raise RuntimeError(
                    f"the memory of rank {rank} cannot be mapped, so it is of another node: "
                    f"ranks_per_node={shape.ranks_per_node} is too large"
                )
            peers.append(address)
        return peers

    def describe(self) -> str:
        """What the memory is."""
        return f"NVSHMEM's symmetric heap, NVSHMEM {_nvshmem.loaded_version()}"

    def give_back(self) -> None:
        """Not needed any more, here; after a fault, puts for it may still be under way."""
        faulted = self.runtime.fault() is not None
        self.runtime.destroy()
        if not faulted:
            _heap.give_back(self._number, self._address)

    def reclaim(self) -> None:
        """Free what no rank needs any more, once all ranks have given theirs back."""
        _heap.trim(self._group)


def runtime_config(settings: dict[str, Any]) -> Any:
    """The sizes of a Buffer's memory and kernels, as the extension takes them."""
    return _nvshmem.RuntimeConfig(**settings, uses_mapped=USES_MAPPED)


@contextlib.contextmanager
def _notice(group: Group, what: str) -> Iterator[None]:
    """Log a warning if a collective call of NVSHMEM, which has no deadline, takes long."""
    warning = threading.Timer(
        NOTICE_S,
        _log.warning,
        (
            "rank %d of %d has waited %g s for %s, which takes all ranks; NVSHMEM_DEBUG=INFO shows "
            "what NVSHMEM does",
            group.rank,
            group.num_ranks,
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


def refuse_too_few_sms(config: Config) -> None:
    """A Config says at most how many SMs a kernel gets, so none is given more in silence."""
    for name, least in LEAST_SMS.items():
        if getattr(config, name) < least:
            raise ValueError(
                f"Config.{name} must be at least {least} with the nvshmem backend, one for each "
                f"role of its blocks, got {getattr(config, name)}"
            )


def _refuse_uneven_sharing(group: Group) -> None:
    """NVSHMEM never ends its start where some ranks share a GPU and others do not.

    Raises:
        RuntimeError: the GPUs in use have different numbers of ranks, one of them more than one; on
            all ranks.
    """
    gpus = group.gather((gpu_uuid(group.device), socket.gethostname()))
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


def _world_ranks(group: Group) -> list[int]:
    if group.num_ranks == 1:
        return [dist.get_rank() if dist.is_available() and dist.is_initialized() else 0]
    return dist.get_process_group_ranks(group.process_group)


def _set_environment(shape: Shape, config: Config, heap_bytes: int) -> None:
    """Tell NVSHMEM what the user has not told it, before it starts."""
    if os.environ.get(MULTI_PORT, "0") not in ("", "0"):
        raise RuntimeError(
            f"{MULTI_PORT} must be 0 or unset, got {os.environ[MULTI_PORT]!r}: signals add "
            "to flags, and atomic operations of several ports do not see each other"
        )
    window = network_window(config, num_nodes=shape.num_nodes)
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
