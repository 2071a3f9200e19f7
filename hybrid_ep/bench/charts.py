"""The records as one PNG: time against SMs, with the ceilings' floor, and against tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

AXES = {"sms": "SMs", "tokens": "tokens per rank"}
SIZES = ("tokens", "hidden", "experts", "topk", "dtype", "skew", "sms")


def plot(report: dict[str, Any], path: Path) -> bool:
    """Write the panels that have a curve: at least two points that differ in SMs or in tokens.

    Args:
        report: what ``--json`` writes.
        path: of the PNG; its folder is made if missing.

    Returns:
        bool: whether there was anything to draw.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [
        (axis, op, curves)
        for axis in AXES
        for op in ("dispatch", "combine")
        if (curves := _curves(report["records"], axis, op))
    ]
    if not panels:
        return False
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, cells = pyplot.subplots(
        rows, columns, figsize=(8.4 * columns, 4.8 * rows), squeeze=False
    )
    for cell in cells.flat[len(panels) :]:
        cell.set_visible(False)
    for (axis, op, curves), cell in zip(panels, cells.flat, strict=False):
        for name, points in curves.items():
            style = "-" if "exact" in name.split() else ":"
            cell.plot(*zip(*points, strict=True), marker="o", linestyle=style, label=name)
        for name, points in _floors(report, axis, op).items():
            cell.plot(*zip(*points, strict=True), linestyle="--", color="gray", label=name)
        if axis == "sms":
            for line in _untuned(report["records"], op):  # often far above: told, not drawn
                cell.plot([], [], " ", label=line)
        cell.set(title=op, xlabel=AXES[axis], ylabel="us, slowest rank", ylim=(0, None))
        cell.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.suptitle(f"{report['device']}, commit {report['commit']}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


Points = list[tuple[float, float]]


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
