"""The records as one PNG: time against SMs, with the ceilings' floor, against tokens, by phase."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hybrid_ep.output import pictures

OPS = ("dispatch", "combine")
AXES = {"sms": "SMs", "tokens": "tokens per rank"}
SIZES = ("tokens", "hidden", "experts", "topk", "dtype", "skew", "sms")

Points = list[tuple[float, float]]


def plot(report: dict[str, Any], path: Path) -> bool:
    """Write the panels that have a curve, at least two points that differ in SMs or in tokens.

    And for each op that was traced a bar per phase of its fresh calls: most tokens, most SMs.

    Args:
        report: what ``--json`` writes.
        path: of the PNG; its folder is made if missing.

    Returns:
        bool: whether there was anything to draw.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = pictures.load_pyplot()
    records = report["records"]
    panels: list[Callable[[Any], None]] = []
    for axis, op in itertools.product(AXES, OPS):
        if curves := _curves(records, axis, op):
            panels.append(functools.partial(_draw_curves, report, axis, op, curves))
    for op in OPS:
        if bars := _phase_bars(records, op):
            panels.append(functools.partial(_draw_bars, op, bars))
    if not panels:
        return False
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, cells = pyplot.subplots(
        rows, columns, figsize=(8.4 * columns, 4.8 * rows), squeeze=False
    )
    for cell in cells.flat[len(panels) :]:
        cell.set_visible(False)
    for draw, cell in zip(panels, cells.flat, strict=False):
        draw(cell)
        cell.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.suptitle(f"{report['device']}, commit {report['commit']}")
    figure.tight_layout()
    pictures.write(figure, path)
    return True


def _draw_curves(
    report: dict[str, Any], axis: str, op: str, curves: dict[str, Points], cell: Any
) -> None:
    for name, points in curves.items():
        style = "-" if "exact" in name.split() else ":"
        cell.plot(*zip(*points, strict=True), marker="o", linestyle=style, label=name)
    for name, points in _floors(report, axis, op).items():
        cell.plot(*zip(*points, strict=True), linestyle="--", color="gray", label=name)
    if axis == "sms":
        for line in _untuned(report["records"], op):  # often far above: told, not drawn
            cell.plot([], [], " ", label=line)
    cell.set(title=op, xlabel=AXES[axis], ylabel="us, slowest rank")
    if axis == "tokens":  # by factors: a slope of 1 is as fast as the bytes
        cell.set_xscale("log", base=2)
        cell.set_yscale("log", base=2)
        cell.yaxis.set_major_formatter("{x:,.0f}")
    else:
        cell.set_ylim(0, None)
    measured = sorted({x for points in curves.values() for x, _ in points})
    cell.set_xticks(measured, [f"{x:,}" for x in measured])
    cell.grid(alpha=0.3)


def _draw_bars(op: str, bars: dict[str, dict[str, float]], cell: Any) -> None:
    phases = list(dict.fromkeys(phase for times in bars.values() for phase in times))
    height = 0.8 / len(bars)
    for i, (name, times) in enumerate(bars.items()):
        places = [phases.index(phase) + i * height for phase in times]
        cell.barh(places, list(times.values()), height, align="edge", label=name)
    cell.set_yticks([place + 0.4 for place in range(len(phases))], phases)
    cell.set(title=f"{op}, by phase", xlabel="us, slowest rank", xlim=(0, None))
    cell.invert_yaxis()  # the first phase on top


def _curves(records: Iterable[dict[str, Any]], axis: str, op: str) -> dict[str, Points]:
    """Points of each line; whatever differs besides the axis makes another line."""
    records = [r for r in records if r["op"] == op and r[axis] is not None]
    curves: dict[str, Points] = defaultdict(list)
    for record in records:
        words = [record["backend"], record["mode"], record["sizing"]]
        words += [record["direction"]] if record["direction"] == "backward" else []
        name = " ".join((*words, *_varying(record, records, axis)))
        curves[name].append((record[axis], record["us_median"]))
    return {name: sorted(points) for name, points in curves.items() if len(points) > 1}


def _phase_bars(records: Iterable[dict[str, Any]], op: str) -> dict[str, dict[str, float]]:
    """Times of the phases of each setting's fresh call, of the most tokens on the most SMs."""
    traced = [r for r in records if r["op"] == op and r["mode"] == "fresh" and r.get("phases_us")]
    for axis in AXES:
        most = max((r[axis] for r in traced), default=0)
        traced = [r for r in traced if r[axis] == most]
    return {
        " ".join((r["sizing"], *_varying(r, traced, "sms"), f"on {r['sms']} SMs")): r["phases_us"]
        for r in traced
    }


def _floors(report: dict[str, Any], axis: str, op: str) -> dict[str, Points]:
    """Times that the measured ceilings leave for the bytes; one line for nearly equal bytes."""
    records = [r for r in report["records"] if r["op"] == op and r["direction"] == "forward"]
    drawn = [r for r in records if r["sms"] is not None and r["ceiling_gbps"]]
    floors: dict[str, Points] = {}
    for record in drawn:
        key = {"sms": "dtype", "tokens": "sms"}[axis]
        name = f"floor, {key} {record[key]}"
        point = (record[axis], record["nvlink_bytes"] / record["ceiling_gbps"] / 1e3)
        points = floors.setdefault(name, [])
        if all(point[0] != x for x, _ in points):
            points.append(point)
    return {name: sorted(points) for name, points in floors.items() if len(points) > 1}


def _untuned(records: Iterable[dict[str, Any]], op: str) -> list[str]:
    """Times of what uses SMs as it likes."""
    records = [r for r in records if r["op"] == op and r["sms"] is None]
    return [
        " ".join((r["backend"], *_varying(r, records, "sms"), f"{r['us_median']:.0f} us"))
        for r in records
        if r["direction"] == "forward"
    ]


def _varying(record: dict[str, Any], records: list[dict[str, Any]], axis: str) -> list[str]:
    keys = [k for k in SIZES if k != axis and len({r[k] for r in records}) > 1]
    return [f"{key} {record[key]}" for key in keys if record[key] is not None]
