"""The records as one picture: a row per question, dispatch on the left, combine on the right.

Time against SMs and against tokens, with the bare all_to_all and the floor as lines; the ways
beside each other as bars; the phases of a call. Few curves: ``kind_of`` says which times differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid_ep.bench.curves import AXES, OPS, alike_shapes, curves_panel
from hybrid_ep.bench.options import BASELINES
from hybrid_ep.bench.series import (
    SHAPE,
    Record,
    by_commit,
    colour_of,
    name_of,
    name_of_baseline,
    select,
    series_of,
    shapes_of,
    tell,
)
from hybrid_ep.output import pictures
from hybrid_ep.output.pictures import COLOURS, GREY, Bar, Panel


def plot(report: dict[str, Any], path: Path) -> bool:
    """Write the panels that have something to show.

    Args:
        report: what ``--json`` writes.
        path: of the picture; its folder is made if missing.

    Returns:
        bool: whether there was anything to draw.

    Raises:
        ValueError: matplotlib is not installed.
    """
    records = report["records"]
    rows = [row for row in _rows(records) if any(row)]
    if not rows:
        return False
    used = [any(row[op] for row in rows) for op in range(len(OPS))]
    rows = [[panel for panel, is_used in zip(row, used, strict=True) if is_used] for row in rows]
    machine = f"{report['num_gpus']} x " if report["num_gpus"] else ""
    machine += f"{report['device']}, {records[0]['ranks']} ranks"
    title = f"hybrid_ep on {machine}{by_commit(report)}: median time of the slowest rank"
    pictures.write_panels(rows, title, path)
    return True


def _rows(records: list[Record]) -> Iterator[list[Panel | None]]:
    for axis in AXES:
        for shapes in alike_shapes(records, axis):
            yield [curves_panel(records, axis, op, shapes) for op in OPS]
    if len({record["tokens"] for record in records}) == 1:
        yield [_bars_panel(select(records, op=op), op) for op in OPS]
    yield [_phases_panel(select(records, op=op, mode="fresh"), op) for op in OPS]


def _bars_panel(records: list[Record], op: str) -> Panel | None:
    """The ways beside each other, by shape, on the most SMs."""
    shapes = shapes_of(records, but="")
    varying = [key for key in SHAPE if len({shape[key] for shape in shapes}) > 1]
    groups = {tell(shape, varying): _bars(select(records, **shape)) for shape in shapes}
    if not any(bar.colour == GREY for bars in groups.values() for bar in bars):
        return None  # one way alone
    constant = tell(records[0], (key for key in SHAPE if key not in varying))
    return pictures.bars_panel(f"{op.capitalize()} beside plain torch", constant, "us", groups)


def _bars(records: list[Record]) -> list[Bar]:
    series = series_of(records)
    backends = {backend for backend, _ in series}
    timed = [
        (name_of_baseline(record["backend"]), record["us_median"], GREY)
        for record in reversed(records)  # the slowest baseline first
        if record["backend"] in BASELINES and record["direction"] == "forward"
    ]
    for rank, ((backend, kind), of_kind) in enumerate(series.items()):
        most = max(of_kind, key=lambda r: r["sms"] or 0)
        on = f", {most['sms']} SMs" if most["sms"] is not None else ""
        timed.append((name_of(backend, kind, backends) + on, most["us_median"], colour_of(rank)))
    return [Bar(name, 0, us, f"{us:,.0f}", colour) for name, us, colour in timed]


def _phases_panel(records: list[Record], op: str) -> Panel | None:
    """The phases of one fresh call: most tokens, most SMs, with a bound where it was measured."""
    traced = [record for record in records if record.get("phases_us")]
    if not traced:
        return None
    most = max((record["tokens"], record["sms"]) for record in traced)
    traced = [record for record in traced if (record["tokens"], record["sms"]) == most]
    record = next((r for r in traced if r["sizing"] == "max_rows"), traced[0])
    is_timeline = bool(record.get("phase_begins_us"))
    what = "timeline of the phases" if is_timeline else "phases, which overlap"
    kind = {"max_rows": "with max_rows", "exact": "of exact size"}[record["sizing"]]
    kind = f"fresh {kind}, " if op == "dispatch" else ""
    return pictures.bars_panel(
        f"{op.capitalize()}, {kind}{record['sms']} SMs: {what}",
        tell(record, SHAPE),
        "us from the first block's begin" if is_timeline else "us that a phase lasts",
        {"": phase_bars(record)},
    )


def phase_bars(record: Record) -> list[Bar]:
    """A bar per phase, from its begin to its end; from 0 on in a report that has no begins.

    A wait has no place of its own: its bar begins where the first block waits and is as long as the
    block that waited longest waited.
    """
    begins = record.get("phase_begins_us") or {}
    return [
        Bar(
            name,
            begins.get(name, 0.0),
            begins.get(name, 0.0) + us,
            f"{us:,.0f}",
            GREY if name.startswith("wait") else COLOURS[0],
        )
        for name, us in record["phases_us"].items()
    ]
