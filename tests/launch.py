"""Rank processes that stay alive between tests, and what they answer.

A server process imports torch once and forks the ranks, so that fresh ranks cost milliseconds: a
test that breaks its group or kills a rank takes fresh ones, the others share a pool a world size.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

import hybrid_ep
from tests.targets import Target

DEADLINE_S = 120.0
NETWORK = (
    "HYBRID_EP_TEST_NETWORK"  # takes all tests of several nodes to one of tests/ranks/networks.py
)
KEPT_BYTES = 1 << 27
PATIENCE = hybrid_ep.Config(timeout_s=40)  # a hang shows before the deadline


@dataclass(frozen=True)
class Rank:
    """What a function on a rank gets first."""

    rank: int
    num_ranks: int
    device: torch.device
    target: Target

    @property
    def backend(self) -> str:
        return self.target.backend

    def buffer(self, group: Any = None, **arguments: Any) -> hybrid_ep.Buffer:
        """A Buffer of the target, on its nodes where ``ranks_per_node`` is None or left out."""
        defaults = {"device": self.device, "backend": self.backend, "config": PATIENCE}
        arguments = {**defaults, **arguments}
        if arguments.get("ranks_per_node") is None:
            num_ranks = self.num_ranks if group is None else dist.get_world_size(group)
            arguments["ranks_per_node"] = self.target.ranks_per_node(num_ranks)
        return hybrid_ep.Buffer(group, **arguments)


@dataclass(frozen=True)
class Outcome:
    """How a function ended on a rank: one of the three is set, or none where it returned None."""

    value: Any = None
    error: str | None = None  # the traceback
    exit_code: int | None = None


class RankFailed(AssertionError):
    """A rank raised or died; the text holds its traceback."""


class Pool:
    """Ranks that run one function after another, with the target's group between them."""

    def __init__(self, num_ranks: int, target: Target) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "hybrid_ep", "tests.launch"])
        self._rendezvous = tempfile.TemporaryDirectory()
        store = Path(self._rendezvous.name, "store")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, num_ranks, target, str(store)), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)
        self.num_ranks, self.target = num_ranks, target
        self.usable = True

    def run(self, function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> list:
        """``function(rank, *args)`` on every rank; what they return, in rank order.

        The function must be importable. Tensors come back on the CPU.

        Raises:
            RankFailed: the first rank that raised, died or did not answer in time.
        """
        outcomes = self.outcomes(function, *args, deadline_s=deadline_s)
        failed = [(r, o) for r, o in enumerate(outcomes) if o.error or o.exit_code is not None]
        # others often fail because one did: what waited for a peer tells less
        failed.sort(key=lambda failure: "PeerError" in (failure[1].error or ""))
        reasons = {r: o.error or f"died with exit code {o.exit_code}" for r, o in failed}
        if reasons:
            (rank, reason), *others = reasons.items()
            also = [f"\nrank {r}: {text.strip().splitlines()[-1]}" for r, text in others]
            raise RankFailed(f"rank {rank} of {self.num_ranks}: {reason}{''.join(also)}")
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S
    ) -> list[Outcome]:
        """How the function ended on each rank; after a failure the pool is not usable again."""
        self.usable, usable = False, self.usable  # an interrupt leaves it so
        request = _pack((function, args))
        for connection in self._connections:
            connection.send_bytes(request)
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + deadline_s
        while len(outcomes) < self.num_ranks:
            waiting = {c: r for r, c in enumerate(self._connections) if r not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            for connection in ready:
                outcomes[waiting[connection]] = self._receive(waiting[connection])
            if not ready:
                late = Outcome(error=f"no answer within {deadline_s:g} s")
                outcomes.update(dict.fromkeys(waiting.values(), late))
                self.kill()
        ended = [outcomes[rank] for rank in range(self.num_ranks)]
        self.usable = usable and all(o.error is None and o.exit_code is None for o in ended)
        return ended

    def _receive(self, rank: int) -> Outcome:
        try:
            return _unpack(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join(timeout=10)
            return Outcome(exit_code=self._processes[rank].exitcode)

    def close(self, timeout_s: float = 60.0) -> list[int | None]:
        """End the ranks as a program ends; their exit codes, None for one that had to be killed."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        self.kill()
        return codes

    def kill(self) -> None:
        self.usable = False
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join()
        self._rendezvous.cleanup()


class Pools:
    """Pools by target and number of ranks; those used last stay, up to a number of ranks.

    A rank with a CUDA context holds almost 1 GB of its GPU, and takes seconds to start.
    """

    def __init__(self, most_ranks: int = 12) -> None:
        self._most_ranks = most_ranks
        self._alive: dict[tuple[Target, int], Pool] = {}  # the last used one is the last

    def of(self, target: Target, num_ranks: int) -> Pool:
        """A pool of these ranks that is usable."""
        key = target, num_ranks
        pool = self._alive.pop(key, None)
        if pool is not None and not pool.usable:
            pool.kill()
            pool = None
        if pool is None:
            while self._alive and self._num_ranks() + num_ranks > self._most_ranks:
                self._alive.pop(next(iter(self._alive))).close()
            pool = Pool(num_ranks, target)
        self._alive[key] = pool
        return pool

    def _num_ranks(self) -> int:
        return sum(num_ranks for _, num_ranks in self._alive)

    def close(self) -> None:
        while self._alive:
            self._alive.popitem()[1].close()


def _serve(connection: Connection, rank: int, num_ranks: int, target: Target, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if target.nodes == "several" and (network := os.environ.get(NETWORK)):
        from tests.ranks.networks import NETWORKS

        always = NETWORKS[network]()  # as long as this rank lives
        always.__enter__()
    torch.set_num_threads(1)
    device = target.rank_device(rank, num_ranks)
    if device.type == "cuda":
        _sleep_in_waits(device)
        torch.cuda.set_device(device)
    dist.init_process_group(
        target.group if device.type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    me = Rank(rank, num_ranks, device, target)
    while True:
        try:
            function, args = _unpack(connection.recv_bytes())
        except EOFError:
            break
        try:
            outcome = Outcome(value=to_cpu(function(me, *args)))
        except Exception:
            outcome = Outcome(error=traceback.format_exc())
        connection.send_bytes(_pack(outcome))
        give_memory_back(device)
    dist.destroy_process_group()


def give_memory_back(device: torch.device) -> None:
    """Return what torch's allocator keeps of a large test: many ranks share the GPU."""
    if device.type == "cuda" and torch.cuda.memory_reserved(device) > KEPT_BYTES:
        torch.cuda.empty_cache()


def _sleep_in_waits(device: torch.device) -> None:
    """Waits for the GPU sleep instead of polling: many ranks share the cores and the GPU."""
    blocking_sync = 0x04  # CU_CTX_SCHED_BLOCKING_SYNC
    driver = ctypes.CDLL("libcuda.so.1")
    for call in (
        lambda: driver.cuInit(0),
        lambda: driver.cuDevicePrimaryCtxSetFlags_v2(device.index, blocking_sync),
    ):
        error = call()
        if error:
            raise RuntimeError(f"the CUDA driver must accept blocking waits, got error {error}")


def to_cpu(values: Any) -> Any:
    """The same nest of lists, tuples and dicts with its tensors on the CPU."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), values)


def _pack(value: Any) -> bytes:
    """``torch.save``: plain pickle knows no fp8, multiprocessing's would share memory."""
    packed = io.BytesIO()
    torch.save(value, packed)
    return packed.getvalue()


def _unpack(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)
