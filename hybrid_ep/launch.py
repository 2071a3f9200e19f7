"""Start ranks on this machine, each its own process, and collect what they return.

For the command line, the examples and a first try in a notebook; a training job has its own
launcher (torchrun, Slurm) and does not need this. ``on_ranks`` is for a command that may be started
either way: it takes torchrun's ranks where this process is one of them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybrid_ep.errors import GroupError, PeerError, SetupError
from hybrid_ep.group import is_of_a_peer

# Deadlines are ordered, Buffer < group < test, so that a rank that waits in vain raises a PeerError
# with the name of its peer before anything else ends the run. A call on a Buffer waits at most
# 2 * timeout_s + 10 s (csrc/call_state.cpp). tests/unit/test_deadlines.py checks the order.
GROUP_TIMEOUT_S = 900.0  # of a group of run_ranks, whose Buffers have the default deadline
COMMAND_TIMEOUT_S = 60.0  # of the Buffers of a command, which saves no checkpoint
_END_S = 20.0  # for ranks that have returned to end
_FAILED_END_S = 2.0  # and, once one has failed, for the others to fail as well

_SAY_ALL = (SetupError, GroupError, PeerError, ValueError, torch.cuda.OutOfMemoryError)


@dataclass(frozen=True)
class Failure:
    """How a function ended on a rank that did not return.

    Attributes:
        rank: the rank.
        text: the traceback, or how the process ended.
        told: one paragraph for people, where the exception itself says all; else empty.
        is_echo: the rank failed because another did.
        is_broken_pipe: nobody reads what it prints any more, as in ``hybrid-ep check | head``.
    """

    rank: int
    text: str
    told: str = ""
    is_echo: bool = False
    is_broken_pipe: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Of the exception that is being handled."""
        told = str(error) if isinstance(error, _SAY_ALL) else ""
        is_echo = (
            is_of_a_peer(error)
            or isinstance(error, (PeerError, GroupError))
            or "Connection closed by peer" in str(error)  # gloo: the process of a peer ended
        )
        return cls(rank, traceback.format_exc(), told, is_echo, isinstance(error, BrokenPipeError))


class RanksFailed(RuntimeError):
    """A rank raised or died; the text holds the rank and its traceback.

    Attributes:
        told: the same for people, without the traceback where the exception says all.
        speaks: whether this is the one process that tells the user.
        is_broken_pipe: the cause is that nobody reads the output any more.
    """

    def __init__(self, failures: Sequence[Failure], *, speaks: bool = True) -> None:
        # the cause, where it is among them, and not a rank that failed because another did
        failure = min(failures, key=lambda each: (each.is_echo, each.rank))
        super().__init__(f"rank {failure.rank} failed:\n{failure.text}")
        self.told = failure.told or str(self)
        self.speaks = speaks
        self.is_broken_pipe = failure.is_broken_pipe


