"""The records as tables: one per op, a row per way, a column per number of SMs (or of tokens)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hybrid_ep.bench.details import print_details
from hybrid_ep.bench.fits import fits
from hybrid_ep.bench.options import BASELINES
from hybrid_ep.bench.series import BARE, CARRIERS, SHAPE, Record, call_of, machine_of
from hybrid_ep.output import tables

SIZES = {
    "ranks": "{} ranks",
    **SHAPE,
    "align": "align {}",
    "weighted": "weighted {}",
    "sms": "{} SMs",
}
USUAL = {"skew": 0, "align": 1, "weighted": False}  # not worth a word
COLUMNS = {"sms": "{} SMs", "tokens": "{:,} tokens"}
NO_SMS = "default SMs"  # of ways that are told no number
NOTES = (
    "Median us of the slowest rank. fresh: with its routing; cached: an earlier routing again.",
    "exact: the host waits for the number of rows; max_rows: a bound, and no wait.",
)
GROWTH = ("call", "way", "routing", "size", "fixed us", "then GB/s", "most growth of us / of bytes")


def print_table(
    report: dict[str, Any], skipped: Sequence[str] = (), *, details: bool = False
) -> None:
    """Print the times, the ceilings, the growth by tokens, and what was skipped.

    Args:
        report: what ``--json`` writes.
        skipped: why a backend was not measured.
        details: also print all that is known of each call, and its phases.
    """
    records = _named(report["records"])
    axis = _axis(records)
    constant, varying = _sizes(records, axis)
    where = machine_of(report)
    print("; ".join((where, constant)) if constant else where)
    for note in (*NOTES, *_ways(records)):
        print(note)
    print()
    for title, of_call in _by_call(records).items():
        _print_times(title, of_call, axis, varying)
    for line in _ceilings(report["ceilings"]):
        print(line)
    print()
    if growth := list(_growth(records)):
        title = "time by tokens: a fixed part, and a rate"
        tables.print_table(title, GROWTH, growth, texts=4, keys=4)
    if details:
        print_details(report["records"])
    for reason in skipped:
        print(f"skipped: {reason}")


def _named(records: Iterable[Record]) -> list[Record]:
    """The records with their ``way``, which tells the library's backend where it must."""
    records = list(records)
    ours = {record["backend"] for record in records if record["backend"] not in BASELINES}

    def way(backend: str) -> str:
        if backend in BASELINES:
            return backend if backend == BARE else "plain torch"
        return "hybrid_ep" if len(ours) == 1 else f"hybrid_ep {backend}"

    return [{**record, "way": way(record["backend"])} for record in records]


def _ways(records: Iterable[Record]) -> Iterator[str]:
    """What the short names of the ways mean."""
    meanings = {
        "all_to_all": "the bare exchange of the same copies",
        "plain torch": "sort, exchange and sum over {}",
        "hybrid_ep": "its {} backend",
    }
    named = {record["way"]: record["backend"] for record in records}
    for way, backend in named.items():
        if way in meanings:
            yield f"{way}: {meanings[way].format(CARRIERS.get(backend, backend))}."


def _axis(records: Sequence[Record]) -> str:
    """What the columns are: SMs, or tokens where these vary and SMs do not."""
    is_sweep = len(_values(records, "tokens")) > 1 and len(_values(records, "sms")) <= 1
    return "tokens" if is_sweep else "sms"


def _sizes(records: Sequence[Record], axis: str) -> tuple[str, list[str]]:
    """Besides the axis: the sizes that all records share, in words, and the names of the others."""
    values = {key: _values(records, key) for key in SIZES if key != axis}
    shared = (
        SIZES[key].format(found[0])
        for key, found in values.items()
        if len(found) == 1 and found[0] != USUAL.get(key)
    )
    return ", ".join(shared), [key for key, found in values.items() if len(found) > 1]


def _values(records: Iterable[Record], key: str) -> list[Any]:
    """The distinct ones; a way that has none takes no part."""
    return list(dict.fromkeys(r[key] for r in records if r.get(key) is not None))


def _by_call(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Forward before backward, dispatch before combine."""
    found: dict[str, list[Record]] = {}
    order = {"forward": 0, "backward": 2, "dispatch": 0, "combine": 1}
    for record in sorted(records, key=lambda r: order[r["direction"]] + order[r["op"]]):
        found.setdefault(call_of(record), []).append(record)
    return found


def _print_times(call: str, records: list[Record], axis: str, varying: list[str]) -> None:
    columns: list[Any] = sorted(_values(records, axis))
    if any(record[axis] is None for record in records):
        columns = [None, *columns]
    rows: dict[tuple[str, ...], dict[Any, str]] = {}
    for record in records:
        sizes = (f"{record[key]:,}" if key == "tokens" else str(record[key]) for key in varying)
        key = (record["way"], record["mode"], record["sizing"], *sizes)
        rows.setdefault(key, {})[record[axis]] = f"{record['us_median']:,.0f}"
    names = [NO_SMS if value is None else COLUMNS[axis].format(value) for value in columns]
    keys = ("way", "routing", "size", *varying)
    tables.print_table(
        f"{call}, us",
        (*keys, *(names if names != [NO_SMS] else ["us"])),
        [[*key, *(times.get(value, "-") for value in columns)] for key, times in rows.items()],
        texts=3,
        keys=len(keys),
    )


def _growth(records: Iterable[Record]) -> Iterator[list[str]]:
    for record, (fixed_us, gbps, most_growth) in fits(records):
        words = [call_of(record), record["way"], record["mode"], record["sizing"]]
        yield [*words, f"{fixed_us:.0f}", f"{gbps:.0f}", f"{most_growth:.2f}"]


def _ceilings(ceilings: dict[str, Any]) -> Iterator[str]:
    for name, rate in ceilings.items():
        told = f"ceiling {name.removesuffix('_gbps').replace('_', ' ')}:"
        if isinstance(rate, dict):
            rates = ", ".join(f"{gbps:.1f} on {sms}" for sms, gbps in rate.items())
            yield f"{told} GB/s by SMs: {rates}"
        else:
            yield f"{told} {rate:.1f} GB/s"
