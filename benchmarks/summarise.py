"""The reports of benchmarks/run_host.sh as one table.

python3 benchmarks/summarise.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLUMNS = ("op", "mode", "ranks", "dtype", "SMs", "us", "fastest rank", "of ceiling", "NCCL way")


def rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each of our own records, with how much slower the plain way was in that run."""
    records = report["records"]
    plain = {
        (r["op"], r["dtype"]): r["us_median"] for r in records if r["backend"] in ("nccl", "gloo")
    }
    made = []
    for r in records:
        if r["backend"] not in ("nvlink", "torch"):
            continue
        slower = plain.get((r["op"], r["dtype"]))
        fraction = r["ceiling_fraction"]
        made.append(
            (
                r["op"],
                r["mode"],
                str(r["ranks"]),
                r["dtype"],
                "-" if r["sms"] is None else str(r["sms"]),
                f"{r['us_median']:.0f} [{r['us_min']:.0f}..{r['us_max']:.0f}]",
                f"{r['us_fastest_rank']:.0f}",
                "-" if fraction is None else f"{fraction:.2f}",
                "-" if slower is None else f"{slower / r['us_median']:.1f} x",
            )
        )
    return made


def main() -> None:
    """Print a Markdown table of all reports in the folder."""
    reports = [json.loads(path.read_text()) for path in sorted(Path(sys.argv[1]).glob("ep*.json"))]
    if not reports:
        sys.exit(f"no report in {sys.argv[1]}")
    for report in reports:
        print(f"{report['device']}, {report['num_gpus']} GPU(s), commit {report['commit']}: ")
        print(f"`{report['command']}`\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{' --- |' * len(COLUMNS)}")
    for report in reports:
        for row in rows(report):
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
