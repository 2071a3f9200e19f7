"""The records as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hybrid_ep import tables

TEXTS = ("op", "backend", "mode", "sizing")
NUMBERS = (
    *("ranks", "T", "H", "E", "K", "dtype", "SMs"),
    *("us [min..max]", "host us", "GB/s", "of ceiling", "x bare"),
)


def print_table(report: dict[str, Any], skipped: Sequence[str] = ()) -> None:
    """Print the records, the ceilings and what was skipped."""
    title = f"{report['device']}, {report['num_gpus']} GPU(s), commit {report['commit']}"
    rows = [_row(record) for record in report["records"]]
    tables.print_table(title, (*TEXTS, *NUMBERS), rows, texts=len(TEXTS))
    print("GB/s: what the busiest rank sends or receives, own tokens not counted.")
    print("host us: how long the call held the host; - where the host waits for the GPU in it.")
    print("x bare: time over that of the bare all_to_all_single of the same copies, in turns.")
    for line in _ceilings(report["ceilings"]):
        print(line)
    for reason in skipped:
        print(f"skipped: {reason}")


def _ceilings(ceilings: dict[str, Any]) -> Iterator[str]:
    for name, rate in ceilings.items():
        told = f"ceiling {name.removesuffix('_gbps').replace('_', ' ')}:"
        if isinstance(rate, dict):
            rates = ", ".join(f"{gbps:.1f} on {sms}" for sms, gbps in rate.items())
            yield f"{told} GB/s by SMs: {rates}"
        else:
            yield f"{told} {rate:.1f} GB/s"


def _row(record: dict[str, Any]) -> list[str]:
    op = record["op"] + (" backward" if record["direction"] == "backward" else "")
    times = f"{record['us_median']:.0f} [{record['us_min']:.0f}..{record['us_max']:.0f}]"

    def number(key: str, digits: int) -> str:
        return "-" if record[key] is None else f"{record[key]:.{digits}f}"

    return [
        op,
        *(record[key] for key in ("backend", "mode", "sizing")),
        *(str(record[key]) for key in ("ranks", "tokens", "hidden", "experts", "topk", "dtype")),
        number("sms", 0),
        times,
        number("host_us", 0),
        number("gbps", 1),
        number("ceiling_fraction", 2),
        number("ratio_to_all_to_all", 2),
    ]
