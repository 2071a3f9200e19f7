"""The records of layers as one PNG: a panel per shape, bars of each pass by way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_ep.bench.layer.table import SAME, name_of, title_of
from hybrid_ep.bench.series import alike, by_commit
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
    rows = [[_panel(records)] for records in alike(report["layers"], SAME)]
    title = f"hybrid_ep on {report['device']}{by_commit(report)}: time of a layer"
    if rows:
        pictures.write_panels(rows, f"{title}, slowest rank, median", path)
    return bool(rows)


def bars(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Microseconds of each pass, by way; a way that was timed twice is named by what differs."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        sms = f", {record['sms']} SMs" if record["sms"] is not None else ""
        bounded = ", max_rows" if record["sizing"] == "max_rows" else ""
        name = f"{name_of(record)}{bounded}{sms}"
        found.setdefault(name, {})[record["pass"]] = record["us_median"]
    return found


def _panel(records: list[dict[str, Any]]) -> pictures.Panel:
    by_way = bars(records)
    passes = list(dict.fromkeys(name for times in by_way.values() for name in times))
    groups = {
        each: [
            pictures.Bar(name, 0, times[each], f"{times[each]:,.0f}", _colour(name, i))
            for i, (name, times) in enumerate(by_way.items())
            if each in times
        ]
        for each in passes
    }
    shape, sizes = title_of(records[0]).split(": ", 1)
    return pictures.bars_panel(shape, sizes, "us", groups)


def _colour(name: str, number: int) -> str:
    """Grey for what the library is compared with."""
    is_ours = name.startswith("hybrid_ep")
    return pictures.COLOURS[number % len(pictures.COLOURS)] if is_ours else pictures.GREY
