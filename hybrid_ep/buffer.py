"""The Buffer: everything that dispatch and combine need and that outlives a call."""

from __future__ import annotations

import itertools
import json
import logging
import os
import weakref
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hybrid_ep import round_trip, rules
from hybrid_ep.backends import Backend
from hybrid_ep.backends.endings import refuse_in_capture
from hybrid_ep.backends.torch import TorchBackend
from hybrid_ep.backends.trace import chrome_trace
from hybrid_ep.config import Config
from hybrid_ep.errors import SetupError
from hybrid_ep.limits import as_integer, round_up
from hybrid_ep.ranks import Ranks
from hybrid_ep.topology import Topology, gpu_uuid, host_name, ranks_of_a_host
from hybrid_ep.torch_ops import prepare_order

_log = logging.getLogger("hybrid_ep")
_next_id = itertools.count()
_next_number = itertools.count()
_buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()

BACKENDS = ("auto", "torch", "nvlink", "nvshmem")
REASONS = {
    "nvlink": "all ranks reach each other's memory on one host",
    "nvshmem": "ranks of several nodes reach each other through NVSHMEM",
}
_LIVE, _RELEASED, _DESTROYED = "live", "released", "destroyed"


class Buffer:
    """The symmetric memory and the metadata of one expert-parallel group.

    Built once, by all ranks of the group together; sizes are fixed for its life. One Buffer serves
    any number of layers, micro-batches and handles; a process may hold several, on several groups.

    Args:
        group: the ``torch.distributed`` group, None for the default one; without
            ``torch.distributed`` initialised, a world of one rank.
        hidden: H, elements of a token.
        num_experts: E, over all ranks; rank r owns experts ``[r * E / R, (r + 1) * E / R)``.
        max_tokens: most tokens that a rank may dispatch in one call; T may differ between ranks.
        topk: K, columns of ``topk_idx``; at most ``num_experts``.
        dtype: the widest payload; together with ``scale_bytes`` it sizes the outbox.
        scale_bytes: bytes of scales per token that the outbox holds besides a row of ``dtype``; 0
            suffices where a narrower payload leaves the room (fp8 rows in a bf16 buffer).
        device: where the tensors live; default: the current CUDA device where there is one, else
            the CPU.
        backend: ``"torch"``, ``"nvlink"`` (one host), ``"nvshmem"`` (several nodes), or ``"auto"``:
            nvlink on one host, nvshmem on several, where every rank can, else torch.
        ranks_per_node: ranks that reach each other's memory, a divisor of their number; default:
            those of a host where all have as many and they follow each other, else all. Sums are
            rounded once more per node.
        config: tuning, equal on all ranks: a Config, or the path of a file that holds one, which
            every rank reads.

    Sizes may be of any integer type (numpy's too) and are kept as ints.

    A copy of a Buffer (``copy.copy``, ``copy.deepcopy``) is the Buffer itself, so a copied model
    shares it with the original. A Buffer cannot be pickled.

    An exception on one rank is one on all ranks, of the same kind: the others name that rank.

    Raises:
        TypeError: ``dtype`` is no torch.dtype on some rank.
        ValueError: an argument breaks a rule on some rank, ranks disagree on one, or this process
            is not a member of the group (then on this rank alone).
        OSError: some rank cannot read the file of the config.
        RuntimeError: the backend asked for cannot run here; the text says what is missing. Or data
            between two ranks are not what was sent: nvshmem tries every pair of ranks when the
            first Buffer of these ranks is made.
        PeerError: a rank did not answer then.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        hidden: int,
        num_experts: int,
        max_tokens: int,
        topk: int,
        dtype: torch.dtype = torch.bfloat16,
        scale_bytes: int = 0,
        device: torch.device | str | None = None,
        backend: str = "auto",
        ranks_per_node: int | None = None,
        config: Config | str | os.PathLike[str] | None = None,
    ) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        if group is None and distributed:
            group = dist.group.WORLD
        num_ranks = dist.get_world_size(group) if distributed else 1
        rank = dist.get_rank(group) if distributed else 0
        if rank < 0:
            raise ValueError("this process is not a member of the group")

        self.group = group
        self.last_call = 0  # what the calls before a release() were numbered up to
        self.topology = Topology(rank, num_ranks, num_ranks)  # until ranks_per_node is known
        self._ranks = Ranks(group, rank, num_ranks)
        with self._ranks.together():
            self.hidden = hidden = as_integer("hidden", hidden, 1)
            self.num_experts = num_experts = as_integer("num_experts", num_experts, 1)
            self.max_tokens = max_tokens = as_integer("max_tokens", max_tokens, 1)
            self.topk = topk = as_integer("topk", topk, 1)
            self.scale_bytes = scale_bytes = as_integer("scale_bytes", scale_bytes, 0)
            if ranks_per_node is not None:
                ranks_per_node = as_integer("ranks_per_node", ranks_per_node, 1)
            _check_arguments(num_experts, topk, num_ranks, dtype, backend)
            self.config = _read_config(config)
            self.device = self._ranks.device = _find_device(device)
            refuse_in_capture("made")
            self.dtype = dtype
            self.num_local_experts = num_experts // num_ranks
            self.row_capacity = round_up(hidden * dtype.itemsize, 16) + round_up(scale_bytes, 16)

            everybody = self.gather((host_name(), next(_next_number)))
            self._hosts = [host for host, _ in everybody]
            self.number = everybody[0][1]  # rank 0's: ranks may be in Buffers of other groups
            if ranks_per_node is None:
                ranks_per_node = ranks_of_a_host(self._hosts)
            self.topology = Topology(rank, num_ranks, ranks_per_node)
            settings = {
                "hidden": hidden,
                "num_experts": num_experts,
                "max_tokens": max_tokens,
                "topk": topk,
                "dtype": str(dtype),
                "scale_bytes": scale_bytes,
                "device type": self.device.type,
                "backend": backend,
                "ranks_per_node": self.topology.ranks_per_node,
                "config": repr(self.config),
            }
            self._agree_on(settings)
            self._state = _LIVE
            self._backend, self.backend_reason = self._make_backend(backend)
            self.two_way_dtypes = rules.two_way_dtypes(self)
            prepare_order(self.device)
        self.id = next(_next_id)
        _buffers[self.id] = self
        try:
            with self._ranks.together():
                _log.info("%s", self.describe())
                if self.backend == "nvshmem":
                    round_trip.verify_once(self, self._hosts)
        except BaseException:
            self.destroy()
            raise

    # ---- what a user asks a Buffer

    @property
    def backend(self) -> str:
        """Name of the backend that was picked, the same on all ranks."""
        return self._backend.name

    @property
    def layout_size(self) -> int:
        """Int32 words of a handle's layout."""
        return self._backend.layout_size

    @property
    def inbox_row_bytes(self) -> int:
        """Bytes of a summed row on its way home: of ``dtype``, and at least two a value."""
        return round_up(self.hidden * max(2, self.dtype.itemsize), 16)

    def describe(self) -> str:
        """What was picked and why, in a few lines for people."""
        t = self.topology
        return (
            f"hybrid_ep.Buffer: rank {t.rank} of {t.num_ranks}, {t.num_nodes} node(s) of "
            f"{t.ranks_per_node}, {self.device}\n"
            f"  {self.num_experts} experts ({self.num_local_experts} a rank), top-{self.topk}, "
            f"hidden {self.hidden}, at most {self.max_tokens} tokens of {self.dtype}\n"
            f"  {self._backend.describe()}{', released' if self._state == _RELEASED else ''}\n"
            f"  because {self.backend_reason}"
        )

    def check(self) -> None:
        """Raise the error that an earlier call left behind, if one did; waits for nothing.

        With ``max_rows`` the host never waits for the GPU, so a peer that died is found by the next
        call on the buffer; this is how to ask at any other time (after a synchronisation, say).

        Raises:
            PeerError: a call waited for a peer in vain.
        """
        self.verbs.check()

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what the kernels did since the last time as a Chrome trace.

        Collective; waits for the GPU. Rank 0 writes the file, in which each rank is a process and
        each CUDA block a few threads: open it in chrome://tracing or Perfetto. A rank keeps
        131,072 events at most, the first ones.

        Args:
            path: the file, JSON; it is overwritten.

        Raises:
            RuntimeError: the Buffer was made without ``Config(trace=True)``, or its backend is
                not nvlink.
            OSError: rank 0 cannot write the file; on all ranks.
        """
        if not self.config.trace:
            raise RuntimeError("a trace needs a Buffer with Config(trace=True)")
        if self.backend == "torch":
            raise RuntimeError(
                "the torch backend has no kernels to trace, only nvlink and nvshmem have"
            )
        with self._ranks.together():  # afterwards the file exists for every rank
            refuse_in_capture("asked for a trace")
            events = self.gather(self.verbs.take_trace())
            if self.topology.rank == 0:
                Path(path).write_text(json.dumps(chrome_trace(events)))

    def release(self) -> None:
        """Give the memory back until ``restore``, so that the GPU can serve something else.

        Collective. When it returns, every rank has freed its part; calls raise RuntimeError until
        ``restore``. Handles stay valid: they own their metadata. Does nothing on a Buffer that is
        released already. A CUDA graph that was captured before holds addresses of the memory that
        is gone: capture it again after ``restore``, and never replay the old one.

        Raises:
            RuntimeError: the buffer was destroyed, or an earlier call on some rank failed (then on
                all of them: destroy it).
        """
        with self._ranks.together():  # afterwards no rank holds any memory
            refuse_in_capture("released")
            self._refuse_if_destroyed()
            if self._state == _RELEASED:
                return
            self._raise_failures()
            self._state = _RELEASED
            # in the layouts of handles, which stay valid: no number may come twice
            self.last_call = self._backend.last_call
            self._backend.destroy()
            self.gather(None)  # now no rank maps a peer's memory
            self._backend.reclaim()

    def restore(self) -> None:
        """Take the memory again after ``release``: the same backend, sizes and id as before.

        Collective. Does nothing on a Buffer that is not released.

        Raises:
            RuntimeError: the buffer was destroyed, or a rank has no memory for it; then it stays
                released on all ranks, and may be restored later.
        """
        with self._ranks.together():
            refuse_in_capture("restored")
            self._refuse_if_destroyed()
            if self._state == _LIVE:
                return
            self._backend = self._build_backend(self.backend)
        self._state = _LIVE

    def destroy(self) -> None:
        """Give the memory back. Idempotent, waits for no peer, safe after a PeerError.

        While a CUDA graph is captured nothing may wait for the GPU, so the memory is kept until a
        Buffer is called, made or ended after the capture. The same holds for a Buffer that is
        dropped.

        Peers that still read this rank's outbox are not harmed: the memory is kept aside until
        every peer has destroyed its Buffer as well.
        """
        self._backend.destroy()
        self._state = _DESTROYED

    # A copied model (an average of weights, a frozen teacher) must go on calling with the peers of
    # this Buffer. A second one could only be made by all ranks together.

    def __copy__(self) -> Buffer:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffer:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a hybrid_ep.Buffer must not be pickled: it holds memory and the process group of this "
            "process. Save model.state_dict() in place of the model, and make the Buffer and the "
            "model in the process that loads it; in a child process, make a Buffer of its own"
        )

    @property
    def verbs(self) -> Backend:
        """The backend, for the ops.

        Raises:
            RuntimeError: the buffer was destroyed or is released.
        """
        if self._state != _LIVE:
            self._refuse_if_destroyed()
            raise RuntimeError(
                "this hybrid_ep.Buffer was released: restore() brings it back, on all ranks"
            )
        return self._backend

    def _raise_failures(self) -> None:
        """Raise what an earlier call left behind on any rank."""
        failure = None
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # so that every failure is known
            self._backend.check()
        except (RuntimeError, ValueError) as error:
            failure = error
        for rank, theirs in enumerate(self.gather(failure and str(failure))):
            if theirs is not None:
                raise failure or RuntimeError(f"a call on rank {rank} failed: {theirs}")

    def _refuse_if_destroyed(self) -> None:
        if self._state == _DESTROYED:
            raise RuntimeError("this hybrid_ep.Buffer was destroyed")

    # ---- construction

    def _agree_on(self, settings: dict[str, Any]) -> None:
        everybody = self.gather(settings)
        for name in settings:
            values = [theirs.get(name) for theirs in everybody]
            if any(value != values[0] for value in values):
                by_rank = ", ".join(f"rank {r}: {value}" for r, value in enumerate(values))
                raise ValueError(f"{name} must be equal on all ranks, got {by_rank}")

    def _make_backend(self, backend: str) -> tuple[Backend, str]:
        """A backend, and why this one: the same on all ranks."""
        if backend == "torch":
            return self._build_backend("torch"), "backend='torch' was asked for"
        if backend == "auto":
            backend = "nvlink" if len(set(self._hosts)) == 1 else "nvshmem"
            may_fall_back = True
        else:
            may_fall_back = False
        why_not = self._why_not(backend)
        if why_not is None:
            try:
                return self._build_backend(backend), REASONS[backend]
            except (RuntimeError, MemoryError) as error:  # on all ranks
                why_not = str(error)
        why_not = f"the {backend} backend cannot run: {why_not}"
        if not may_fall_back:
            raise SetupError(why_not)
        if self.topology.rank == 0 and self.device.type == "cuda":
            _log.warning("using the torch backend, which is slow: %s", why_not)
        return self._build_backend("torch"), why_not

    def _why_not(self, backend: str) -> str | None:
        """The first rank that cannot run the backend and why, on all ranks alike."""
        from hybrid_ep.backends import nvlink, nvshmem

        module = nvlink if backend == "nvlink" else nvshmem
        try:
            reason = module.unavailable_reason(self)
        except (RuntimeError, AssertionError) as error:  # torch cannot use the device
            reason = str(error)
        reasons = self.gather(reason)
        for rank, (reason, host) in enumerate(zip(reasons, self._hosts, strict=True)):
            if reason is None and backend == "nvlink" and host != self._hosts[0]:
                reason = "it is on another host than rank 0"
            if reason is not None:
                return f"rank {rank}: {reason}"
        return None

    def _build_backend(self, backend: str) -> Backend:
        """The backend on all ranks, or on none."""
        built = None
        try:
            with self._ranks.together():
                built = self._new_backend(backend)
        except BaseException:
            if built is not None:  # a peer failed
                built.destroy()
            raise
        return built

    def _new_backend(self, backend: str) -> Backend:
        if backend == "torch":
            return TorchBackend(
                self.group,
                self.topology,
                num_experts=self.num_experts,
                max_tokens=self.max_tokens,
                topk=self.topk,
                device=self.device,
                timeout_s=self.config.timeout_s,
                number=self.number,
                shares_gpus=self._shares_gpus(),
                last_call=self.last_call,
            )
        from hybrid_ep.backends import nvlink, nvshmem

        return nvlink.NvlinkBackend(self) if backend == "nvlink" else nvshmem.NvshmemBackend(self)

    def _shares_gpus(self) -> bool:
        """Whether some ranks have the same GPU; collective."""
        if self.device.type != "cuda":
            return False
        gpus = self.gather(gpu_uuid(self.device))
        return len(set(gpus)) < len(gpus)

    def gather(self, value: Any) -> list[Any]:
        """One Python object from each rank; see ``Ranks``."""
        return self._ranks.gather(value)


def find_buffer(buffer_id: int) -> Buffer:
    """The Buffer behind an op's ``buffer_id``."""
    buffer = _buffers.get(int(buffer_id))  # a SymInt where shapes are dynamic
    if buffer is None:
        raise RuntimeError(f"hybrid_ep.Buffer {buffer_id} no longer exists")
    return buffer


