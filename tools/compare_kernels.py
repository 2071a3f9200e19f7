#!/usr/bin/env python3
"""Tells which kernels of two builds differ in machine code: ``compare_kernels.py BEFORE AFTER``.

BEFORE and AFTER are folders with extension modules, as ``hybrid_ep/`` of two builds. Functions are
matched by their instructions, so names, files and the order of functions may change: a move or a
renaming that prints no difference has changed no machine code.

Needs cuobjdump and nvdisasm, on PATH or of the wheels nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm, and c++filt.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HEADING = re.compile(r"\s*(?:arch = (sm_\w+)|Function : (\S+))$")
ENCODED = re.compile(
    r"/\* 0x[0-9a-f]{16} \*/"
)  # a line of code: an instruction, or its second half
Kernels = dict[tuple[str, str], list[str]]  # (architecture, instructions) -> demangled names


def search_path() -> str:
    """PATH, and behind it the wheels of this Python."""
    wheels = [folder for path in sys.path if (folder := Path(path, "nvidia/cu13/bin")).is_dir()]
    return os.pathsep.join([os.environ.get("PATH", ""), *map(str, wheels)])


def run(*command: str, text: str = "") -> str:
    """What a tool prints."""
    path = search_path()
    if (tool := shutil.which(command[0], path=path)) is None:
        sys.exit(f"compare_kernels: no {command[0]} (pip install nvidia-cuda-{command[0]})")
    done = subprocess.run(
        [tool, *command[1:]],
        input=text,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"compare_kernels: {done.stdout}{done.stderr}")
    return done.stdout


def kernels_of(module: Path) -> Kernels:
    """The functions of a module, by their code."""
    code: dict[tuple[str, str], list[str]] = defaultdict(list)
    arch = name = ""
    for line in run("cuobjdump", "-sass", str(module)).splitlines():
        if heading := HEADING.match(line):
            arch, name = heading[1] or arch, heading[2] or ""
        elif name and ENCODED.search(line):
            code[arch, name].append(line.strip())
    names = run("c++filt", text="\n".join(name for _, name in code)).split("\n")
    kernels: Kernels = defaultdict(list)
    for (arch, _), lines, name in zip(code, code.values(), names, strict=False):
        kernels[arch, "\n".join(lines)].append(name)
    return kernels


def differences(before: Kernels, after: Kernels) -> list[str]:
    """The functions whose code only one of two modules has."""
    return [
        f"only {where}: {arch} {name} ({code.count(';')} instructions)"
        for where, these, others in (("before", before, after), ("after", after, before))
        for (arch, code), names in these.items()
        for name in sorted(names)[len(others.get((arch, code), [])) :]
    ]


def main() -> int:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    before, after = map(Path, sys.argv[1:])
    failed = False
    for module in sorted(before.glob(f"_*.{sys.implementation.cache_tag}*.so")):
        old, new = kernels_of(module), kernels_of(after / module.name)
        found = differences(old, new)
        count = sum(map(len, old.values()))
        print(f"{module.name}: {count} functions before, {len(found)} differences")
        print("".join(f"  {line}\n" for line in found), end="")
        failed = failed or bool(found) or count == 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
