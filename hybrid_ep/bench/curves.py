"""Panels of time against SMs and against tokens, with the lines that it is compared with."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from hybrid_ep.bench.options import BASELINES
from hybrid_ep.bench.series import (
    BARE,
    Record,
    colour_of,
    name_of,
    name_of_baseline,
    select,
    series_of,
    shapes_of,
    tell,
)
from hybrid_ep.output import pictures
from hybrid_ep.output.pictures import MARKERS, End, Panel

OPS = ("dispatch", "combine")
AXES = {"sms": "SMs of the call", "tokens": "tokens per rank"}
FLOOR = "floor of the link"
ALIKE = 0.05  # curves that differ by less are drawn once
MOST_CHARACTERS = 25  # that a line has room for


class Curve(NamedTuple):
    """Points of one line; ``rank`` tells its colour and marker, None is a line to compare with."""

    name: str
    points: list[tuple[float, float]]
    rank: int | None


def alike_shapes(records: list[Record], axis: str) -> list[list[Record]]:
    """Shapes in groups whose curves differ by a few percent at most: one panel each."""
    groups: list[list[Record]] = []
    for shape in shapes_of(records, but=axis):
        curves = _times(records, axis, shape)
        for group in groups:
            if _difference(curves, _times(records, axis, group[0])) <= ALIKE:
                group.append(shape)
                break
        else:
            groups.append([shape])
    return groups


def _times(records: list[Record], axis: str, shape: Record) -> dict[Any, float]:
    """By op, curve and place."""
    return {
        (op, curve.name, x): us
        for op in OPS
        for curve in _curves(_on_most_sms(select(records, op=op, **shape), axis), axis)
        for x, us in curve.points
    }


def _difference(some: dict[Any, float], others: dict[Any, float]) -> float:
    """The largest one of the same points, as a share; infinite where the points differ."""
    if not some or some.keys() != others.keys():
        return math.inf
    return max(abs(some[key] / others[key] - 1) for key in some)


def _on_most_sms(records: list[Record], axis: str) -> list[Record]:
    if axis == "sms":
        return records
    most = max((r["sms"] for r in records if r["sms"] is not None), default=None)
    return [r for r in records if r["sms"] in (None, most)]


def curves_panel(records: list[Record], axis: str, op: str, shapes: list[Record]) -> Panel | None:
    """Curves of the first of these shapes, which are alike."""
    first = _on_most_sms(select(records, op=op, **shapes[0]), axis)
    curves = [*_curves(first, axis), *_comparisons(first, axis)]
    if not any(curve.rank is not None for curve in curves):
        return None
    varying = [key for key in shapes[0] if len({shape[key] for shape in shapes}) > 1]
    others = "; ".join(tell(shape, varying) for shape in shapes[1:])
    if len(others) > MOST_CHARACTERS:
        others = f"{len(shapes) - 1} other shapes"
    told = tell(shapes[0], shapes[0])
    told += f" ({others}: within {ALIKE:.0%})" if others else ""
    on = next((f" on {r['sms']} SMs" for r in first if r["sms"] is not None), "")
    title = f"{op.capitalize()}: time against {'SMs' if axis == 'sms' else f'tokens{on}'}"
    draw = functools.partial(_draw_curves, axis, curves)
    return Panel(draw, title, told, 4.2, left=0.9, right=2.55)


def _curves(records: list[Record], axis: str) -> Iterator[Curve]:
    series = series_of(r for r in records if r[axis] is not None)
    backends = {backend for backend, _ in series}
    for rank, ((backend, kind), of_kind) in enumerate(series.items()):
        points = sorted((r[axis], r["us_median"]) for r in of_kind)
        if len(points) > 1:
            yield Curve(name_of(backend, kind, backends), points, rank)


def _comparisons(records: list[Record], axis: str) -> Iterator[Curve]:
    """The bare all_to_all, by tokens plain torch as well, and the floor by the ceilings."""
    for backend in BASELINES:
        of_baseline = select(records, backend=backend, direction="forward")
        if axis == "tokens" and len(of_baseline) > 1:
            points = sorted((r[axis], r["us_median"]) for r in of_baseline)
            yield Curve(name_of_baseline(backend), points, None)
        elif axis == "sms" and backend == BARE and of_baseline:
            measured = sorted({r[axis] for r in records if r[axis] is not None})
            us = of_baseline[0]["us_median"]
            yield Curve(name_of_baseline(backend), [(x, us) for x in measured], None)
    floor = {
        r[axis]: r["nvlink_bytes"] / r["ceiling_gbps"] / 1e3
        for r in records
        if r["sms"] is not None and r["direction"] == "forward" and r.get("ceiling_gbps")
    }
    if len(floor) > 1:
        yield Curve(FLOOR, sorted(floor.items()), None)


def _draw_curves(axis: str, curves: list[Curve], cell: Any) -> None:
    for curve in curves:
        marker = "" if curve.rank is None else MARKERS[curve.rank % len(MARKERS)]
        style = "-" if curve.rank is not None else ":" if curve.name == FLOOR else "--"
        places = zip(*curve.points, strict=True)
        cell.plot(*places, style, marker=marker, color=colour_of(curve.rank), clip_on=False)
    if axis == "tokens":  # by factors: a slope of 1 is as fast as the bytes
        cell.set_xscale("log", base=2)
        cell.set_yscale("log")
        cell.set_yticks(_round_numbers(us for curve in curves for _, us in curve.points))
        cell.yaxis.set_major_formatter("{x:,.0f}")
    else:
        cell.set_ylim(0, None)
    measured = sorted({x for curve in curves for x, _ in curve.points})
    cell.set_xlim(measured[0], measured[-1])
    cell.set_xticks(measured, [f"{x // 1024}k" if x % 1024 == 0 else f"{x:,}" for x in measured])
    cell.minorticks_off()
    cell.set(xlabel=AXES[axis], ylabel="us")
    cell.grid()
    ends = [(curve, *curve.points[-1]) for curve in curves]
    pictures.label_ends(
        cell,
        [End(x, us, f"{curve.name}  {us:,.0f}", colour_of(curve.rank)) for curve, x, us in ends],
    )


def _round_numbers(times: Iterable[float]) -> list[float]:
    """1, 2, 5, 10, ... over the range of these times."""
    times = list(times)
    numbers = [digit * 10.0**power for power in range(-1, 8) for digit in (1, 2, 5)]
    return [number for number in numbers if min(times) / 2 < number < max(times) * 2]
