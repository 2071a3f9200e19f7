"""The bench of overlap: its arithmetic and what it reports. No times are judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_ep.bench.overlap import OverlapOptions, products, sweep
from hybrid_ep.bench.overlap.chart import curves
from hybrid_ep.bench.overlap.hiding import allowed, hidden
from hybrid_ep.bench.overlap.streams import Ends
from hybrid_ep.bench.overlap.table import print_overlaps
from hybrid_ep_cli.main import main


@pytest.mark.parametrize(
    ("communication", "products", "both", "part"),
    [
        pytest.param(100, 400, 400, 1.0, id="all_of_it"),
        pytest.param(100, 400, 500, 0.0, id="none_of_it"),
        pytest.param(100, 400, 450, 0.5, id="half_of_it"),
        pytest.param(400, 100, 450, 0.5, id="communication_is_longer"),
        pytest.param(100, 400, 525, -0.25, id="slower_than_in_turn"),
    ],
)
def test_hidden(communication: float, products: float, both: float, part: float) -> None:
    assert hidden(communication, products, both) == pytest.approx(part)


@pytest.mark.parametrize(
    ("communication", "products", "sms", "part"),
    [
        # beside a longer stream of products, communication costs its SMs' share of its own time
        pytest.param(100, 400, 33, 1 - 33 / 132, id="a_quarter_of_the_SMs"),
        pytest.param(100, 400, 132, 0.0, id="all_SMs"),
        pytest.param(1280, 2450, 16, 0.879, id="16_of_132"),
        # communication that is much longer has room for all products on the SMs it leaves
        pytest.param(1000, 100, 66, 1.0, id="room_for_all"),
    ],
)
def test_allowed_by_SM_time(communication: float, products: float, sms: int, part: float) -> None:
    assert allowed(communication, products, sms, 132) == pytest.approx(part, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"sms": (0,)}, "--sms must be at least 1, got 0"),
        ({"gemm": (16, 0, 16)}, "--gemm must be at least 1, got 0"),
        ({"gemms": 0}, "--gemms must be at least 1, got 0"),
        ({"iters": 0}, "--iters must be at least 1, got 0"),
        ({"topk": (65,)}, "topk must be at most num_experts=64, got 65"),
        ({"backends": ("nccl",)}, "--backend must be one of auto, torch, nvlink, nvshmem, got"),
    ],
    ids=["sms", "gemm", "gemms", "iters", "topk", "backend"],
)
def test_mistakes(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        OverlapOptions(**options).check(2)


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        (["--overlap", "--device", "cpu"], "--overlap must run on GPUs, got the CPU"),
        (["--overlap", "--layer"], "--layer must be left out with --overlap"),
        (["--overlap", "--dtype", "fp8"], "--dtype must be left out with --overlap"),
        (["--gemms", "4"], "--gemms needs --overlap"),
        (["--gemm", "16", "16", "16", "--layer"], "--gemm needs --overlap"),
    ],
    ids=["cpu", "layer", "dtype", "gemms", "gemm"],
)
def test_commands_that_mean_nothing(
    asked: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--ranks", "2", *asked]) == 2
    assert rule in capsys.readouterr().err


def test_no_communication_on_all_SMs() -> None:
    options = OverlapOptions(sms=(8, 132))
    options.check_device(133)
    with pytest.raises(ValueError, match=r"--sms must be below the 132 SMs .*, got 132"):
        options.check_device(132)


def test_where_nothing_can_be_hidden_there_is_no_part_of_it() -> None:
    way = sweep.Way("nvlink", 132, lambda i: None)
    found = sweep._hidden(way, 100, 400, 132, Ends(100, 500, 500))
    assert found["allowed_part"] == 0 and found["hidden_of_allowed"] is None


def test_a_torch_without_the_setting_times_products_on_all_SMs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sweep.runnable(OverlapOptions(product_sms=("all",))) == (
        OverlapOptions(product_sms=("all",)),
        [],
    )
    monkeypatch.setattr(sweep, "CAN_LEAVE_FREE", False)
    options, (reason,) = sweep.runnable(OverlapOptions())
    assert options == OverlapOptions(product_sms=("all",))
    assert reason.startswith("GEMMs on the rest: products of torch")


def test_products_with_nothing_beside_them_change_no_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_get_sm_carveout_experimental", "_set_sm_carveout_experimental"):
        monkeypatch.delattr(torch._C, name, raising=False)
    made: list[int] = []
    products.Products(made.append, 3)()
    assert made == [0, 1, 2]


def record(**values: Any) -> dict[str, Any]:
    return {
        **{"ranks": 8, "tokens": 32768, "hidden": 7168, "experts": 256, "topk": 8, "skew": 0.0},
        **{"dtype": "bfloat16", "gemm": [4096, 7168, 4096], "gemms": 8, "way": "nvshmem"},
        **{"sms": 16, "total_sms": 132, "product_sms": "all"},
        **{"products_alone_us": 24500.0, "communication_alone_us": 12800.0},
        **{"communication_us": 14000.0, "products_us": 29600.0, "both_us": 29600.0},
        **{"hidden_part": 0.6, "allowed_part": 0.88, "hidden_of_allowed": 0.68},
        **values,
    }


RECORDS = [
    record(),
    record(product_sms="rest", both_us=26500.0),
    record(sms=48, both_us=27900.0),
    record(way="all_to_all", sms=None, allowed_part=None, hidden_of_allowed=None),
]


def test_the_table_fits_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    report = {"device": "NVIDIA H200", "num_gpus": 8, "commit": "abc", "overlaps": RECORDS}
    print_overlaps(report, ["nvshmem: no network"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[1] == "GEMMs: 8 of 4096 x 7168 x 4096, bf16, 24500 us alone"
    assert "hybrid_ep nvshmem" in lines[4] and "29600" in lines[4] and "0.68" in lines[4]
    assert "NCCL all_to_all" in lines[7] and lines[7].endswith("-")
    assert lines[-1] == "skipped: nvshmem: no network"


def test_curves_are_told_apart_by_the_SMs_of_products() -> None:
    allowed_us = pytest.approx(24500 + 12800 - 0.88 * 12800)
    assert curves(RECORDS) == {
        "hybrid_ep nvshmem, products on all SMs": [(16, 29600.0), (48, 27900.0)],
        "hybrid_ep nvshmem, products on rest SMs": [(16, 26500.0)],
        "one after the other": [(16, 37300.0), (48, 37300.0)],
        "SM time allows": [(16, allowed_us), (48, allowed_us)],
    }


def test_a_report_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="a plot is drawn by matplotlib, which is optional")
    path, chart = tmp_path / "overlap.json", tmp_path / "overlap.png"
    report = {"device": "NVIDIA H200", "num_gpus": 8, "commit": "abc", "overlaps": RECORDS}
    path.write_text(json.dumps(report))
    assert main(["bench", "--read", str(path), "--plot", str(chart)]) == 0
    assert "of limit: hidden / limit" in capsys.readouterr().out
    assert chart.read_bytes().startswith(b"\x89PNG")
