"""The records of overlap as tables of at most 100 columns, one per shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_ep.bench.series import alike, machine_of, tell
from hybrid_ep.output import tables

HEADER = (
    "way",
    "SMs",
    "GEMMs on",
    "alone us",
    "beside us",
    "GEMMs us",
    "both us",
    "hidden",
    "limit",
    "of limit",
)
TEXTS, KEYS = 1, 3
NAMES = {"all_to_all": "NCCL all_to_all"}
SIZES = ("tokens", "hidden", "experts", "topk", "dtype")
SAME = ("ranks", *SIZES, "gemm", "gemms")


def print_overlaps(report: dict[str, Any], skipped: Sequence[str] = ()) -> None:
    """Print the records, what the columns mean, and what was skipped.

    Args:
        report: what ``--json`` writes.
        skipped: why a way was not measured.
    """
    print(machine_of(report))
    for same in alike(report["overlaps"], SAME):
        print(products_of(same[0]))
        rows = [_row(r) for r in same]
        tables.print_table(title_of(same[0]), HEADER, rows, texts=TEXTS, keys=KEYS)
    print("way: a dispatch and a combine of the library; all_to_all: of the same copies, twice.")
    print("GEMMs on: all SMs, or the rest, those that communication leaves free.")
    print("alone, beside: communication without and beside the GEMMs. Slowest rank, medians.")
    print("both: end of the later stream. hidden: part of the shorter stream that costs no time.")
    print("limit: the most that SM time allows to hide. of limit: hidden / limit.")
    for reason in skipped:
        print(f"skipped: {reason}")


def title_of(record: dict[str, Any]) -> str:
    """The sizes in words."""
    return f"{record['ranks']} ranks, {tell(record, SIZES)}"


def products_of(record: dict[str, Any]) -> str:
    """The products in words."""
    m, k, n = record["gemm"]
    alone = record["products_alone_us"]
    return f"GEMMs: {record['gemms']} of {m} x {k} x {n}, bf16, {alone:.0f} us alone"


def name_of(record: dict[str, Any]) -> str:
    """The way in words."""
    return NAMES.get(record["way"], f"hybrid_ep {record['way']}")


def _row(record: dict[str, Any]) -> list[str]:
    times = ("communication_alone_us", "communication_us", "products_us", "both_us")
    parts = ("hidden_part", "allowed_part", "hidden_of_allowed")
    return [
        name_of(record),
        "-" if record["sms"] is None else str(record["sms"]),
        record["product_sms"],
        *(f"{record[key]:.0f}" for key in times),
        *("-" if record[key] is None else f"{record[key]:.2f}" for key in parts),
    ]
