"""The records of layers as tables of at most 100 columns, one per shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_ep.bench.series import alike, machine_of
from hybrid_ep.output import tables

HEADER = ("layer", "pass", "sizing", "SMs", "us [min..max]", "communication", "TFLOP/s", "peak MB")
TEXTS, KEYS = 3, 4
NAMES = {
    "experts": "experts alone",
    "products": "products alone",
    "nccl": "plain torch NCCL",
    "gloo": "plain torch gloo",
}
SAME = ("shape", "tokens", "hidden", "ffn_hidden", "experts", "topk", "dtype", "ranks", "weight_at")


def print_layers(report: dict[str, Any], skipped: Sequence[str] = ()) -> None:
    """Print the records, what the columns mean, and what was skipped.

    Args:
        report: what ``--json`` writes.
        skipped: why a way was not measured.
    """
    print(machine_of(report))
    for same in alike(report["layers"], SAME):
        rows = [_row(r) for r in same]
        tables.print_table(title_of(same[0]), HEADER, rows, texts=TEXTS, keys=KEYS)
    print("step: forward, backward and SGD of the router and the experts. Slowest rank, median.")
    print("communication: share of the time beyond the experts alone (routing, moving, summing).")
    print("TFLOP/s: of the experts' products, per rank, over the time of the pass.")
    print("peak MB: allocated in a forward and its backward, beyond tokens and weights.")
    places = dict.fromkeys(record["weight_at"] for record in report["layers"])
    print(f"The weights of a token's experts enter at the {', '.join(places)}.")
    for reason in skipped:
        print(f"skipped: {reason}")


def title_of(record: dict[str, Any]) -> str:
    """The sizes in words."""
    return (
        f"{record['shape']}: {record['ranks']} ranks, {record['tokens']:,} tokens per rank, hidden "
        f"{record['hidden']}, ffn {record['ffn_hidden']}, {record['experts']} experts, "
        f"top-{record['topk']}, {record['dtype']}"
    )


def name_of(record: dict[str, Any]) -> str:
    """The way in words."""
    return NAMES.get(record["way"], f"hybrid_ep {record['way']}")


def _row(record: dict[str, Any]) -> list[str]:
    share, peak = record["communication_share"], record["peak_bytes"]
    tflops = record["tflops"]
    return [
        name_of(record),
        record["pass"],
        record["sizing"],
        "-" if record["sms"] is None else str(record["sms"]),
        f"{record['us_median']:.0f} [{record['us_min']:.0f}..{record['us_max']:.0f}]",
        "-" if share is None else f"{share:.0%}",
        f"{tflops:.1f}" if tflops >= 1 else f"{tflops:.4f}",
        "-" if peak is None else f"{peak / 1e6:.0f}",
    ]
