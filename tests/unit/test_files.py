"""The files of --json and --plot: their lines, what goes to stdout, readers who leave early."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_ep.bench.series import machine_of
from hybrid_ep.output.files import STDOUT, by_lines, keep, text_beside
from hybrid_ep_cli.main import main

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))
BENCH = [path for path in RESULTS if path.name.startswith("h200x2")]
SIZES = "--tokens 8 --hidden 32 --experts 4 --topk 2 --iters 1 --warmup 0 --sizing exact"


def test_a_report_has_a_line_per_entry_and_record():
    report = {"device": "a GPU", "ceilings": {"16": 1.5}, "records": [{"a": 1}, {"a": [2]}]}
    text = by_lines({**report, "none": []})
    assert json.loads(text) == {**report, "none": []}
    assert text.splitlines() == [
        "{",
        ' "device": "a GPU",',
        ' "ceilings": {"16": 1.5},',
        ' "records": [',
        '  {"a": 1},',
        '  {"a": [2]}',
        " ],",
        ' "none": []',
        "}",
    ]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_results_are_as_commands_write_them(path):
    report = json.loads(path.read_text())
    assert path.read_text() == by_lines(report)
    assert report["commit"] and report["records"]
    assert path not in BENCH or f"--json {path.name}" in report["command"]


def test_a_report_without_a_commit_names_none():
    """As one that an installed package makes."""
    machine = {"device": "a GPU", "num_gpus": 2, "commit": None}
    assert machine_of(machine) == "a GPU, 2 GPU(s)"
    assert machine_of({**machine, "commit": "abc"}) == "a GPU, 2 GPU(s), commit abc"


def test_text_beside_json_on_stdout_goes_to_stderr(capfd):
    for target in (STDOUT, "FILE", None):
        with text_beside(target):
            print("text")
            os.write(1, b"of a rank\n")
        printed = capfd.readouterr()
        told = printed.err if target == STDOUT else printed.out
        assert sorted(told.split("\n")) == ["", "of a rank", "text"]
        assert "" in (printed.out, printed.err)
    keep(STDOUT, {"a": 1})
    assert capfd.readouterr().out == '{\n "a": 1\n}\n'


def test_bench_writes_json_to_stdout_in_place_of_the_tables(capfd):
    asked = ["bench", "--ranks", "1", "--backend", "torch", "--device", "cpu", *SIZES.split()]
    assert main([*asked, "--no-backward", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert {record["backend"] for record in report["records"]} >= {"torch"}


def test_a_reader_who_leaves_early_loses_no_file(tmp_path):
    """As in ``hybrid-ep bench --plot times.png | head -1``."""
    pytest.importorskip("matplotlib", reason="a plot is drawn by matplotlib, which is optional")
    sizes = "--ranks 8 --tokens 8 --hidden 8 --experts 8 --topk 1"
    for command, files in (
        (f"bench --read {BENCH[0]}", ("times.json", "times.png")),
        (f"plan {sizes}", ("plan.json",)),
    ):
        written = [tmp_path / name for name in files]
        for path in written:
            command += f" --{'plot' if path.suffix == '.png' else 'json'} {path}"
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-m", "hybrid_ep", *command.split()],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(writing)
        assert (done.returncode, done.stderr) == (1, "")
        assert all(path.stat().st_size for path in written)