def default_num_ranks() -> int:
    """One rank a GPU where there are at least two GPUs, else 4 (on one GPU they share it)."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return gpus if gpus >= 2 else 4


def rank_device(rank: int, device: str = "auto") -> torch.device:
    """The device of a local rank: GPUs are dealt out in turn, several ranks may share one."""
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    device: str = "auto",
    timeout_s: float = GROUP_TIMEOUT_S,
    group: str | None = "gloo",
) -> list[Any]:
    """Call ``function(device, *args)`` on ``num_ranks`` fresh processes with a default group.

    The group is gloo's unless another is named: gloo sets the ranks up on any machine, also several
    on one GPU, and the nvlink backend needs no more. The torch backend on GPUs is slow over it.

    Args:
        function: importable (it travels by pickle); what it returns must pickle too.
        num_ranks: number of processes.
        args: passed on.
        device: ``"auto"`` or ``"cpu"``.
        timeout_s: of the group's collectives; longer than the deadline of any Buffer.
        group: its backend, as ``init_process_group`` takes it; None names none.

    Returns:
        list: what the ranks returned, in rank order.

    Raises:
        RanksFailed: a rank raised or died; a RuntimeError that holds the rank and its traceback.
    """
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port = _free_port()
    workers = [
        context.Process(
            target=_rank_main,
            args=(results, function, rank, num_ranks, port, device, timeout_s, group, args),
            daemon=True,
        )
        for rank in range(num_ranks)
    ]
    for worker in workers:
        worker.start()
    patience_s = _FAILED_END_S
    try:
        values = _collect(results, workers)
        patience_s = _END_S
        return values
    finally:
        end = time.monotonic() + patience_s
        for worker in workers:
            worker.join(timeout=max(0.0, end - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()


@dataclass(frozen=True)
class Ran:
    """What a function returned on the ranks, and who tells the user.

    Attributes:
        values: in rank order.
        speaks: whether this is the one process that prints.
    """

    values: list[Any]
    speaks: bool = True


def ranks_here(asked: int | None) -> int:
    """The number of ranks that ``on_ranks`` will use.

    Raises:
        ValueError: less than 1, or another number than torchrun started.
    """
    if _under_torchrun():
        started = int(os.environ["WORLD_SIZE"])
        if asked not in (None, started):
            raise ValueError(f"--ranks must be the {started} that torchrun started, got {asked}")
        return started
    if asked is not None and asked < 1:
        raise ValueError(f"--ranks must be at least 1, got {asked}")
    return default_num_ranks() if asked is None else asked


def on_ranks(
    function: Callable[..., Any],
    num_ranks: int | None,
    *args: Any,
    device: str = "auto",
    group: str | None = "gloo",
) -> Ran:
    """Call ``function(device, *args)`` on torchrun's ranks if this is one, else on fresh ones.

    Args:
        function: as of ``run_ranks``.
        num_ranks: as ``ranks_here`` takes it.
        args: passed on.
        device: ``"auto"`` or ``"cpu"``.
        group: as of ``run_ranks``.

    Returns:
        Ran: what the ranks returned.

    Raises:
        ValueError: as of ``ranks_here``.
        RanksFailed: a rank raised or died.
    """
    started = ranks_here(num_ranks)
    if not _under_torchrun():
        return Ran(run_ranks(function, started, *args, device=device, group=group))
    mine = rank_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), device)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    dist.init_process_group(group)
    try:
        rank = dist.get_rank()
        try:
            value = function(mine, *args)
        except Exception as error:
            # each rank that torchrun started has its own; of what all ranks raise, one tells
            speaks = rank == 0 or not isinstance(error, SetupError)
            if isinstance(error, SetupError):  # all ranks are here, and leave the group together
                with contextlib.suppress(RuntimeError):  # or one has died meanwhile
                    dist.barrier()
            raise RanksFailed([Failure.of(rank, error)], speaks=speaks) from error
        values: list[Any] = [None] * started
        dist.all_gather_object(values, value)
        return Ran(values, speaks=rank == 0)
    finally:
        dist.destroy_process_group()


def _under_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def _collect(results: Any, workers: list[Any]) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(workers):
        if results.empty():
            dead = [r for r, w in enumerate(workers) if r not in values and w.exitcode is not None]
            if dead and results.empty():
                raise RanksFailed([_died(rank, workers[rank].exitcode) for rank in dead])
            workers[next(r for r in range(len(workers)) if r not in values)].join(timeout=0.02)
            continue
        rank, value, failure = results.get()
        if failure is not None:
            raise RanksFailed([failure, *_causes(results, workers, failure)])
        values[rank] = value
    return [values[rank] for rank in range(len(workers))]


def _causes(results: Any, workers: list[Any], first: Failure) -> list[Failure]:
    """If a failure is an echo: those of other ranks, which may come a little later."""
    failures: list[Failure] = []
    end = time.monotonic() + _FAILED_END_S
    while first.is_echo and all(each.is_echo for each in failures) and time.monotonic() < end:
        killed = [r for r, w in enumerate(workers) if w.exitcode not in (None, 0, 1)]
        if not results.empty():
            failure = results.get()[2]
            failures += [] if failure is None else [failure]
        elif killed:
            failures += [_died(rank, workers[rank].exitcode) for rank in killed]
        else:
            time.sleep(0.02)
    return failures


def _died(rank: int, exit_code: int) -> Failure:
    text = f"it died without a word (exit code {exit_code})"
    return Failure(rank, text, f"rank {rank} died without a word (exit code {exit_code})")


def _rank_main(
    results: Any,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    port: int,
    device: str,
    timeout_s: float,
    group: str | None,
    args: tuple[Any, ...],
) -> None:
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
        mine = rank_device(rank, device)
        if mine.type == "cuda":
            torch.cuda.set_device(mine)
        dist.init_process_group(
            group,
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        results.put((rank, function(mine, *args), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        results.put((rank, None, Failure.of(rank, error)))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads it any more
                stream.flush()
        os._exit(1)  # an ordinary exit may end in std::terminate: threads of gloo still wait


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
