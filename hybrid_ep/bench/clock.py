"""How long calls take, on the slowest rank."""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep.bench.inputs import NUM_INPUTS
from hybrid_ep.group import Group

# GPUs are kept busy so long before a call, so that the hosts are ahead of them; about 0.5 ms
LEAD_CYCLES = 1_000_000
HOST_CALLS = 30  # one after another, when the host is timed: far fewer than a GPU's queue holds


@dataclass
class Call:
    """One thing to time.

    Attributes:
        backend: who does it.
        op: ``"dispatch"`` or ``"combine"``.
        mode: ``"fresh"`` or ``"cached"``.
        begin: ``begin(i)`` prepares it for input set i, untimed, and returns what is timed.
        link_bytes: what the busiest rank sends or receives.
        direction: ``"forward"`` or ``"backward"``.
        sizing: of ``options.SIZINGS``.
        max_rows: the bound, where there is one.
        host_waits: whether the host waits for the GPU in it.
        us: of the slowest rank, by iteration; filled in by the clock.
        us_of_fastest: of the fastest rank, likewise.
        host_us: of the host alone, calls one after another as in a training step, on the rank with
            the slowest host; empty where the host waits, and where ranks share a device.
        host_us_after_idle: the same of the timed calls, by iteration: they come after a barrier,
            which the host slept in, so that it finds its caches cold.
        rank_us: median of each rank.
        bare: the all_to_all that took turns with it.
        kernels_us: its kernels alone, on the slowest rank, median; None where nothing was traced.
        phases_us: of each phase of ``hybrid_ep.backends.trace.PhaseTimes``, likewise.
        phase_begins_us: where each of them begins in the call, likewise, of the earliest rank.
        sms_occupied: how many SMs its kernels ran on, all of them together, likewise.
    """

    backend: str
    op: str
    mode: str
    begin: Callable[[int], Callable[[], Any]]
    link_bytes: int
    direction: str = "forward"
    sizing: str = "exact"
    max_rows: int | None = None
    host_waits: bool = False
    us: tuple[float, ...] = ()
    us_of_fastest: tuple[float, ...] = ()
    host_us: tuple[float, ...] = ()
    host_us_after_idle: tuple[float, ...] = ()
    rank_us: tuple[float, ...] = ()
    bare: Call | None = None
    kernels_us: float | None = None
    phases_us: dict[str, float] | None = None
    phase_begins_us: dict[str, float] | None = None
    sms_occupied: float | None = None


class Clock:
    """Times calls: CUDA events on a GPU, wall clock on the CPU, from a barrier on; collective."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nccl = _nccl_group(device)
        self.tick = torch.zeros(1, device=device)

    @property
    def carrier(self) -> Any:
        """The group for collectives on the device: NCCL, gloo on the CPU, or None."""
        return self.nccl if self.device.type == "cuda" else dist.group.WORLD

    def take_turns(self, calls: list[Call], *, iters: int, warmup: int) -> None:
        """Fill in the times of all calls.

        Every other round over the inputs goes from the last call to the first, so that no call
        always finds the GPU as hot as the same other one leaves it.
        """
        times: list[list[tuple[float, float]]] = [[] for _ in calls]
        turns = list(zip(times, calls, strict=True))
        for i in range(warmup + iters):
            for mine, call in turns[:: -1 if i // NUM_INPUTS % 2 else 1]:
                took = self.time(call.begin(i % NUM_INPUTS))
                if i >= warmup:
                    mine.append(took)
        of_ranks = torch.tensor(
            Group().gather(times), dtype=torch.float64
        )  # [rank, call, iteration, 2]
        medians = of_ranks[..., 0].quantile(0.5, dim=2).t().tolist()  # [call][rank]
        slowest, fastest = of_ranks.amax(dim=0), of_ranks.amin(dim=0)
        bare = {call.op: call for call in calls if call.backend == "all_to_all"}
        for call, took, least, of_rank in zip(calls, slowest, fastest, medians, strict=True):
            call.us, after_idle = (tuple(column) for column in took.t().tolist())
            call.us_of_fastest = tuple(least[:, 0].tolist())
            call.rank_us = tuple(of_rank)
            call.bare = bare.get(call.op)
            if self.device.type == "cuda" and not call.host_waits:
                call.host_us_after_idle = after_idle

    def time(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Microseconds of one call on this rank, and those that it held its host."""
        if self.device.type != "cuda":
            dist.barrier()
            begin = time.perf_counter()
            result = call()
            us = (time.perf_counter() - begin) * 1e6
            del result
            return us, us
        torch.cuda.synchronize(self.device)
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self.nccl is not None:
            # a barrier of the GPUs, behind which the call queues up: the hosts leave their own
            # barrier tens of microseconds apart
            torch.cuda._sleep(LEAD_CYCLES)
            dist.all_reduce(self.tick, group=self.nccl)
        start.record()
        begin = time.perf_counter()
        result = call()
        host_us = (time.perf_counter() - begin) * 1e6
        end.record()
        torch.cuda.synchronize(self.device)
        del result
        return start.elapsed_time(end) * 1e3, host_us

    def time_hosts(self, calls: list[Call]) -> None:
        """Fill in ``host_us`` of what does not wait, where each rank has a GPU of its own."""
        for call in calls:
            if self.nccl is not None and not call.host_waits:
                call.host_us = self.time_host(call)

    def time_host(self, call: Call) -> tuple[float, ...]:
        """Microseconds that calls hold the host, one after another while the GPU is behind."""
        ready = [call.begin(i % NUM_INPUTS) for i in range(HOST_CALLS)]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()
        stamps = [time.perf_counter()]
        for each in ready:
            each()
            stamps.append(time.perf_counter())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        mine = [(end - begin) * 1e6 for begin, end in itertools.pairwise(stamps)]
        return tuple(max(Group().gather(mine), key=statistics.median))


def _nccl_group(device: torch.device) -> Any:
    """An NCCL group where each rank has a GPU of its own, else None; collective."""
    place = (platform.node(), device.index) if device.type == "cuda" else None
    everybody = Group().gather(place)
    if None in everybody or len(set(everybody)) < len(everybody) or not dist.is_nccl_available():
        return None
    return dist.new_group(backend="nccl")
