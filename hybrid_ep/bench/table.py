"""The records as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hybrid_ep.bench.fits import fits
from hybrid_ep.output import tables

TEXTS = ("op", "backend", "mode", "sizing")
SIZES = ("ranks", "T", "H", "E", "K", "dtype", "SMs")
NUMBERS = (
    *SIZES,
    *(
        "us [min..max]",
        "ranks' us",
        "kernels us",
        "on SMs",
        "host us",
        "GB/s",
        "of ceiling",
        "x bare",
    ),
)
PHASES = (*TEXTS, *SIZES, "phases")
GROWTH = (*TEXTS, *SIZES, "fixed us", "then GB/s", "most growth of us / of bytes")


def print_table(report: dict[str, Any], skipped: Sequence[str] = ()) -> None:
    """Print the records, the ceilings, what can be said of phases and of growth, what was skipped.

    Args:
        report: what ``--json`` writes.
        skipped: why a backend was not measured.
    """
    title = f"{report['device']}, {report['num_gpus']} GPU(s), commit {report['commit']}"
    rows = [_row(record) for record in report["records"]]
    _print(title, (*TEXTS, *NUMBERS), rows)
    print("ranks' us: medians of the fastest and of the slowest rank.")
    print("kernels us: from the first block to the last, by the GPU, traced in other calls.")
    print("on SMs: how many SMs they ran on, routing's short kernels among them.")
    print("host us: how long a call among others held the host; - where it waits for the GPU.")
    print("GB/s: what the busiest rank sends or receives, own tokens not counted.")
    print("x bare: time over that of the bare all_to_all_single of the same copies, in turns.")
    for line in _ceilings(report["ceilings"]):
        print(line)
    print()
    if phases := list(_phases(report["records"])):
        _print("phases of a fresh call, us", PHASES, phases, texts=None)
    if growth := list(_growth(report["records"])):
        _print("time by tokens: a fixed part, and a rate", GROWTH, growth)
    for reason in skipped:
        print(f"skipped: {reason}")


def _print(
    title: str, header: Sequence[str], rows: tables.Rows, texts: int | None = len(TEXTS)
) -> None:
    """A table, whose constant sizes are in its title."""
    names, rows, constants = tables.drop_constants(header, rows, SIZES)
    keys = sum(name in (*TEXTS, *SIZES) for name in names)
    title = f"{title}; {constants}" if constants else title
    tables.print_table(title, names, rows, texts=texts, keys=keys)


def _phases(records: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for record in records:
        if record["mode"] == "fresh" and record.get("phases_us"):
            phases = ", ".join(f"{name} {us:.0f}" for name, us in record["phases_us"].items())
            yield [*_texts(record), *_sizes(record), phases]


def _growth(records: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for record, (fixed_us, gbps, most_growth) in fits(records):
        sizes = _sizes({**record, "tokens": "all"})
        yield [*_texts(record), *sizes, f"{fixed_us:.0f}", f"{gbps:.0f}", f"{most_growth:.2f}"]


def _ceilings(ceilings: dict[str, Any]) -> Iterator[str]:
    for name, rate in ceilings.items():
        told = f"ceiling {name.removesuffix('_gbps').replace('_', ' ')}:"
        if isinstance(rate, dict):
            rates = ", ".join(f"{gbps:.1f} on {sms}" for sms, gbps in rate.items())
            yield f"{told} GB/s by SMs: {rates}"
        else:
            yield f"{told} {rate:.1f} GB/s"


def _texts(record: dict[str, Any]) -> list[str]:
    op = record["op"] + (" backward" if record["direction"] == "backward" else "")
    return [op, *(record[key] for key in ("backend", "mode", "sizing"))]


def _sizes(record: dict[str, Any]) -> list[str]:
    keys = ("ranks", "tokens", "hidden", "experts", "topk", "dtype")
    return [*(str(record[key]) for key in keys), _number(record, "sms", 0)]


def _number(record: dict[str, Any], key: str, digits: int) -> str:
    return "-" if record.get(key) is None else f"{record[key]:.{digits}f}"


def _row(record: dict[str, Any]) -> list[str]:
    times = f"{record['us_median']:.0f} [{record['us_min']:.0f}..{record['us_max']:.0f}]"
    of_ranks = "..".join(f"{us:.0f}" for us in record.get("rank_spread_us", ()))
    return [
        *_texts(record),
        *_sizes(record),
        times,
        of_ranks or "-",
        _number(record, "kernels_us", 0),
        _number(record, "sms_occupied", 0),
        _number(record, "host_us", 0),
        _number(record, "gbps", 1),
        _number(record, "ceiling_fraction", 2),
        _number(record, "ratio_to_all_to_all", 2),
    ]
