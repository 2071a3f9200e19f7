"""The ranks of a group: gathers, agreement, and steps that fail on all ranks if they fail on one.

A rank that raises an exception between two gathers would leave its peers in the next gather until
the timeout of the group. Inside ``Group.together`` it announces the exception in that gather:

    rank 0   gather ...................................... gather: raises "rank 1: no memory"
    rank 1   gather   MemoryError("no memory")   announces it here, then raises its MemoryError
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybrid_ep.errors import SetupError

# what a peer raises for an exception of a rank: of the first of these types that it is of
_TYPES = (ValueError, TypeError, OSError, MemoryError, RuntimeError, Exception)
_OF_A_PEER = "_hybrid_ep_of_a_peer"  # attribute of an exception


def is_of_a_peer(error: BaseException) -> bool:
    """Whether the exception repeats one that a peer raised."""
    return getattr(error, _OF_A_PEER, False)


@dataclass(frozen=True)
class Topology:
    """Where a rank is: nodes are of equal size, and follow each other.

    Attributes:
        rank: this process.
        num_ranks: size of the group.
        ranks_per_node: ranks that reach each other's memory by load and store.
    """

    rank: int
    num_ranks: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the group."""
        return self.num_ranks // self.ranks_per_node

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """The place of this rank within its node."""
        return self.rank % self.ranks_per_node


class _Failure(NamedTuple):
    """An exception, on its way to the peers of the rank that raised it."""

    type_index: int  # in _TYPES
    text: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        type_index = next(i for i, kind in enumerate(_TYPES) if isinstance(error, kind))
        text = str(error)
        if not text or _TYPES[type_index] in (MemoryError, Exception):
            text = f"{type(error).__name__}: {text}".removesuffix(": ")
        return cls(type_index, text)


class Group:
    """The ranks of a ``torch.distributed`` group, as one of them sees them.

    Args:
        process_group: the group, None for the default one; without ``torch.distributed``
            initialised, a world of one rank.

    Attributes:
        process_group: the group meant; not used by a single rank.
        rank: of this process in the group.
        num_ranks: size of the group.
        device: of this rank, once it is known. NCCL gathers objects through the current GPU, so
            that becomes this one.
        hosts: of all ranks, once they have met.

    Raises:
        ValueError: this process is not a member of the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.num_ranks = 0, 1
        if dist.is_available() and dist.is_initialized():
            if process_group is None:
                process_group = dist.group.WORLD
            self.rank = dist.get_rank(process_group)
            self.num_ranks = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the group")
        self.process_group = process_group
        self.device = torch.device("cpu")
        self.hosts: list[str] = []
        self._depth = 0  # of steps in steps
        # that all ranks know of; only within a step, since one may be raised again in another
        self._known: list[Exception] = []

    def gather(self, value: Any) -> list[Any]:
        """One Python object from each rank, in rank order; collective.

        Raises:
            Exception: a peer announced an exception; the text names the peer and repeats its text.
        """
        if self.num_ranks == 1:
            return [value]
        everybody = self._exchange((value, None))
        for rank, (_, failure) in enumerate(everybody):
            if failure is not None:
                error = _TYPES[failure.type_index](f"rank {rank}: {failure.text}")
                setattr(error, _OF_A_PEER, True)
                self._known.append(error)
                try:
                    raise error
                finally:
                    del error  # with its traceback it would keep the callers' frames alive
        return [value for value, _ in everybody]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A step that all ranks take; collective. It may gather, and it ends with a gather.

        All ranks must gather equally often in it, but for a rank that raises an exception. Steps
        may be nested. A step of a single rank costs nothing.

        Raises:
            Exception: what the step raised on this rank; else, if it raised on a peer, an
                exception of the same kind that names the peer (as ``gather`` raises it).
        """
        if self._depth == 0:
            self._known.clear()
        self._depth += 1
        try:
            yield
        except Exception as error:
            if self.num_ranks > 1 and not any(error is known for known in self._known):
                self._known.append(error)
                self._exchange((None, _Failure.of(error)))
            raise
        else:
            self.gather(None)
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._known.clear()

    @contextlib.contextmanager
    def alike(
        self, kinds: type[Exception] | tuple[type[Exception], ...] = RuntimeError
    ) -> Iterator[None]:
        """A step without a gather of its own, which ends in the same way on all ranks; collective.

        Args:
            kinds: of exceptions that this is about.

        Raises:
            SetupError: the step raised an exception on some rank; the text, equal on all ranks,
                names the first of these and repeats its text.
        """
        failure = None
        try:
            yield
        except kinds as error:
            failure = str(error)
        for rank, theirs in enumerate(self.gather(failure)):
            if theirs is not None:
                raise SetupError(f"rank {rank}: {theirs}")

    def agree_on(self, settings: dict[str, Any]) -> None:
        """Raise ValueError, on all ranks, for the first setting that is not equal on all."""
        everybody = self.gather(settings)
        for name in settings:
            values = [theirs.get(name) for theirs in everybody]
            if any(value != values[0] for value in values):
                by_rank = ", ".join(f"rank {r}: {value}" for r, value in enumerate(values))
                raise ValueError(f"{name} must be equal on all ranks, got {by_rank}")

    def meet(self, mine: Any) -> list[Any]:
        """Learn the hosts of all ranks, and with them ``mine`` of each rank; collective."""
        everybody = self.gather((host_name(), mine))
        self.hosts = [host for host, _ in everybody]
        return [theirs for _, theirs in everybody]

    def shares_gpus(self) -> bool:
        """Whether some ranks have the same GPU; collective."""
        if self.device.type != "cuda":
            return False
        gpus = self.gather(gpu_uuid(self.device))
        return len(set(gpus)) < len(gpus)

    def _exchange(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        on_gpu = self.device.type == "cuda" and torch.cuda.is_available()
        try:
            with torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
                dist.all_gather_object(values, value, group=self.process_group)
        except Exception as error:  # the group itself failed: another exchange would only wait
            self._known.append(error)
            raise
        return values


def host_name() -> str:
    """Names this host: ranks with the same name can map each other's memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


def find_device(device: torch.device | str | None) -> torch.device:
    """The device that a user means, with its index; ValueError where torch finds none."""
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


def gpu_uuid(device: torch.device) -> str:
    """Names a GPU, whatever index a process has it under."""
    return str(torch.cuda.get_device_properties(device).uuid)


def ranks_of_a_host(hosts: Sequence[str]) -> int:
    """The ranks of a node, by the hosts of all ranks.

    Hosts are nodes where each has as many ranks as any other and they follow each other, as
    launchers number them; otherwise there is one node.
    """
    ranks = len(hosts) // len(set(hosts))
    runs = [set(hosts[begin : begin + ranks]) for begin in range(0, len(hosts), ranks)]
    follow = all(len(run) == 1 for run in runs) and len(runs) == len(set(hosts))
    return ranks if follow else len(hosts)
