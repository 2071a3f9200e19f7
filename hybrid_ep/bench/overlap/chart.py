"""The records of overlap as one PNG: the time of both streams against the SMs of communication."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from hybrid_ep.bench.overlap.table import SAME, name_of, products_of, title_of
from hybrid_ep.bench.series import alike, by_commit
from hybrid_ep.output import pictures

Points = list[tuple[int, float]]


def plot_overlaps(report: dict[str, Any], path: Path) -> bool:
    """Write a panel per shape: both streams by way, one after the other, and what SM time allows.

    Args:
        report: what ``--json`` writes.
        path: of the PNG; its folder is made if missing.

    Returns:
        bool: whether there was anything to draw.

    Raises:
        ValueError: matplotlib is not installed.
    """
    rows = [[_panel(records)] for records in alike(report["overlaps"], SAME)]
    title = f"hybrid_ep on {report['device']}{by_commit(report)}: beside matrix products"
    if rows:
        pictures.write_panels(rows, title, path, panel_width=11)
    return bool(rows)


def curves(records: list[dict[str, Any]]) -> dict[str, Points]:
    """Microseconds by SMs: of each way, of both streams in turn, and the least by SM time."""
    found: dict[str, Points] = {}
    for record in records:
        if record["sms"] is None:
            continue
        alone, products = record["communication_alone_us"], record["products_alone_us"]
        hides = record["allowed_part"] * min(alone, products)
        for name, us in (
            (f"{name_of(record)}, products on {record['product_sms']} SMs", record["both_us"]),
            ("one after the other", alone + products),
            ("SM time allows", alone + products - hides),
        ):
            points = found.setdefault(name, [])
            if all(sms != record["sms"] for sms, _ in points):
                points.append((record["sms"], us))
    return {name: sorted(points) for name, points in found.items()}


def _panel(records: list[dict[str, Any]]) -> pictures.Panel:
    draw = functools.partial(_draw, records)
    title = "Time of both streams against the SMs of communication"
    sizes = f"{title_of(records[0])}; {products_of(records[0])}"
    return pictures.Panel(draw, title, sizes, 4.8, left=0.9, right=4.5)


def _draw(records: list[dict[str, Any]], cell: Any) -> None:
    ends = []
    ticks = sorted({record["sms"] for record in records if record["sms"] is not None})
    lines = _constants(records)
    by_name = curves(records)
    ours = [name for name in by_name if name.startswith("hybrid_ep")]
    for name, points in by_name.items():
        colour, style, marker = pictures.GREY, "--", ""
        if name in ours:
            number = ours.index(name)
            colour, style = pictures.COLOURS[number % len(pictures.COLOURS)], "-"
            marker = pictures.MARKERS[number % len(pictures.MARKERS)]
        cell.plot(*zip(*points, strict=True), style, marker=marker, color=colour, clip_on=False)
        ends.append(pictures.End(*points[-1], f"{name}  {points[-1][1]:,.0f}", colour))
    for name, us in lines.items():
        cell.axhline(us, color=pictures.GREY, linestyle=":")
        ends.append(pictures.End(max(ticks, default=1), us, f"{name}  {us:,.0f}", pictures.GREY))
    if ticks:
        cell.set_xlim(ticks[0], max(ticks[-1], ticks[0] + 1))
    cell.set_xticks(ticks, map(str, ticks))
    cell.set(xlabel="SMs of communication", ylabel="us")
    cell.yaxis.set_major_formatter("{x:,.0f}")
    cell.grid()
    pictures.label_ends(cell, ends)


def _constants(records: list[dict[str, Any]]) -> dict[str, float]:
    """What has no number of SMs: the products alone, and ways that choose their own."""
    ways = {name_of(r): r["both_us"] for r in records if r["sms"] is None}
    return {"products alone": records[0]["products_alone_us"], **ways}
