"""Which records a picture shows, and the words for records."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from hybrid_ep.bench.options import BASELINES
from hybrid_ep.output.pictures import COLOURS, GREY

Record = dict[str, Any]

SHAPE = {
    "tokens": "{:,} tokens per rank",
    "hidden": "hidden {}",
    "experts": "{} experts",
    "topk": "top-{}",
    "dtype": "{}",
    "skew": "skew {}",
}
KINDS = ("fresh, exact size", "fresh, max_rows", "cached", "combine", "backward")
BARE = "all_to_all"
CARRIERS = {"nccl": "NCCL", "gloo": "gloo"}  # of plain torch


def alike(records: Iterable[Record], keys: Sequence[str]) -> list[list[Record]]:
    """Records that follow each other and are equal in all keys, together."""
    groups = itertools.groupby(records, lambda record: [record[key] for key in keys])
    return [list(group) for _, group in groups]


def machine_of(report: dict[str, Any]) -> str:
    """Where a report was made, and by which commit."""
    return f"{report['device']}, {report['num_gpus']} GPU(s){by_commit(report)}"


def by_commit(report: dict[str, Any]) -> str:
    """The commit behind a comma; empty where it is unknown, as of an installed package."""
    return f", commit {report['commit']}" if report["commit"] else ""


def kind_of(record: Record) -> str:
    """What a record is a time of, as far as times differ.

    The sizing of a cached dispatch and of a combine, and whether a combine follows a fresh
    dispatch, change no kernel; the table has them all.
    """
    if record["direction"] == "backward":
        return "backward"
    if record["op"] == "combine":
        return "combine"
    if record["mode"] == "cached":
        return "cached"
    return {"exact": "fresh, exact size", "max_rows": "fresh, max_rows"}[record["sizing"]]


def select(records: Iterable[Record], **values: Any) -> list[Record]:
    """The records that have these values."""
    return [r for r in records if all(r[key] == value for key, value in values.items())]


def shapes_of(records: Iterable[Record], but: str) -> list[Record]:
    """The distinct sizes of records; of these the axis is left out."""
    keys = [key for key in SHAPE if key != but]
    shapes = {tuple(record[key] for key in keys): None for record in records}
    return [dict(zip(keys, shape, strict=True)) for shape in shapes]


def tell(record: Record, keys: Iterable[str]) -> str:
    """These sizes of a record in words."""
    return ", ".join(
        SHAPE[key].format(record[key]) for key in keys if key != "skew" or record[key] > 0
    )


def series_of(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records of the library by backend and kind, one for each of these and for each size."""
    found: dict[tuple[str, str], dict[tuple[Any, ...], Record]] = {}
    order = {"fresh": 0, "cached": 1, "exact": 0, "max_rows": 1}
    library = [record for record in records if record["backend"] not in BASELINES]
    for record in sorted(library, key=lambda r: (order[r["mode"]], order[r["sizing"]])):
        places = found.setdefault((record["backend"], kind_of(record)), {})
        places.setdefault(tuple(record[key] for key in (*SHAPE, "sms")), record)
    ordered = sorted(found, key=lambda key: (key[0], KINDS.index(key[1])))
    return {key: list(found[key].values()) for key in ordered}


def name_of(backend: str, kind: str, backends: set[str]) -> str:
    """The kind, behind its backend where several were measured."""
    return kind if len(backends) == 1 else f"{backend}: {kind}"


def call_of(record: Record) -> str:
    """The op and its direction, in words."""
    backward = ", backward" if record["direction"] == "backward" else ""
    return f"{record['op'].capitalize()}{backward}"


def name_of_baseline(backend: str) -> str:
    """One of ``BASELINES`` in words."""
    return "bare all_to_all" if backend == BARE else f"plain torch over {CARRIERS[backend]}"


def colour_of(rank: int | None) -> str:
    """Of the series of this number; None is what they are compared with."""
    return GREY if rank is None else COLOURS[rank % len(COLOURS)]
