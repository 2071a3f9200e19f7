"""Find numbers of SMs and a slice for one shape on these GPUs: measure, decide, measure again.

What decides is arithmetic on measurements (``choose``, ``search``) and knows no GPU; what measures
(``Meter``) takes its inputs, calls and clock from the bench. Dispatch and combine share no setting,
so they are searched one after the other: a line of settings at a time, each differing from the best
so far in one coordinate, until no line finds a better one or the time is up. Then what looked best
is measured again, since of many measurements the best is a lucky one (``confirm``).

A setting is timed in turns with the default Config on a Buffer of its own, and judged by the ratio
of the two: on a machine that others use the same setting takes other times from minute to minute.
All ranks decide alike, because times are those of the slowest rank and the clock of the search is
the latest of all ranks.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from hybrid_ep.backends.cuda.nvshmem import LEAST_SMS
from hybrid_ep.bench.calls import library_calls, make_buffer
from hybrid_ep.bench.clock import Call, Clock
from hybrid_ep.bench.inputs import NUM_INPUTS, CopyCounts, make_inputs
from hybrid_ep.bench.options import Load, Options, check_known, check_least
from hybrid_ep.buffer import Buffer
from hybrid_ep.config import Config
from hybrid_ep.group import Group
from hybrid_ep.tune.lines import Line, at_least, combine_lines, dispatch_lines, within_budget

AIMS = ("fastest", "fewest")
OPS = ("dispatch", "combine")
MOST_NOISE = 0.02  # of the time: a noisier machine does not make slower settings equal
ROUNDS = 4  # of measuring again what looked best
DISPATCH_SHARE = 0.6  # of the time: it has four lines, combine two


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is sought.

    Attributes:
        max_sms: most SMs that a phase may use.
        aim: ``"fastest"``, or ``"fewest"``: the fewest SMs that are fast enough.
        within: what is fast enough: at most so many times the time of the fastest.
        seconds: no new setting is tried after them.
    """

    max_sms: int = 48
    aim: str = "fastest"
    within: float = 1.05
    seconds: float = 60.0

    def check(self) -> None:
        """Raise ValueError where a value breaks a rule."""
        check_known("aim", (self.aim,), AIMS)
        check_least("max-sms", self.max_sms, 1)
        check_least("within", self.within, 1)
        if not self.seconds > 0:
            raise ValueError(f"--seconds must be positive, got {self.seconds}")


@dataclass(frozen=True)
class Measurement:
    """One setting of one op, beside the default.

    Attributes:
        op: of ``OPS``.
        config: the setting.
        us: microseconds of the slowest rank, by iteration.
        default_us: the same of the default Config, which took turns with it.
    """

    op: str
    config: Config
    us: tuple[float, ...]
    default_us: tuple[float, ...]

    @functools.cached_property
    def ratios(self) -> tuple[float, ...]:
        """Time over that of the default, by iteration."""
        return tuple(mine / other for mine, other in zip(self.us, self.default_us, strict=True))

    @functools.cached_property
    def ratio(self) -> float:
        """Median time over that of the default."""
        return statistics.median(self.ratios)

    @functools.cached_property
    def noise(self) -> float:
        """How far ``ratio`` may be off: the notch of a box plot, 1.57 * IQR / sqrt(n)."""
        if len(self.ratios) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return 1.57 * (high - low) / len(self.ratios) ** 0.5

    @property
    def sms(self) -> int:
        """SMs that the op is given, of its phases the most; routing takes its own number."""
        config = self.config
        if self.op == "combine":
            return config.num_sms_combine
        return max(config.num_sms_publish, config.num_sms_dispatch)


# ---- what to choose


def choose(measured: Sequence[Measurement], goal: Goal) -> Measurement:
    """The measurement that serves the goal best; the same whatever their order.

    The fastest is the one on the fewest SMs among those that noise does not tell from the one with
    the least time. Times need not fall with the number of SMs.

    Args:
        measured: of one op; at least one.
        goal: its budget of SMs is not looked at.
    """
    fastest = min(measured, key=_by_time)
    limit = fastest.ratio + min(fastest.noise, MOST_NOISE * fastest.ratio)
    if goal.aim == "fewest":
        limit = fastest.ratio * goal.within
    return min((each for each in measured if each.ratio <= limit), key=_by_sms)


def _by_time(each: Measurement) -> tuple[float, ...]:
    return (each.ratio, *_by_sms(each))


def _by_sms(each: Measurement) -> tuple[float, ...]:
    config = each.config
    settings = (config.num_sms_publish, config.num_sms_dispatch, config.num_sms_combine)
    return (each.sms, each.ratio, *settings, -config.slice_bytes)


# ---- the search


def search(
    start: Config,
    lines: Sequence[Line],
    measure: Callable[[Config], Measurement],
    goal: Goal,
    time_is_up: Callable[[], bool],
) -> tuple[list[Measurement], bool]:
    """Coordinate search.

    Args:
        start: tried first, whatever the time.
        lines: each gives the settings to try beside the best so far.
        measure: tries one.
        goal: says which is best.
        time_is_up: equal on all ranks.

    Returns:
        list: what was measured, in order; no setting twice.
        bool: whether the search came to its end.
    """
    done = {start: measure(start)}

    def best() -> Config:
        return choose(list(done.values()), goal).config

    while True:
        before = best()
        for line in lines:
            for config in line(best()):
                if config in done:
                    continue
                if time_is_up():
                    return list(done.values()), False
                done[config] = measure(config)
        if best() == before:
            return list(done.values()), True