def _check_arguments(
    num_experts: int, topk: int, num_ranks: int, dtype: torch.dtype, backend: str
) -> None:
    """Raise ValueError or TypeError for an argument that breaks a rule on this rank alone."""
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be divisible by the number of ranks, got num_experts="
            f"{num_experts} with {num_ranks} ranks"
        )
    if topk > num_experts:
        raise ValueError(f"topk must be at most num_experts={num_experts}, got {topk}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype like torch.bfloat16, got {dtype!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


def _read_config(config: Config | str | os.PathLike[str] | None) -> Config:
    if config is None or isinstance(config, Config):
        return config or Config()
    if not isinstance(config, (str, os.PathLike)):
        raise ValueError(f"config must be a Config or the path of its file, got {config!r}")
    return Config.load(config)


def _find_device(device: torch.device | str | None) -> torch.device:
    """The device meant, with its index.

    Raises:
        ValueError: torch finds no such device.
    """
    has_gpu = torch.cuda.is_available()
    if device is None:
        device = "cuda" if has_gpu else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a torch.device or its name: {error}") from error
    if found.type != "cuda":
        return found
    if found.index is None:
        if not has_gpu:
            raise ValueError(f"device must be one that torch can use, got {device}: no CUDA device")
        return torch.device("cuda", torch.cuda.current_device())
    if has_gpu and found.index >= torch.cuda.device_count():
        raise ValueError(
            f"device must be one of the {torch.cuda.device_count()} CUDA devices here, got {device}"
        )
    return found
