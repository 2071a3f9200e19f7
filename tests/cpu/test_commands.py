"""The command line as a user meets it: what it prints last, and what wrong usage says."""

import pytest

from hybrid_ep.__main__ import main


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
        ("demo --ranks 3", "--ranks must divide the number of experts, 16, got 3"),
        ("plan --ranks 3 --tokens 8 --hidden 8 --experts 8 --topk 1", "num_experts must be div"),
    ],
)
def test_wrong_usage_is_said_with_exit_code_2(capfd, arguments, says):
    assert main(arguments.split()) == 2
    told = capfd.readouterr().err
    assert told.startswith(f"hybrid-ep {arguments.split()[0]}: ")
    assert says in told
