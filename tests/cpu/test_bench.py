"""The bench's bytes, counted again by hand, and what it prints and writes. No times are judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_ep import bench, bench_report
from hybrid_ep.__main__ import main
from tests.launch import Pool, Rank

TINY = bench.Options(
    backends=("torch",),
    tokens=(16,),
    hidden=(64,),
    experts=(8,),
    topk=(2,),
    iters=2,
    warmup=1,
)
RECORD = {
    "op": str,
    "backend": str,
    "mode": str,
    "direction": str,
    "sizing": str,
    "dtype": str,
    "ranks": int,
    "tokens": int,
    "hidden": int,
    "experts": int,
    "topk": int,
    "skew": float,
    "us_median": float,
    "us_min": float,
    "us_max": float,
    "nvlink_bytes": int,
    "gbps": float,
}


def measure(me: Rank, options: bench.Options) -> dict[str, Any]:
    return bench.measure(me.device, options)


def count_by_hand(shape: bench.Shape, num_ranks: int, copy_bytes: int) -> int:
    """Bytes of the busiest rank, token by token; mean of the input sets."""
    total = 0
    for index in range(bench.NUM_INPUTS):
        sent, received = [0] * num_ranks, [0] * num_ranks
        for source in range(num_ranks):
            for experts in bench.make_topk(shape, source, index).tolist():
                targets = {e // (shape.experts // num_ranks) for e in experts if e >= 0}
                for target in targets - {source}:
                    sent[source] += 1
                    received[target] += 1
        total += max(sent + received) * copy_bytes
    return round(total / bench.NUM_INPUTS)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        pytest.param(2, TINY, id="bf16"),
        pytest.param(2, replace(TINY, dtypes=("fp8",), skew=1.0), id="fp8_skewed"),
        pytest.param(3, replace(TINY, experts=(9,), topk=(3,), weighted=True), id="3_ranks"),
    ],
)
def test_bytes(world: Callable[[int], Pool], num_ranks: int, options: bench.Options) -> None:
    reports = world(num_ranks).run(measure, options)
    assert all(report == reports[0] for report in reports)
    (shape,) = options.shapes()
    copy_bytes = {"dispatch": 64 + 4 if shape.dtype == "fp8" else 128, "combine": 128}
    for record in reports[0]["records"]:
        if record["backend"] == "sort_all_to_all":
            continue  # it sends a row for each expert
        op = "combine" if record["direction"] == "backward" else record["op"]
        wanted = count_by_hand(shape, num_ranks, copy_bytes[op])
        assert record["nvlink_bytes"] == wanted > 0, record


def test_records(world: Callable[[int], Pool]) -> None:
    report = world(2).run(measure, TINY)[0]
    kinds = [
        (r["backend"], r["op"], r["mode"], r["direction"], r["sizing"]) for r in report["records"]
    ]
    assert len(kinds) == len(set(kinds)), "no setting twice"
    library = [kind[1:] for kind in kinds if kind[0] == "torch"]
    for sizing in bench.SIZINGS:
        assert ("dispatch", "fresh", "forward", sizing) in library
        for op in ("dispatch", "combine"):
            assert (op, "cached", "forward", sizing) in library
            assert (op, "cached", "backward", sizing) in library
    assert {kind[:2] for kind in kinds if kind[0] != "torch"} == {
        (backend, op) for backend in bench.BASELINES for op in ("dispatch", "combine")
    }
    for record in report["records"]:
        assert record["us_min"] <= record["us_median"] <= record["us_max"]
        assert record["ratio_to_all_to_all"] > 0
        assert record["ceiling_fraction"] > 0
        assert (record["max_rows"] is None) == (record["sizing"] == "exact")
        assert record["sms"] is None, "the torch backend uses none"


def test_one_rank(world: Callable[[int], Pool]) -> None:
    records = world(1).run(measure, TINY)[0]["records"]
    assert {record["nvlink_bytes"] for record in records} == {0}


def test_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.json"
    sizes = "--tokens 8 16 --hidden 32 --experts 4 --topk 2 --iters 1 --warmup 0 --sizing exact"
    asked = ["bench", "--ranks", "2", "--backend", "torch", "--device", "cpu", *sizes.split()]
    assert main([*asked, "--json", str(path), "--plot", str(tmp_path / "charts")]) == 0
    report = json.loads(path.read_text())
    assert {"device", "num_gpus", "torch", "commit", "command", "skipped"} <= report.keys()
    assert report["num_gpus"] == 0
    assert report["ceilings"]["memory_copy_gbps"] > 0
    for record in report["records"]:
        for key, kind in RECORD.items():
            assert isinstance(record[key], kind), (key, record[key])
    printed = capfd.readouterr().out
    for text in ("dispatch", "combine backward", "all_to_all", "fresh", "x bare", "ceiling memory"):
        assert text in printed
    assert [each.name for each in (tmp_path / "charts").iterdir()] == ["time_vs_tokens.png"]


def test_plain_table_says_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {
        **dict.fromkeys(RECORD, 1),
        **{key: key for key, kind in RECORD.items() if kind is str},
        **{"sms": 24, "ratio_to_all_to_all": 1.5, "us_median": 12.0, "us_min": 3.0, "us_max": 45.0},
    }
    machine = {"device": "a GPU", "num_gpus": 1, "commit": "abc"}
    report = {**machine, "records": [record], "ceilings": {}, "skipped": ["nvlink: no GPU"]}
    monkeypatch.setitem(__import__("sys").modules, "rich", None)
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    bench_report.print_table(report)
    printed = capsys.readouterr().out
    for text in ("us [min..max]", "12 [3..45]", "24", "1.50", "skipped: nvlink: no GPU"):
        assert text in printed


def test_charts_against_sms(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shape = bench.Shape(16, 64, 8, 2, "bf16")
    common = {
        **bench.asdict(shape),
        "mode": "fresh",
        "sizing": "exact",
        "direction": "forward",
        "nvlink_bytes": 10**6,
    }
    records = [
        {**common, "op": op, "backend": "nvlink", "sms": sms, "us_median": 100.0 / sms}
        for op in ("dispatch", "combine")
        for sms in (8, 16)
    ]
    records.append(
        {**common, "op": "combine", "backend": "all_to_all", "sms": None, "us_median": 9}
    )
    report = {"device": "a GPU", "records": records, "ceilings": {"peer_copy_gbps": 300.0}}
    assert [path.name for path in bench_report.plot(report, tmp_path)] == ["time_vs_sms.png"]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"experts": (7,)}, "experts must divide by 2 ranks, got 7"),
        ({"topk": (9,)}, "topk must not exceed 8"),
        ({"hidden": (4,)}, "multiple of 16 bytes"),
        ({"backends": ("quick",)}, "backend must be one of"),
        ({"iters": 0}, "iters and align must be at least 1"),
        ({"tokens": (0,)}, "tokens must be at least 1"),
    ],
)
def test_mistakes(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        replace(TINY, **change).check(2)


def test_routing_is_skewed_and_repeatable() -> None:
    shape = bench.Shape(512, 64, 16, 4, "bf16", skew=1.2)
    topk_idx = bench.make_topk(shape, 1, 2)
    assert torch.equal(topk_idx, bench.make_topk(shape, 1, 2))
    assert (topk_idx.sort(dim=1).values.diff(dim=1) > 0).all(), "distinct experts"
    load = topk_idx.flatten().bincount(minlength=16)
    even = bench.make_topk(replace(shape, skew=0.0), 1, 2).flatten().bincount(minlength=16)
    assert load.max() > 2 * even.max()
