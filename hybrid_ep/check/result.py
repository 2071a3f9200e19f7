"""What a check found, a line a property."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_RANKS_SHOWN = 4


class Property(NamedTuple):
    """One line of the check.

    Attributes:
        name: what was checked.
        failures: rank -> what was seen there; empty where it holds.
    """

    name: str
    failures: dict[int, str]

    def __str__(self) -> str:
        if not self.failures:
            return f"ok    {self.name}"
        shown = [f"rank {r}: {seen}" for r, seen in sorted(self.failures.items())]
        more = len(shown) - MAX_RANKS_SHOWN
        tail = f"; and on {more} more rank(s)" if more > 0 else ""
        return f"FAIL  {self.name}: " + "; ".join(shown[:MAX_RANKS_SHOWN]) + tail


@dataclass(frozen=True)
class CheckResult:
    """What was checked; the same on all ranks."""

    properties: tuple[Property, ...]

    @property
    def failed(self) -> tuple[Property, ...]:
        """The properties that do not hold on some rank."""
        return tuple(p for p in self.properties if p.failures)

    @property
    def ok(self) -> bool:
        """Whether all hold."""
        return not self.failed

    def __str__(self) -> str:
        failed = len(self.failed)
        return f"check: {len(self.properties) - failed} passed, {failed} failed"
