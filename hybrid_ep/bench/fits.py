"""Time against bytes: a fixed part, and a rate for the rest."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Points = Sequence[tuple[float, float]]

_LINE = (  # what is the same on one line
    *("op", "backend", "mode", "direction", "sizing", "ranks", "hidden", "experts", "topk"),
    *("dtype", "skew", "align", "weighted", "sms"),
)
LEAST_POINTS = 3  # two always lie on a line


class Fit(NamedTuple):
    """``us = fixed_us + bytes / gbps / 1000``.

    Attributes:
        fixed_us: what a call takes however little it moves.
        gbps: the rate beyond that; infinite where time does not grow.
        most_growth: of two neighbouring sizes, the most that time grew over what bytes grew; at
            most 1 where time grows no faster than the bytes.
    """

    fixed_us: float
    gbps: float
    most_growth: float


def fit(points: Points) -> Fit:
    """The line that is the least off in proportion to each time.

    Args:
        points: (bytes, us), at least two different numbers of bytes.
    """
    points = sorted(points)
    # weighted least squares, weights 1 / us^2: the short calls say what is fixed
    weights = [us**-2 for _, us in points]
    total = sum(weights)
    mean_bytes = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_us = sum(w * us for w, (_, us) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_bytes) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    together = sum(
        w * (x - mean_bytes) * (us - mean_us) for w, (x, us) in zip(weights, points, strict=True)
    )
    slope = together / spread
    growths = [
        (late_us / early_us) / (late / early)
        for (early, early_us), (late, late_us) in itertools.pairwise(points)
        if 0 < early < late
    ]
    rate = 1 / slope / 1e3 if slope > 0 else float("inf")
    return Fit(mean_us - slope * mean_bytes, rate, max(growths, default=0.0))


def fits(records: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], Fit]]:
    """A fit for all records that differ in tokens alone, with one of them."""
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        lines[tuple(record.get(key) for key in _LINE)].append(record)
    found = []
    for same in lines.values():
        points = {record["nvlink_bytes"]: record["us_median"] for record in same}
        if len(points) >= LEAST_POINTS:
            found.append((same[0], fit(list(points.items()))))
    return found
