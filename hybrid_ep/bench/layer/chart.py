"""The records of layers as one PNG: a panel per shape, bars of each pass by way."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from hybrid_ep.bench.layer.table import SAME, name_of, title_of
from hybrid_ep.output import pictures


def plot_layers(report: dict[str, Any], path: Path) -> bool:
    """Write the bars: time of each pass, a color for each way.

    Args:
        report: what ``--json`` writes.
        path: of the PNG; its folder is made if missing.

    Returns:
        bool: whether there was anything to draw.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = pictures.load_pyplot()
    by_shape = itertools.groupby(report["layers"], lambda r: [r[key] for key in SAME])
    panels = [list(records) for _, records in by_shape]
    if not panels:
        return False
    figure, cells = pyplot.subplots(
        len(panels), 1, figsize=(11, 1 + 3.6 * len(panels)), squeeze=False
    )
    for cell, records in zip(cells.flat, panels, strict=True):
        _draw(cell, records)
    figure.suptitle(f"{report['device']}, commit {report['commit']}")
    figure.tight_layout()
    pictures.write(figure, path)
    return True


def bars(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Microseconds of each pass, by way; a way that was timed twice is named by what differs."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        sms = f", {record['sms']} SMs" if record["sms"] is not None else ""
        bounded = ", max_rows" if record["sizing"] == "max_rows" else ""
        name = f"{name_of(record)}{bounded}{sms}"
        found.setdefault(name, {})[record["pass"]] = record["us_median"]
    return found


def _draw(cell: Any, records: list[dict[str, Any]]) -> None:
    by_way = bars(records)
    passes = list(dict.fromkeys(name for times in by_way.values() for name in times))
    height = 0.8 / len(by_way)
    for i, (name, times) in enumerate(by_way.items()):
        places = [passes.index(each) + i * height for each in times]
        cell.barh(places, list(times.values()), height, align="edge", label=name)
    cell.set_yticks([place + 0.4 for place in range(len(passes))], passes)
    cell.set(title=title_of(records[0]), xlabel="us, slowest rank", xlim=(0, None))
    cell.title.set_fontsize("small")
    cell.invert_yaxis()  # the forward on top
    cell.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.01, 1))
