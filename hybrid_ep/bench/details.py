"""All that is known of each call, in a line of a table, and its phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hybrid_ep.bench.series import Record
from hybrid_ep.output import tables

TEXTS = ("op", "backend", "mode", "sizing")  # as in the JSON
SIZES = ("T", "H", "E", "K", "dtype", "SMs")
NUMBERS = (
    "us [min..max]",
    "ranks' us",
    "kernels us",
    "on SMs",
    "host us",
    "GB/s",
    "of ceiling",
    "x bare",
)
NOTES = (
    "ranks' us: medians of the fastest and of the slowest rank.",
    "kernels us: from the first block to the last, by the GPU, traced in other calls.",
    "on SMs: how many SMs they ran on, routing's short kernels among them.",
    "host us: how long a call among others held the host; - where it waits for the GPU.",
    "GB/s: what the busiest rank sends or receives, own tokens not counted.",
    "x bare: time over that of the bare all_to_all_single of the same copies, in turns.",
)


def print_details(records: Sequence[Record]) -> None:
    """Print a line for each record, what the columns mean, and the phases of fresh calls."""
    _print("details", (*TEXTS, *SIZES, *NUMBERS), [_row(record) for record in records])
    for note in NOTES:
        print(note)
    print()
    if phases := list(_phases(records)):
        _print("phases of a fresh call, us", (*TEXTS, *SIZES, "phases"), phases, texts=None)


def _print(
    title: str, header: Sequence[str], rows: tables.Rows, texts: int | None = len(TEXTS)
) -> None:
    names, rows, constants = tables.drop_constants(header, rows, SIZES)
    keys = sum(name in (*TEXTS, *SIZES) for name in names)
    title = f"{title}; {constants}" if constants else title
    tables.print_table(title, names, rows, texts=texts, keys=keys)


def _phases(records: Iterable[Record]) -> Iterator[list[str]]:
    for record in records:
        if record["mode"] == "fresh" and record.get("phases_us"):
            phases = ", ".join(f"{name} {us:.0f}" for name, us in record["phases_us"].items())
            yield [*_keys(record), phases]


def _keys(record: Record) -> list[str]:
    op = record["op"] + (" backward" if record["direction"] == "backward" else "")
    words = [op, *(record[key] for key in TEXTS[1:])]
    sizes = (str(record[key]) for key in ("tokens", "hidden", "experts", "topk", "dtype"))
    return [*words, *sizes, _number(record, "sms", 0)]


def _row(record: Record) -> list[str]:
    times = f"{record['us_median']:.0f} [{record['us_min']:.0f}..{record['us_max']:.0f}]"
    of_ranks = "..".join(f"{us:.0f}" for us in record.get("rank_spread_us", ()))
    return [
        *_keys(record),
        times,
        of_ranks or "-",
        _number(record, "kernels_us", 0),
        _number(record, "sms_occupied", 0),
        _number(record, "host_us", 0),
        _number(record, "gbps", 1),
        _number(record, "ceiling_fraction", 2),
        _number(record, "ratio_to_all_to_all", 2),
    ]


def _number(record: Record, key: str, digits: int) -> str:
    return "-" if record.get(key) is None else f"{record[key]:.{digits}f}"
