"""The shell blocks of the documentation run, those that need more than this machine are marked."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.test_docs import PAGES, PROGRAMS, ROOT, blocks, of, without_code

# What follows "bash" above a block that is not run, and what the block needs.
NEEDS = {
    "cluster": "several machines",
    "framework": "a training framework",
    "gpu": "GPUs, whose times it measures",
    "network": "an index of packages",
}
# The commands of an environment that has the package, as a tree without an installation runs them.
COMMANDS = {
    "hybrid-ep": "-m hybrid_ep",
    "torchrun": "-m torch.distributed.run",
    "python": "",
}


@dataclass(frozen=True)
class Shell:
    """A shell block of a page; ``need`` is empty if it is to run."""

    page: str
    line: int
    need: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}-{self.line}"


def shell_blocks() -> list[Shell]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```bash ?(.*)\n([^`]*)^```$", text, re.MULTILINE):
            line = text[: match.start()].count("\n") + 1
            found.append(Shell(str(page.relative_to(ROOT)), line, match[1], match[2]))
    return found


def programs(page: str) -> dict[str, str]:
    """The files that a page tells its reader to write, by name."""
    return {
        PROGRAMS[words]: block.code
        for block in blocks()
        for words in of(block, PROGRAMS)
        if block.page == page
    }


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, arguments in COMMANDS.items():
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (commands / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize("block", [b for b in shell_blocks() if not b.need], ids=str)
def test_a_shell_block_runs(block, environment, tmp_path):
    for name, code in programs(block.page).items():
        (tmp_path / name).write_text(code)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert done.stdout.strip(), "each tells its reader something"


def test_what_is_not_run_says_what_it_needs():
    assert {block.need for block in shell_blocks()} == {"", *NEEDS}


def test_no_command_hides_in_a_block_of_another_kind():
    command = re.compile(r"^\s*(hybrid-ep|torchrun|pip|make|srun|python3?) ", re.MULTILINE)
    for page in PAGES:
        fenced = re.findall(r"^```(.*)\n(.*?)^```$", page.read_text(), re.M | re.S)
        for language, code in fenced:
            known = language.startswith(("python", "bash"))
            assert known or not command.search(code), f"{page.name}:\n{code}"
        assert "```" not in without_code(page.read_text()), page.name


@pytest.mark.parametrize("name", PROGRAMS.values())
def test_a_program_is_started_by_a_shell_block_of_its_page(name):
    (page,) = {block.page for block in blocks() if name in programs(block.page)}
    starts = [block for block in shell_blocks() if block.page == page and f" {name}" in block.code]
    assert [block.need for block in starts] == [""]
