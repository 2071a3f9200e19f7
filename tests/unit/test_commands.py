"""The command line as a user meets it: what it prints last, and what wrong usage says."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

import hybrid_ep_cli.bench
import hybrid_ep_cli.tune
from hybrid_ep.backends import choose
from hybrid_ep.bench import command as bench
from hybrid_ep.bench import options as bench_options
from hybrid_ep.bench.layer import options as layer_options
from hybrid_ep.check import command as check
from hybrid_ep.demo import command as demo
from hybrid_ep.launch import Failure, RanksFailed
from hybrid_ep.launch import _free_port as free_port
from hybrid_ep.moe import WEIGHT_PLACES
from hybrid_ep.output import files
from hybrid_ep.plan import pipeline_model
from hybrid_ep.shape import DTYPES
from hybrid_ep.tune.search import AIMS, Goal
from hybrid_ep_cli import options
from hybrid_ep_cli.main import COMMANDS, main, make_parser

PLAN = "--ranks 2 --tokens 8 --hidden 8 --experts 8 --topk 1"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_check_passes(capfd, num_ranks):
    assert main(["check", "--ranks", str(num_ranks), "--device", "cpu"]) == 0
    told = capfd.readouterr().out.strip().splitlines()
    held = [line for line in told if line.startswith("ok ")]
    assert len(held) >= 18
    assert told[-1] == f"check: {len(held)} passed, 0 failed"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("bench --backend nccl", "nccl"),
        (
            "bench --ranks 3",
            "by the number of ranks, got --experts 256 with 3 ranks",
        ),
        ("bench --json /dev/null/report.json", "--json must name a file that can be written"),
        ("bench --plot /", "--plot must end in one of .eps, "),
        ("bench --plot picture", "--plot must end in one of .eps, "),
        ("bench --plot /dev/null/picture.png", "--plot must name a file that can be written"),
        ("doctor --json /", "--json must name a file that can be written, got /"),
        ("plan --scaling --gpu h200", "--gpu must be left out with --scaling"),
        (f"plan {PLAN} --ranks-per-node 1 --sms 2", "--sms must be at least 3 with the nvshmem"),
        (f"plan {PLAN} --sms 0", "--sms must be an integer of at least 1, got 0"),
        ("bench --ffn 64", "--ffn needs --layer"),
        ("bench --weight-at activation", "--weight-at needs --layer"),
        ("bench --layer --sweep tokens", "--sweep must be left out with --layer"),
        ("bench --layer --align 2", "--align must be left out with --layer, got 2"),
        ("bench --layer --shape mixtral --topk 2", "--topk must be left out with --shape"),
        ("bench --layer --ranks 3 --experts 4", "by the number of ranks, got --experts 4 with"),
        ("bench --layer --device cpu --dtype fp8", "--dtype must be one of bf16, fp16, fp32, got"),
        ("bench --read no/such/file", "--read must name a file that --json wrote: "),
        ("bench --read /dev/null", "--read must name a file of JSON, which --json wrote, got /dev"),
        ("bench --read /", "--read must name a file that --json wrote: [Errno 21] Is a directory"),
        ("check --ranks 0", "--ranks must be at least 1, got 0"),
        ("check --ranks 4 --ranks-per-node 3", "got --ranks-per-node 3 with 4 ranks"),
        ("demo --ranks 3", "--ranks must divide the number of experts, 16, got 3"),
        ("demo --json /", "--json must name a file that can be written, got /"),
        (f"plan {PLAN} --json /", "--json must name"),
        ("plan --ranks 3 --tokens 8 --hidden 8 --experts 8 --topk 1", "--experts must be div"),
    ],
)
def test_wrong_usage_is_said_with_exit_code_2(capfd, arguments, says):
    assert main(arguments.split()) == 2
    told = one_line(capfd, arguments.split()[0])
    assert says in told


def one_line(capfd, command):
    """What the command says on stderr."""
    told = capfd.readouterr().err
    assert told.startswith(f"hybrid-ep {command}: ")
    assert told.count("\n") == 1 and told.endswith("\n"), told
    return told


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about a machine without a GPU")
@pytest.mark.parametrize(
    "arguments",
    [
        "check --ranks 2 --backend nvlink",
        "demo --ranks 2 --backend nvlink",
        "bench --ranks 2 --backend nvlink --tokens 8 --experts 4 --topk 2",
    ],
)
def test_a_backend_that_cannot_run_is_one_line(capfd, arguments):
    assert main(arguments.split()) == 1
    command = arguments.split()[0]
    assert one_line(capfd, command) == (
        f"hybrid-ep {command}: the nvlink backend cannot run: rank 0: it needs a CUDA device, the "
        "Buffer is on cpu\n"
    )


OF_A_BUG = Failure(1, "Traceback (most recent call last):\n  ...\nKeyError: 'a bug'")
OF_A_PEER = Failure(0, "Traceback ...", told="rank 0 waited for rank 1 in route", is_echo=True)


@pytest.mark.parametrize(
    ("command", "module", "starts"),
    [("check", check, "on_ranks"), ("bench", bench, "on_ranks"), ("demo", demo, "run_ranks")],
)
def test_a_rank_that_fails_is_an_exit_code(capfd, monkeypatch, command, module, starts):
    def fail(*failures, speaks=True):
        def start(*_, **__):
            raise RanksFailed(failures, speaks=speaks)

        monkeypatch.setattr(module, starts, start)
        assert main([command]) == 1

    fail(OF_A_PEER)
    assert one_line(capfd, command) == f"hybrid-ep {command}: {OF_A_PEER.told}\n"
    fail(OF_A_PEER, OF_A_BUG)
    told = capfd.readouterr().err
    assert told == f"hybrid-ep {command}: rank 1 failed:\n{OF_A_BUG.text}\n", "a bug has no trace"
    fail(OF_A_PEER, speaks=False)
    assert capfd.readouterr().err == ""


MACHINE = {"device": "a GPU", "num_gpus": 2, "commit": "abc"}


@pytest.mark.parametrize(
    "report",
    [
        {"records": []},
        [],
        {**MACHINE, "ceilings": {}, "records": [{"op": "dispatch"}]},
        {**MACHINE, "ceilings": {}, "records": "none"},
        {**MACHINE, "ceilings": {}, "records": []},
        {**MACHINE, "layers": []},
        {**MACHINE, "ceilings": None, "records": []},
        {**MACHINE, "layers": [{"shape": "mixtral"}]},
    ],
)
def test_a_report_of_another_kind_is_not_read(capfd, tmp_path, report):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert main(["bench", "--read", str(path)]) == 2
    assert f"must name a file that --json wrote, got {path}" in one_line(capfd, "bench")


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("bench --jsn x", "unrecognized arguments: --jsn x; did you mean --json?"),
        ("plan --sacling", "unrecognized arguments: --sacling; did you mean --scaling?"),
        ("check 3", "unrecognized arguments: 3"),
        ("plan --gpu a100", "argument --gpu: must be one of h100, h200, b200, gb200, or a number"),
        ("tune --aim slow", "argument --aim: invalid choice: 'slow'"),
    ],
)
def test_what_is_no_option_is_told_with_the_usage_of_its_command(capfd, arguments, says):
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    told, command = capfd.readouterr().err, arguments.split()[0]
    assert ended.value.code == 2
    assert told.startswith(f"usage: hybrid-ep {command} [-h]")
    assert told.splitlines()[-1].startswith(f"hybrid-ep {command}: error: {says}")


def test_a_file_that_cannot_be_written_after_all_is_one_line(capfd, monkeypatch):
    def run(args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "run", run)
    assert main(["demo"]) == 1
    assert one_line(capfd, "demo") == "hybrid-ep demo: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("arguments", ["plan --scaling", "check --ranks 1 --device cpu"])
def test_a_reader_that_has_seen_enough_is_no_error(arguments):
    """As in `hybrid-ep plan | head -1`; check prints in another process, its rank 0."""
    command = [sys.executable, "-m", "hybrid_ep", *arguments.split()]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_under_torchrun_one_rank_tells_what_all_ranks_raise(tmp_path):
    command = [sys.executable, "-m", "hybrid_ep", "check", "--backend", "nvlink", "--device", "cpu"]
    environment = {**os.environ, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert told[0].startswith("hybrid-ep check: the nvlink backend cannot run: rank 0: ")
    assert told[0].count("\n") == 1
    assert told[1] == ""


# ---- options


@pytest.mark.parametrize("arguments", ["--help", "--version", *(f"{c} --help" for c in COMMANDS)])
def test_help_needs_no_torch(arguments):
    program = (
        "import sys; sys.modules['torch'] = None\n"  # importing it raises an ImportError
        f"from hybrid_ep_cli.main import main; main({arguments.split()!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "hybrid" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_every_default(name):
    parser = make_parser()._subparsers._group_actions[0].choices[name]
    for action in parser._actions:
        if action.dest == "help":
            continue
        assert "(default" in action.help or "(required)" in action.help, action.option_strings
        assert action.metavar or action.choices or action.nargs == 0, action.option_strings
        if type(action.default) in (int, float, str):
            value = action.default if isinstance(action.default, str) else f"{action.default:g}"
            assert f": {value})" in action.help, action.option_strings


def test_what_has_not_run_on_hardware_is_marked(capsys):
    for name, what in (
        ("tune", "Experimental: "),
        ("check", "nvshmem is experimental: "),
        ("plan", "no measurement has confirmed"),
    ):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert what in " ".join(capsys.readouterr().out.split())
    assert "(experimental)" in COMMANDS["tune"].HELP


def test_a_plan_says_whether_it_fits_a_gpu(capsys):
    sizes = "--ranks 64 --ranks-per-node 8 --tokens 32768 --hidden 7168 --experts 256 --topk 8"
    assert main(["plan", *sizes.split(), "--gpu", "h200", "100"]) == 0
    told = capsys.readouterr().out
    rows = [line for line in told.splitlines() if "fits: " in line]
    assert [line.split("  ")[1] for line in rows] == ["H200", "a GPU of 100 GB"]
    assert all("fits: 5.28 GB" in line for line in rows)
    assert "  fits: 121.78 GB, 86.4%" in rows[0] and "  does not fit: 121.78 GB" in rows[1]
    assert main(["plan", *sizes.split(), "--gpu", "8", "h100", "--json"]) == 0
    few, many = json.loads(capsys.readouterr().out)["gpus"]
    assert (few["gpu"], few["memory_bytes"]) == ("a GPU of 8 GB", 8e9)
    assert few["expected_bytes"] == many["expected_bytes"] == pytest.approx(5.28e9, rel=1e-2)
    assert few["fits_expected"] and not few["fits_worst"] and not many["fits_worst"]


def test_options_have_the_names_of_the_library():
    assert options.STDOUT == files.STDOUT
    assert options.BACKENDS == choose.BACKENDS
    assert {name: f"torch.{each}" for name, each in options.DTYPES.items()} == {
        name: str(dtype) for name, dtype in DTYPES.items()
    }
    assert hybrid_ep_cli.bench.SWEEPS == tuple(bench_options.SWEEPS)
    assert hybrid_ep_cli.bench.SIZINGS == bench_options.SIZINGS
    assert hybrid_ep_cli.bench.SHAPES == tuple(layer_options.SHAPES)
    assert hybrid_ep_cli.bench.WEIGHT_PLACES == WEIGHT_PLACES
    assert hybrid_ep_cli.tune.AIMS == AIMS


def test_options_have_the_defaults_of_the_library():
    sizes = "--tokens 1 --hidden 1 --experts 1 --topk 1".split()
    tuned = vars(make_parser().parse_args(["tune", *sizes, "--out", "config.json"]))
    assert Goal(**{name: tuned[name] for name in asdict(Goal())}) == Goal()
    timed = make_parser().parse_args(["bench"])
    for name in ("align", "iters", "warmup", "weighted", "backward"):
        assert getattr(timed, name) == getattr(bench_options.Options, name)
    for name in ("iters", "warmup", "backward"):
        assert getattr(timed, name) == getattr(layer_options.LayerOptions, name)
    for name, told in hybrid_ep_cli.bench.SIZES.items():
        assert " ".join(map(str, bench._DEFAULTS[name])) == told.partition(",")[0]
    planned = vars(make_parser().parse_args(["plan"]))
    for name in ("network_latency_us", "nvlink_latency_us", "put_us", "pass_on_us"):
        assert planned[name] == getattr(pipeline_model, name.upper())


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("Config.network_chunk_tokens must be at most 32", "--chunk must be at most 32"),
        ("got num_experts=10 with 4 ranks", "got --experts 10 with 4 ranks"),
        ("2 * network_window_chunks * max_tokens", "2 * --window * --tokens"),
        ("--json must name a file, got /hidden/topk.json", None),
        ("--topk must be at most 8", None),
        ("got 24 (hidden=12, torch.bfloat16)", "got 24 (--hidden 12, bf16)"),
    ],
)
def test_an_error_speaks_of_what_was_typed(text, typed):
    assert options.as_typed(text) == (text if typed is None else typed)
