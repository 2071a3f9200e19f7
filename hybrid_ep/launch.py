"""Start ranks on this machine, each its own process, and collect what they return.

For the command line, the examples and a first try in a notebook; a training job has its own
launcher (torchrun, Slurm) and does not need this. ``on_ranks`` is for a command that may be started
either way: it takes torchrun's ranks where this process is one of them.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


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
    timeout_s: float = 300.0,
) -> list[Any]:
    """Call ``function(device, *args)`` on ``num_ranks`` fresh processes with a default group.

    The group is gloo: it sets the ranks up on any machine, also several on one GPU, and the nvlink
    backend needs no more.

    Args:
        function: importable (it travels by pickle); what it returns must pickle too.
        num_ranks: number of processes.
        args: passed on.
        device: ``"auto"`` or ``"cpu"``.
        timeout_s: of the group's collectives.

    Returns:
        list: what the ranks returned, in rank order.

    Raises:
        RuntimeError: a rank raised or died; the text holds the rank and its traceback.
    """
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port = _free_port()
    workers = [
        context.Process(
            target=_rank_main,
            args=(results, function, rank, num_ranks, port, device, timeout_s, args),
            daemon=True,
        )
        for rank in range(num_ranks)
    ]
    for worker in workers:
        worker.start()
    try:
        return _collect(results, workers)
    finally:
        for worker in workers:
            worker.join(timeout=20)
            if worker.is_alive():
                worker.kill()


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
    function: Callable[..., Any], num_ranks: int | None, *args: Any, device: str = "auto"
) -> Ran:
    """Call ``function(device, *args)`` on torchrun's ranks if this is one, else on fresh ones.

    Args:
        function: as of ``run_ranks``.
        num_ranks: as ``ranks_here`` takes it.
        args: passed on.
        device: ``"auto"`` or ``"cpu"``.

    Returns:
        Ran: what the ranks returned.

    Raises:
        ValueError: as of ``ranks_here``.
        RuntimeError: a rank raised or died.
    """
    started = ranks_here(num_ranks)
    if not _under_torchrun():
        return Ran(run_ranks(function, started, *args, device=device))
    mine = rank_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), device)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    dist.init_process_group("gloo")
    try:
        values: list[Any] = [None] * started
        dist.all_gather_object(values, function(mine, *args))
        return Ran(values, speaks=dist.get_rank() == 0)
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
                codes = ", ".join(f"rank {r}: exit code {workers[r].exitcode}" for r in dead)
                raise RuntimeError(f"ranks died without a word ({codes})")
            workers[next(r for r in range(len(workers)) if r not in values)].join(timeout=0.02)
            continue
        rank, value, error = results.get()
        if error is not None:
            raise RuntimeError(f"rank {rank} failed:\n{error}")
        values[rank] = value
    return [values[rank] for rank in range(len(workers))]


def _rank_main(
    results: Any,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    port: int,
    device: str,
    timeout_s: float,
    args: tuple[Any, ...],
) -> None:
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
        mine = rank_device(rank, device)
        if mine.type == "cuda":
            torch.cuda.set_device(mine)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        results.put((rank, function(mine, *args), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
