#!/usr/bin/env python3
"""Writes the figures of README.md from benchmarks/results: what lies between its two marks.

A mark names the file of results that the lines below it are made from. With --check, fails if
README.md has other lines.
"""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import wrap_markdown  # noqa: E402

README = ROOT / "README.md"
RESULTS = "benchmarks/results"
BEGIN, END = "<!-- tools/readme_figures.py, from {} -->", "<!-- end of figures -->"
SMS = (16, 32, 48)

# A row of the table: its label, and what the records of the library have.
DISPATCH = {"op": "dispatch", "dtype": "bf16", "mode": "fresh"}
COMBINE = {"op": "combine", "dtype": "bf16", "mode": "fresh", "sizing": "exact"}
ROWS = (
    ("dispatch, `max_rows`; 16 experts", {**DISPATCH, "sizing": "max_rows", "experts": 16}),
    ("dispatch, exact size", {**DISPATCH, "sizing": "exact", "experts": 16}),
    ("dispatch, cached", {**DISPATCH, "sizing": "exact", "mode": "cached", "experts": 16}),
    ("combine", {**COMBINE, "experts": 16}),
    ("dispatch, `max_rows`; 256 experts", {**DISPATCH, "sizing": "max_rows", "experts": 256}),
    ("combine; 256 experts", {**COMBINE, "experts": 256}),
    ("dispatch of fp8, `max_rows`; 16 experts", {
        **DISPATCH, "dtype": "fp8", "sizing": "max_rows", "experts": 16,
    }),
)  # fmt: skip


def main() -> None:
    text = README.read_text()
    made = update(text)
    if sys.argv[1:] == ["--check"]:
        if made != text:
            sys.exit("README.md has other figures than benchmarks/results: tools/readme_figures.py")
        return
    README.write_text(made)


def update(text: str) -> str:
    """The README with its figures made again."""
    for name, make in MAKERS.items():
        begin = BEGIN.format(f"{RESULTS}/{name}")
        report = json.loads((ROOT / RESULTS / name).read_text())
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(END)}", re.DOTALL)
        lines = wrap_markdown.wrap("\n".join(make(report)))
        whole_part = f"{begin}\n\n{lines}\n\n{END}"
        text, count = pattern.subn(lambda _, made=whole_part: made, text)
        if count != 1:
            raise ValueError(f"README.md must have one mark {begin}, got {count}")
    return text


def times(report: dict[str, Any]) -> list[str]:
    """Of dispatch and combine, beside plain torch over NCCL and the bare exchange."""
    records = [r for r in report["records"] if r["direction"] == "forward"]
    head = [*(f"{sms} SMs" for sms in SMS), "NCCL way", "NCCL way / 48 SMs", "bare all_to_all"]
    lines = [row(["call, us", *head]), row(["---"] * (1 + len(head)))]
    for label, wanted in ROWS:
        ours = [us(only(records, backend="nvlink", sms=sms, **wanted)) for sms in SMS]
        shape = {key: wanted[key] for key in ("op", "dtype", "experts")}
        plain = us(only(records, backend="nccl", **shape)) if wanted["mode"] == "fresh" else None
        bare = us(only(records, backend="all_to_all", **shape))
        ratio = f"{plain / ours[-1]:.1f}" if plain and ours[-1] else "-"
        cells = (*map(whole, (*ours, plain)), ratio, whole(bare))
        lines.append(row([label, *cells]))
    first, ceilings = records[0], report["ceilings"]
    most = str(SMS[-1])
    pull, push = ceilings["pull_gbps"][most], ceilings["push_gbps"][most]
    megabytes = first["nvlink_bytes"] / 1e6
    return [
        f"{report['num_gpus']} {report['device']} joined by NVLink, {first['tokens']:,} tokens per "
        f"rank, hidden {first['hidden']}, top-{first['topk']}, bf16 unless named, weights along, "
        "uniform routing; median us of the slowest rank. Measured with "
        f"`{without_commit(report['command'])}`; the "
        f"[records]({RESULTS}/h200x2.json) name the commit.",
        "",
        *lines,
        "",
        f"Floors: {megabytes:.1f} MB cross the link each way. At the measured rates of TMA, "
        f"{pull:.0f} GB/s to pull and {push:.0f} to push, a dispatch takes at least "
        f"{megabytes / pull * 1e3:.0f} us and a combine {megabytes / push * 1e3:.0f}.",
    ]


def ratios(report: dict[str, Any]) -> list[str]:
    """Of hybrid_ep's time to that of DeepEP's branch hybrid-ep."""
    records = report["records"]
    columns = [(experts, sms) for experts in (16, 256) for sms in (24, 48)]
    lines = [
        row(["time / time of the branch", *(f"{e} experts, {sms} SMs" for e, sms in columns)]),
        row(["---"] * (1 + len(columns))),
    ]
    for call in dict.fromkeys(record["call"] for record in records):
        found = [only(records, call=call, experts=e, sms=sms) for e, sms in columns]
        lines.append(row([call, *(f"{record['ratio']:.2f}" for record in found)]))
    return [*lines, "", report["setting"]]


MAKERS = {"beside_deep_ep.json": ratios, "h200x2.json": times}


def only(records: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """The record that has these values; None if there is none."""
    found = [r for r in records if all(r[key] == value for key, value in wanted.items())]
    if len(found) > 1:
        raise ValueError(f"{len(found)} records have {wanted}")
    return found[0] if found else None


def us(record: dict[str, Any] | None) -> float | None:
    return record and record["us_median"]


def whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def without_commit(command: str) -> str:
    """A command as a reader would type it: git knows the commit."""
    words = shlex.split(command)
    if "--commit" in words:
        at = words.index("--commit")
        del words[at : at + 2]
    return shlex.join(words)


if __name__ == "__main__":
    main()
