"""The bench's records as a table and as charts; rich and matplotlib are used where they are."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

TEXTS = ("op", "backend", "mode", "sizing")
NUMBERS = ("ranks", "T", "H", "E", "K", "dtype", "SMs", "us [min..max]", "GB/s", "x bare")


def print_table(report: dict[str, Any]) -> None:
    """Print the records, the ceilings and what was skipped."""
    title = f"{report['device']}, {report['num_gpus']} GPU(s), commit {report['commit']}"
    rows = [_row(record) for record in report["records"]]
    names = (*TEXTS, *NUMBERS)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _print_plain(title, names, rows)
    else:
        table = Table(title=title, title_justify="left")
        for name in names:
            table.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    print("GB/s: what the busiest rank sends or receives, own tokens not counted.")
    print("x bare: time over that of the bare all_to_all_single of the same copies, in turns.")
    for name, value in report["ceilings"].items():
        print(f"ceiling {name.removesuffix('_gbps').replace('_', ' ')}: {value:.1f} GB/s")
    for reason in report["skipped"]:
        print(f"skipped: {reason}")


def _row(record: dict[str, Any]) -> list[str]:
    op = record["op"] + (" backward" if record["direction"] == "backward" else "")
    times = f"{record['us_median']:.0f} [{record['us_min']:.0f}..{record['us_max']:.0f}]"
    ratio = record["ratio_to_all_to_all"]
    return [
        op,
        record["backend"],
        record["mode"],
        record["sizing"],
        *(str(record[key]) for key in ("ranks", "tokens", "hidden", "experts", "topk", "dtype")),
        "-" if record["sms"] is None else str(record["sms"]),
        times,
        f"{record['gbps']:.1f}",
        "-" if ratio is None else f"{ratio:.2f}",
    ]


def _print_plain(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    print(title)
    for row in (names, *rows):
        cells = (
            text.ljust(width) if name in TEXTS else text.rjust(width)
            for name, text, width in zip(names, row, widths, strict=True)
        )
        print("  ".join(cells).rstrip())


# ---- charts


def plot(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``time_vs_sms.png`` and ``time_vs_tokens.png``, each where there are two points.

    Args:
        report: what ``--json`` writes.
        folder: made if missing.

    Returns:
        list: the files written.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed") from None
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        _plot_against("sms", "SMs", report, folder),
        _plot_against("tokens", "tokens per rank", report, folder),
    ]
    return [path for path in written if path is not None]


def _plot_against(key: str, label: str, report: dict[str, Any], folder: Path) -> Path | None:
    from matplotlib import pyplot

    curves = {
        name: sorted(points)
        for name, points in _curves(report["records"], key).items()
        if len(points) > 1
    }
    if not curves:
        return None
    ops = sorted({name[0] for name in curves}, reverse=True)
    figure, panels = pyplot.subplots(1, len(ops), figsize=(6.4 * len(ops), 4.8), squeeze=False)
    for op, panel in zip(ops, panels[0], strict=True):
        for name, points in curves.items():
            if name[0] == op:
                panel.plot(*zip(*points, strict=True), marker="o", label=" ".join(name[1:]))
        for text, us in _floors(report, op) if key == "sms" else ():
            panel.axhline(us, linestyle="--", linewidth=1, color="gray")
            panel.annotate(
                text,
                (0.99, us),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize="small",
            )
        panel.set(title=op, xlabel=label, ylabel="us, slowest rank", ylim=(0, None))
        panel.legend(fontsize="small")
    figure.suptitle(report["device"])
    figure.tight_layout()
    path = folder / f"time_vs_{key}.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _curves(records: Iterable[dict[str, Any]], key: str) -> dict[tuple[str, ...], list[Any]]:
    """Points of each line; whatever differs besides ``key`` makes another line."""
    records = [record for record in records if record[key] is not None]
    sizes = [k for k in ("tokens", "hidden", "experts", "topk", "dtype", "sms") if k != key]
    varying = [k for k in sizes if len({record[k] for record in records}) > 1]
    curves: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    for record in records:
        named = (record["backend"], record["mode"], record["sizing"], record["direction"])
        sized = (f"{k} {record[k]}" for k in varying if record[k] is not None)
        curves[(record["op"], *named, *sized)].append((record[key], record["us_median"]))
    return curves


def _floors(report: dict[str, Any], op: str) -> list[tuple[str, float]]:
    """Times that the measured ceilings leave for the bytes of the first shape."""
    records = [r for r in report["records"] if r["op"] == op and r["direction"] == "forward"]
    library = [r for r in records if r["sms"] is not None]
    floors = []
    rate = report["ceilings"].get("peer_copy_gbps")
    if library and rate and library[0]["nvlink_bytes"]:
        floors.append(("peer copy", library[0]["nvlink_bytes"] / rate / 1e3))
    floors += [("all_to_all", r["us_median"]) for r in records if r["backend"] == "all_to_all"][:1]
    return floors
