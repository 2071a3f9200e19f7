"""The records of overlap as one PNG: the time of both streams against the SMs of communication."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from hybrid_ep.bench.overlap.table import SAME, name_of, products_of, title_of
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
    pyplot = pictures.load_pyplot()
    by_shape = itertools.groupby(report["overlaps"], lambda r: [r[key] for key in SAME])
    panels = [list(records) for _, records in by_shape]
    if not panels:
        return False
    figure, cells = pyplot.subplots(
        len(panels), 1, figsize=(10, 1 + 4.4 * len(panels)), squeeze=False
    )
    for cell, records in zip(cells.flat, panels, strict=True):
        _draw(cell, records)
    figure.suptitle(f"{report['device']}, commit {report['commit']}")
    figure.tight_layout()
    pictures.write(figure, path)
    return True


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


def _draw(cell: Any, records: list[dict[str, Any]]) -> None:
    for name, points in curves(records).items():
        is_measured = name.startswith("hybrid_ep")
        if is_measured:
            cell.plot(*zip(*points, strict=True), marker="o", label=name)
            continue
        cell.plot(*zip(*points, strict=True), linestyle="--", color="gray")
        cell.annotate(name, points[-1], xytext=(0, 4), textcoords="offset points", ha="right")
    for record in records:
        if record["sms"] is None:
            cell.axhline(record["both_us"], color="black", linestyle=":", label=name_of(record))
    cell.axhline(records[0]["products_alone_us"], color="gray", label="products alone")
    ticks = sorted({record["sms"] for record in records if record["sms"] is not None})
    cell.set_xticks(ticks, map(str, ticks))
    title = f"{title_of(records[0])}\n{products_of(records[0])}"
    cell.set(title=title, xlabel="SMs of communication", ylabel="us, both streams")
    cell.title.set_fontsize("small")
    cell.margins(x=0.12)
    cell.legend(fontsize="x-small")
    cell.grid(alpha=0.3)
