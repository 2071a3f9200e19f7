"""The demo: it trains, checks itself, and says what is wrong with its arguments."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from hybrid_ep.demo import command as demo
from hybrid_ep.demo.model import NUM_EXPERTS
from hybrid_ep.demo.picture import _names
from hybrid_ep.demo.report import Report
from hybrid_ep.demo.text import load_text, unigram_bits
from hybrid_ep_cli.main import make_parser


def arguments(*flags: str) -> argparse.Namespace:
    return make_parser().parse_args(["demo", *flags, "--device", "cpu", "--backend", "torch"])


def test_it_trains(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--ranks", "2", "--steps", "8", "--json", str(tmp_path / "demo.json")]
    with_plot = importlib.util.find_spec("matplotlib") is not None
    if with_plot:
        flags += ["--plot", str(tmp_path / "demo.png")]

    assert demo.run(arguments(*flags)) == 0

    lines = capfd.readouterr().out.strip().splitlines()
    assert any("equals the same layer on one process" in line for line in lines)
    assert (
        lines[-1].startswith("demo: loss 5.5") and "torch backend, 2 ranks on the CPU" in lines[-1]
    )
    report = json.loads((tmp_path / "demo.json").read_text())
    assert report["backend"] == "torch" and report["layer_error"] < 1e-4
    assert len(report["losses"]) == len(report["step_seconds"]) == 8
    assert report["losses"][-1] < report["losses"][0] - 0.5
    assert 4 < report["unigram"] < 5.5 and report["valid"][-1][1] < report["valid"][0][1]
    for load in (layer for step in report["expert_load"] for layer in step):
        assert len(load) == NUM_EXPERTS
        assert sum(load) == pytest.approx(NUM_EXPERTS)  # dropless: every slot is somewhere
    assert 0 < sum(report["comm_seconds"]) < sum(report["step_seconds"])
    if with_plot:
        from matplotlib import image

        height, width, _ = image.imread(tmp_path / "demo.png").shape
        assert height > 400 and width > 1000


def test_the_map_names_each_rank_where_there_is_room() -> None:
    places, names = _names(layers=2, num_ranks=2, of_a_rank=4)
    assert names == ["layer 0, rank 0", "rank 1", "layer 1, rank 0", "rank 1"]
    assert places == [1.5, 5.5, 9.5, 13.5], "the middles of four rows each"
    places, names = _names(layers=3, num_ranks=16, of_a_rank=1)
    assert names == ["layer 0", "layer 1", "layer 2"]
    assert places == [7.5, 23.5, 39.5]


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (["--ranks", "3"], "--ranks must divide the number of experts, 16, got 3"),
        (["--ranks", "0"], "--ranks must divide"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--json", "/dev/null/demo.json"], "--json must name a file that can be written"),
        (["--plot", "picture.foo"], "--plot must end in one of .eps, "),
    ],
)
def test_wrong_arguments_name_the_rule(flags: list[str], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        demo.run(arguments(*flags))


def test_a_plot_without_matplotlib_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--plot needs matplotlib"):
        demo.run(arguments("--plot", "demo.png"))


@pytest.mark.parametrize(
    ("report", "code", "says"),
    [
        (Report(layer_error=0.5, layer_tolerance=1e-4), 1, "differs from one process"),
        (
            Report(
                layer_error=0,
                losses=[5.0, float("nan")],
                valid=[(0, 8.0)],
                step_seconds=[1.0, 1.0],
                comm_seconds=[0.5, 0.5],
                expert_load=[[[1.0] * NUM_EXPERTS]],
                num_ranks=2,
            ),
            1,
            "demo: loss 5.0000 -> nan",
        ),
    ],
    ids=["wrong layer", "loss is nan"],
)
def test_failure_is_an_exit_code(
    report: Report,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "run_ranks", lambda *_, **__: [report])
    assert demo.run(arguments("--ranks", "2")) == code
    assert says in capsys.readouterr().out


def test_a_tenth_of_the_files_is_held_out() -> None:
    learned, held_out = load_text()
    assert 0.03 < len(held_out) / len(learned) < 0.3
    assert unigram_bits(learned, held_out) < 8
