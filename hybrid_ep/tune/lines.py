"""The settings that are tried: a line has those that differ from the best so far in one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from hybrid_ep.config import MAX_SLICE_BYTES, Config
from hybrid_ep.integers import round_up

GRID = 8  # numbers of SMs that a line spreads over the budget, before it looks between them

Line = Callable[[Config], Iterable[Config]]


def within_budget(config: Config, max_sms: int) -> Config:
    """The same with no phase on more SMs."""
    names = ("num_sms_publish", "num_sms_dispatch", "num_sms_combine")
    return replace(config, **{name: min(getattr(config, name), max_sms) for name in names})


def sms_grid(max_sms: int) -> list[int]:
    """Numbers of SMs spread over the budget, largest first."""
    return sorted({max(1, max_sms * k // GRID) for k in range(1, GRID + 1)}, reverse=True)


def sms_beside(num_sms: int, max_sms: int) -> list[int]:
    """The two numbers half a step of the grid away, as far as they are in the budget."""
    step = max(1, max_sms // (2 * GRID))
    return [n for n in (num_sms - step, num_sms + step) if 1 <= n <= max_sms]


def slice_sizes(row_bytes: int) -> list[int]:
    """Slices that leave a row in as few pieces as can be, in twice and in four times as many.

    The first is the largest slice there is: it cuts rows of another dtype no more than it must.
    """
    pieces = -(-row_bytes // MAX_SLICE_BYTES)
    cut = {round_up(-(-row_bytes // (pieces * times)), 16) for times in (2, 4)}
    return [MAX_SLICE_BYTES, *sorted(cut - {round_up(row_bytes, 16)}, reverse=True)]


def sms_line(max_sms: int, *names: str, grid: bool = True, beside: bool = True) -> Line:
    """These settings at equal numbers of SMs: over the budget, and beside that of the last one."""

    def line(config: Config) -> Iterable[Config]:
        numbers = sms_grid(max_sms) if grid else []
        numbers += sms_beside(getattr(config, names[-1]), max_sms) if beside else []
        return [replace(config, **dict.fromkeys(names, n)) for n in numbers]

    return line


def dispatch_lines(max_sms: int, row_bytes: int) -> list[Line]:
    """Publish and pull on equally many SMs; slices; publish alone; pull alone."""

    def slices(config: Config) -> Iterable[Config]:
        return [replace(config, slice_bytes=size) for size in slice_sizes(row_bytes)]

    return [
        sms_line(max_sms, "num_sms_publish", "num_sms_dispatch"),
        slices,
        sms_line(max_sms, "num_sms_publish"),
        sms_line(max_sms, "num_sms_dispatch", grid=False),
    ]


def combine_lines(max_sms: int) -> list[Line]:
    """Numbers of SMs over the budget, then beside the best; its kernels take no slice."""
    return [
        sms_line(max_sms, "num_sms_combine", beside=False),
        sms_line(max_sms, "num_sms_combine", grid=False),
    ]


def at_least(least: Mapping[str, int], line: Line) -> Line:
    """The settings of a line that give each kernel as many SMs as it needs."""

    def allowed(config: Config) -> Iterable[Config]:
        return [
            each
            for each in line(config)
            if all(getattr(each, name) >= number for name, number in least.items())
        ]

    return allowed
