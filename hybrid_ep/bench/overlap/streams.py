"""Two streams of a rank, and a clock for what runs on them at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep.bench.clock import LEAD_CYCLES, Clock
from hybrid_ep.group import Group

_HIGH = -1  # above the default priority 0, as docs/overlap.md recommends
Launch = Callable[[int], Any]  # of an input set; enqueues on the current stream


@dataclass(frozen=True)
class Pair:
    """What runs at once; None: that stream is empty.

    Attributes:
        communication: on the stream of high priority, launched first.
        products: on the stream of the default priority.
    """

    communication: Launch | None = None
    products: Callable[[], None] | None = None


@dataclass(frozen=True)
class Ends:
    """Microseconds from the start of both streams to the end of each; slowest rank, medians.

    Attributes:
        communication_us: end of communication.
        products_us: end of the products.
        both_us: end of the later of the two.
    """

    communication_us: float
    products_us: float
    both_us: float


class Streams:
    """The streams of this rank, which all start from one event, on all ranks at once.

    Args:
        clock: has the group that aligns the GPUs.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._fast = torch.cuda.Stream(clock.device, priority=_HIGH)
        self._plain = torch.cuda.Stream(clock.device)

    def take_turns(self, pairs: Sequence[Pair], *, iters: int, warmup: int) -> list[Ends]:
        """Time each pair, iteration by iteration; collective."""
        times: list[list[tuple[float, float]]] = [[] for _ in pairs]
        for i in range(warmup + iters):
            for mine, pair in zip(times, pairs, strict=True):
                took = self._time(pair, i)
                if i >= warmup:
                    mine.append(took)
        of_ranks = torch.tensor(Group().gather(times), dtype=torch.float64)
        slowest = of_ranks.amax(dim=0)  # [pair, iteration, stream]
        both = slowest.amax(dim=2, keepdim=True)
        return [
            Ends(*(statistics.median(column) for column in of_pair.t().tolist()))
            for of_pair in torch.cat([slowest, both], dim=2)
        ]

    def _time(self, pair: Pair, i: int) -> tuple[float, float]:
        device = self._clock.device
        start, communicated, computed = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize(device)
        dist.barrier()
        # the hosts are ahead of the GPUs, which leave a barrier of their own together
        torch.cuda._sleep(2 * LEAD_CYCLES)
        if self._clock.nccl is not None:
            dist.all_reduce(self._clock.tick, group=self._clock.nccl)
        start.record()
        self._fast.wait_event(start)
        self._plain.wait_event(start)
        with torch.cuda.stream(self._fast):
            kept = None if pair.communication is None else pair.communication(i)
            communicated.record()
        with torch.cuda.stream(self._plain):
            if pair.products is not None:
                pair.products()
            computed.record()
        torch.cuda.synchronize(device)
        del kept
        return start.elapsed_time(communicated) * 1e3, start.elapsed_time(computed) * 1e3