def confirm(
    found: Sequence[Measurement], measure: Callable[[Config], Measurement], goal: Goal
) -> Measurement:
    """The choice from measurements of which the best are the lucky ones.

    What is chosen, and the fastest, which the choice is held against, are measured once more; that
    counts in place of the first time, and may make others the best, for a few rounds.

    Args:
        found: by ``search``.
        measure: longer than the search did.
        goal: says which is best.

    Returns:
        Measurement: the second one of the choice.
    """
    again: dict[Config, Measurement] = {}
    for _ in range(ROUNDS):
        now = [again.get(each.config, each) for each in found]
        best = (min(now, key=_by_time).config, choose(now, goal).config)
        doubtful = [config for config in dict.fromkeys(best) if config not in again]
        if not doubtful:
            break
        again.update((config, measure(config)) for config in doubtful)
    return choose(list(again.values()), goal)


# ---- on every rank


@dataclass(frozen=True)
class Tuned:
    """What came of it, the same on all ranks.

    Attributes:
        config: the choice.
        measured: everything that was tried, in order.
        confirmed: the choice, measured again: dispatch, combine.
        complete: the search came to its end within the time.
        goal: as it was followed: no GPU has more SMs than its ``max_sms``.
    """

    config: Config
    measured: tuple[Measurement, ...]
    confirmed: tuple[Measurement, ...]
    complete: bool
    goal: Goal


def tune(
    device: torch.device,
    load: Load,
    goal: Goal,
    *,
    backend: str = "nvlink",
    iters: int = 20,
    warmup: int = 5,
) -> Tuned:
    """Search on this rank, together with all others of the default group.

    Args:
        device: of this rank.
        load: of the calls; fp8 is dispatched with its scales, and bf16 comes home.
        goal: equal on all ranks.
        backend: to measure; of the torch backend no setting changes the time.
        iters: timed calls of a setting; three times as many confirm the choice.
        warmup: calls before them.

    Raises:
        RuntimeError: the backend cannot run here, on all ranks.
        ValueError: the goal allows fewer SMs than the backend needs.
    """
    clock, began, gather = Clock(device), time.monotonic(), Group().gather
    if device.type == "cuda":
        here = torch.cuda.get_device_properties(device).multi_processor_count
        goal = replace(goal, max_sms=min(goal.max_sms, *gather(here)))
    config = within_budget(Config(), goal.max_sms)
    least = LEAST_SMS if backend == "nvshmem" else {}
    if goal.max_sms < max(least.values(), default=1):
        raise ValueError(
            f"--max-sms must be at least {max(least.values())} with the nvshmem backend, got "
            f"{goal.max_sms}"
        )
    measured: list[Measurement] = []
    confirmed: list[Measurement] = []
    complete = True
    for op in OPS:
        seconds, moved, lines = goal.seconds, load, combine_lines(goal.max_sms)
        if op == "dispatch":
            seconds *= DISPATCH_SHARE
            lines = dispatch_lines(goal.max_sms, load.row_bytes)
        elif load.is_fp8:
            moved = replace(load, dtype=torch.bfloat16, scale_bytes=0)
        lines = [at_least(least, line) for line in lines]

        def time_is_up(seconds: float = seconds) -> bool:
            return max(gather(time.monotonic() - began)) > seconds

        meter = Meter(clock, moved, op, backend, iters=iters, warmup=warmup)
        found, ended = search(config, lines, meter.measure, goal, time_is_up)
        confirmed.append(confirm(found, functools.partial(meter.measure, times=3), goal))
        config = confirmed[-1].config
        meter.close()
        measured += found
        complete = complete and ended
    return Tuned(config, tuple(measured), tuple(confirmed), complete, goal)


class Meter:
    """Times one op with any Config, in turns with the default one; collective."""

    def __init__(
        self, clock: Clock, load: Load, op: str, backend: str, *, iters: int, warmup: int
    ) -> None:
        self._clock, self._load, self._op, self._backend = clock, load, op, backend
        self._iters, self._warmup = iters, warmup
        rank, device = dist.get_rank(), clock.device
        self._inputs = [make_inputs(load, rank, index, device) for index in range(NUM_INPUTS)]
        self._copy_counts = CopyCounts(load, self._inputs)
        self._default_buffer, self._default_call = self._prepare(Config())

    def measure(self, config: Config, times: int = 1) -> Measurement:
        """Time it, on ``times`` as many iterations as usual."""
        buffer, call = self._prepare(config)
        self._clock.take_turns(
            [self._default_call, call], iters=times * self._iters, warmup=self._warmup
        )
        dist.barrier()
        buffer.destroy()
        return Measurement(self._op, config, call.us, self._default_call.us)

    def close(self) -> None:
        """Give the memory back."""
        dist.barrier()
        self._default_buffer.destroy()

    def _prepare(self, config: Config) -> tuple[Buffer, Call]:
        """A Buffer and the forward of the op from fresh routing, of exact size."""
        buffer = make_buffer(self._load, self._clock.device, self._backend, config)
        calls = library_calls(
            buffer, self._load, self._inputs, "exact", self._copy_counts, Options(backward=False)
        )
        return buffer, next(each for each in calls if (each.op, each.mode) == (self._op, "fresh"))
