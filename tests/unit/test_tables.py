"""Tables on terminals of usual widths, with rich and without: nothing in them is cut."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from hybrid_ep.output.tables import drop_constants, in_bytes, print_table
from tests.unit import test_bench_layer, test_bench_overlap

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (80, 100, 120)
SIZES = "--tokens 4096 --hidden 7168 --experts 256 --topk 8".split()
COMMANDS = {
    "plan": ["plan", "--ranks", "64", "--ranks-per-node", "8", *SIZES],
    "plan_of_one_node": ["plan", "--ranks", "8", *SIZES],
    "scaling": ["plan", "--scaling"],
    "simulation": ["plan", "--simulate", "--dtype", "bf16", "--tokens", "256"],
    "bench": ["bench", "--read", str(ROOT / "benchmarks/results/h200x2.json")],
    "bench_details": [
        "bench",
        "--details",
        "--read",
        str(ROOT / "benchmarks/results/h200x2.json"),
    ],
    "bench_by_tokens": ["bench", "--read", str(ROOT / "benchmarks/results/h200x2_tokens.json")],
}
# Runs the commands in a terminal that it makes as wide as asked, and elsewhere.
PROGRAM = """
import contextlib, fcntl, io, json, struct, sys, termios
if sys.argv[1] == "without":
    sys.modules["rich"] = sys.modules["rich.console"] = None
from hybrid_ep_cli.main import main
commands, widths = json.loads(sys.argv[2]), json.loads(sys.argv[3])
for name, command in commands.items():
    whole = io.StringIO()
    with contextlib.redirect_stdout(whole):
        assert main(command) == 0
    print(f"@{name} whole\\n{whole.getvalue()}")
    for width in widths:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        print(f"@{name} {width}")
        assert main(command) == 0
"""


def in_a_terminal(*command: str) -> str:
    """What a command prints to a terminal, without colours; it must succeed."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment)
    os.close(its)
    printed = b""
    while True:
        try:
            read = os.read(ours, 1 << 16)
        except OSError:  # the end, on Linux
            break
        if not read:
            break
        printed += read
    os.close(ours)
    text = printed.decode().replace("\r\n", "\n")
    assert running.wait() == 0, text
    return text


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """The commands, with reports that nothing here can measure in a moment."""
    machine = {"device": "NVIDIA H200", "num_gpus": 2, "commit": "abc"}
    baseline = {"way": "nccl", "sms": None, "sizing": "exact", "max_rows": None}
    found = dict(COMMANDS)
    for name, records in (
        ("layers", [test_bench_layer.record(), test_bench_layer.record(**baseline)]),
        ("overlaps", [test_bench_overlap.record(sms=sms) for sms in (16, 32)]),
    ):
        path = tmp_path_factory.mktemp(name) / "report.json"
        path.write_text(json.dumps({**machine, name: records}))
        found[name] = ["bench", "--read", str(path)]
    return found


@pytest.mark.parametrize("rich", ["with", "without"])
def test_no_table_of_any_command_is_cut(rich, commands):
    if rich == "with":
        pytest.importorskip("rich")
    program = [sys.executable, "-c", PROGRAM, rich, json.dumps(commands), json.dumps(COLUMNS)]
    printed = in_a_terminal(*program)
    assert ("\x1b[1m" in printed) == (rich == "with"), "headers are bold with rich alone"
    parts = re.split(r"^@(\w+ \w+)$", re.sub(r"\x1b\[[\d;]*m", "", printed), flags=re.MULTILINE)
    told = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert len(told) == len(commands) * (1 + len(COLUMNS))
    for name in commands:
        whole = told[f"{name} whole"]
        assert re.search(r"\d", whole)
        for width in COLUMNS:
            lines = told[f"{name} {width}"].splitlines()
            assert "…" not in told[f"{name} {width}"]
            tables = [line for line in lines if line.startswith("  ")]
            assert tables and max(map(len, tables)) <= width, f"{name} at {width} columns"
            # each number of the table that nothing narrowed, as it was there
            assert set(numbers(whole)) <= set(numbers(told[f"{name} {width}"])), f"{name} {width}"


def numbers(text: str) -> list[str]:
    return re.findall(r"(?<!\S)\[?[\d,.]+(?:[.\d\]%]*)(?!\S)", text)


def printed_at(width, capsys, monkeypatch, *arguments, **options):
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(*arguments, **options)
    return capsys.readouterr().out.splitlines()


HEADER = ("way", "SMs", "time of a call", "rate", "note")
ROWS = [
    ("nvlink", "16", "1,234,567 us", "12.5 GB/s", "a long note that has many words in it"),
    ("torch", "-", "9 us", "1,000.0 GB/s", "short"),
]


def test_a_table_that_fits_has_a_line_per_row(capsys, monkeypatch):
    assert printed_at(100, capsys, monkeypatch, "title", HEADER, ROWS, texts=1) == [
        "title",
        "  way     SMs  time of a call          rate                                   note",
        "  nvlink   16    1,234,567 us     12.5 GB/s  a long note that has many words in it",
        "  torch     -            9 us  1,000.0 GB/s                                  short",
        "",
    ]


def test_long_texts_and_headers_are_broken_at_words_first(capsys, monkeypatch):
    assert printed_at(66, capsys, monkeypatch, "title", HEADER, ROWS) == [
        "title",
        "  way     SMs  time of a call  rate          note",
        "  nvlink  16   1,234,567 us    12.5 GB/s     a long note that has",
        "                                             many words in it",
        "  torch   -    9 us            1,000.0 GB/s  short",
        "",
    ]
    header = ("way", "nodes per token")
    assert printed_at(14, capsys, monkeypatch, "title", header, [("a", "1.00"), ("b", "-")]) == [
        "title",
        "  way  nodes",
        "       per",
        "       token",
        "  a    1.00",
        "  b    -",
        "",
    ]


def test_columns_that_do_not_fit_go_below_with_their_keys(capsys, monkeypatch):
    assert printed_at(40, capsys, monkeypatch, "title", HEADER, ROWS, texts=1, keys=2) == [
        "title",
        "  way     SMs  time of a call",
        "  nvlink   16    1,234,567 us",
        "  torch     -            9 us",
        "",
        "  way     SMs          rate",
        "  nvlink   16     12.5 GB/s",
        "  torch     -  1,000.0 GB/s",
        "",
        "  way     SMs                       note",
        "  nvlink   16  a long note that has many",
        "                             words in it",
        "  torch     -                      short",
        "",
    ]


def test_a_number_wider_than_the_terminal_is_not_cut(capsys, monkeypatch):
    lines = printed_at(10, capsys, monkeypatch, "title", ("a", "b"), [("1" * 9, "2" * 18)])
    assert "  " + "1" * 9 + "  " + "2" * 18 in lines


def test_columns_that_never_change_go_to_the_title():
    header, rows = ("op", "T", "E"), [["a", "8", "1"], ["b", "8", "2"]]
    assert drop_constants(header, rows, ("T", "E")) == (
        ["op", "E"],
        [["a", "1"], ["b", "2"]],
        "T 8",
    )
    assert drop_constants(header, rows[:1], ("T", "E")) == (list(header), rows[:1], "")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1e3, "1.00 kB"), (2.5e9, "2.50 GB"), (3.76e12, "3.76 TB")],
)
def test_bytes_have_the_unit_that_suits_them(value, text):
    assert in_bytes(value) == text
