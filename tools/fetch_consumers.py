#!/usr/bin/env python3
"""Fetches the frameworks that tests/consumers drives, into build/consumers; nothing is installed.

    python tools/fetch_consumers.py [FOLDER]

Wheels of fixed versions, without their dependencies, and the short list of what the modules that
the tests import need besides torch. Each is unpacked into a folder of its own, so that a test puts
on its path what it wants. What is there already is not fetched again. Where a wheel cannot be had,
the script says so and ends with exit code 0: the tests of that framework skip.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "build" / "consumers"


@dataclass(frozen=True)
class Wheel:
    """A wheel.

    Attributes:
        name, version: of the package.
        python: the Python that its files are named for; None: this one.
        without: beginnings of paths that no test needs.
    """

    name: str
    version: str
    python: str | None = None
    without: tuple[str, ...] = ()


TRITON = Wheel(  # imported by Megatron-Core and torchtitan; 285 MB, of which 140 are its compiler
    "triton",
    "3.9.0",
    without=("triton/backends/nvidia/lib", "triton/backends/nvidia/bin", "triton/backends/amd/lib"),
)
FRAMEWORKS = {
    # its wheel is for Python 3.12; the modules that the tests import run on 3.10 and later
    "megatron-core": Wheel("megatron-core", "0.19.2", python="3.12"),
    "torchtitan": Wheel("torchtitan", "0.3.0"),
    "nemo-automodel": Wheel("nemo-automodel", "0.7.0"),
}
NEEDED = {
    "megatron-core": (TRITON,),
    "torchtitan": (
        TRITON,
        Wheel("spmd-types", "0.2.3"),
        Wheel("tyro", "1.0.17"),
        Wheel("docstring-parser", "0.18.0"),
        Wheel("typeguard", "4.6.1"),
        Wheel("einops", "0.8.2"),
    ),
    "nemo-automodel": (),
}


def paths_of(framework: str, folder: Path = FOLDER) -> list[Path]:
    """What to put on the path for a framework, in this order."""
    return [place(wheel, folder) for wheel in (FRAMEWORKS[framework], *NEEDED[framework])]


def place(wheel: Wheel, folder: Path = FOLDER) -> Path:
    return folder / f"{wheel.name}-{wheel.version}"


def fetch(wheel: Wheel, folder: Path) -> str | None:
    """Unpack the wheel; what went wrong, if something did."""
    target = place(wheel, folder)
    if target.is_dir():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=1"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", work]
        if wheel.python is not None:
            command += ["--python-version", wheel.python]
            command += [f"--platform=manylinux_2_28_{platform.machine()}", "--platform=any"]
        command.append(f"{wheel.name}=={wheel.version}")
        done = subprocess.run(command, capture_output=True, text=True)
        found = list(Path(work).glob("*.whl"))
        if done.returncode or not found:
            return (done.stderr.strip() or "pip fetched no wheel").splitlines()[-1]
        unpacked = Path(work, "unpacked")
        with zipfile.ZipFile(found[0]) as packed:
            names = [n for n in packed.namelist() if not n.startswith(wheel.without or ("\0",))]
            packed.extractall(unpacked, names)
        shutil.move(unpacked, target)  # whole, or not at all
    return None


def main(folder: Path) -> int:
    for framework, wheel in FRAMEWORKS.items():
        for each in (wheel, *NEEDED[framework]):
            fault = fetch(each, folder)
            if fault is not None:
                wanted = f"{each.name} {each.version}"
                print(f"{framework}: its tests skip, {wanted} could not be fetched: {fault}")
                break
        else:
            print(f"{framework} {wheel.version}: ready")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
