#!/usr/bin/env python3
"""Fails on spilled registers and on source that breaks the layers of csrc/.

The spills come from ptxas's report of the last build (build/ptxas.log). The rules keep the
extension quick to build, free of torch's ABI and readable; CONTRIBUTING.md lists them.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PTXAS_LOG = ROOT / "build" / "ptxas.log"


# Which rooms of csrc/ each one may include, besides itself. A room is a file, or a folder without
# those parts of it that are rooms themselves; of the files in no folder, those that bind to Python
# are a room, and the others, the runtime, are one.
BELOW_KERNELS = ("device", "network", "layout")
VERBS = ("kernels/route", "kernels/dispatch", "kernels/combine")  # none includes another
INCLUDES = {
    "layout": (),
    "memory": ("layout",),
    "device": ("layout",),
    "network": ("device", "layout"),
    "kernels": BELOW_KERNELS,
    **dict.fromkeys(VERBS, ("kernels", *BELOW_KERNELS)),
    # the kernels of several nodes, compiled for a network
    "kernels/nvshmem": (*VERBS, "kernels", "network"),
    "kernels/loopback.cu": (*VERBS, "kernels", "network"),
    "runtime": ("kernels", "network", "memory", "layout"),
    "bindings": ("runtime", "kernels", "network", "memory", "layout"),
}
FOR_ALL = "check.h"  # how an error of CUDA becomes an exception


@dataclass(frozen=True)
class Rule:
    pattern: re.Pattern[str]
    says: str
    allowed_in: tuple[str, ...] = ()  # folders and files of csrc/


RULES = [
    Rule(
        re.compile(r"#[^\S\n]*include[^\S\n]*[<\"](torch|ATen|c10)/"),
        "the extension includes no torch header",
    ),
    Rule(
        re.compile(r"\basm\b|\bcuda::ptx\b|#[^\S\n]*include[^\S\n]*<cuda/ptx>"),
        "asm and cuda::ptx belong in csrc/device/",
        ("device",),
    ),
    Rule(
        # it loads a kernel before others run; the card loads its own
        re.compile(r"<<<|\bcudaLaunch\w*Kernel"),
        "kernels are launched by launch() of kernels/launch.cuh",
        ("kernels/launch.cuh", "kernels/delaying_card.cu"),
    ),
    Rule(
        re.compile(r"#[^\S\n]*(if|ifdef|ifndef|elif)\b(?!.*\b__CUDA(CC|_ARCH)__)"),
        "a feature is a file, a role or a template type, not an #if (headers: #pragma once)",
    ),
    Rule(
        re.compile(r"__global__[^;{]*[&*][^;{]*[;{]"),
        "kernels get their parameters by value: no reference and no pointer",
    ),
    Rule(re.compile(r"\bgetenv\b"), "settings come from Python, not from environment variables"),
    Rule(
        re.compile(r"\bload_acquire\b"),
        "waits keep the deadline: wait_flag (device/flag.cuh) or a Wait (network/window.cuh)",
        ("device", "network"),
    ),
    Rule(
        # With libstdc++ linked statically beside torch's, streams and regex crash in std::locale.
        re.compile(r"#[^\S\n]*include[^\S\n]*<(\w*stream|iomanip|locale|regex)>"),
        "no iostreams and no std::regex in the extension",
    ),
    Rule(
        re.compile(r"cooperative_groups|\bcudaLaunchCooperative"),
        "no block waits for another block of its own grid",
    ),
]

INCLUDE = re.compile(r"#[^\S\n]*include[^\S\n]*\"([^\"\n]+)\"")
# A comment, or a string: whichever starts first swallows the other.
COMMENT_OR_STRING = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)


def code_only(text: str) -> str:
    """The text with comments and strings blanked (but not include paths), line numbers kept."""

    def blank(match: re.Match[str]) -> str:
        line_start = text.rfind("\n", 0, match.start()) + 1
        if text[line_start : match.start()].lstrip().startswith("#") and match[0][0] == '"':
            return match[0]
        return re.sub(r"[^\n]", " ", match[0])

    return COMMENT_OR_STRING.sub(blank, text)


def room_of(path: str) -> str | None:
    """The room of a file of csrc/, by its path there; None if it is not one of csrc/."""
    if "/" not in path:
        return "bindings" if "bind" in path else "runtime"
    folders = [path, *map(str, Path(path).parents)]
    return next((folder for folder in folders if folder in INCLUDES), None)


def broken_rules(csrc: Path) -> Iterator[str]:
    """What breaks a rule in the sources of a folder, with file and line."""
    included: dict[str, set[str]] = {}
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"}):
        relative = str(path.relative_to(csrc))
        code = code_only(path.read_text())
        room = room_of(relative)
        faults = [
            (match.start(), rule.says)
            for rule in RULES
            if not {relative, *map(str, Path(relative).parents)} & {*rule.allowed_in}
            for match in rule.pattern.finditer(code)
        ]
        for match in INCLUDE.finditer(code):
            included.setdefault(relative, set()).add(match[1])
            other = room_of(match[1])
            if room is None or other is None:
                continue
            if other in (room, *INCLUDES[room]) or match[1] == FOR_ALL:
                continue
            allowed = ", ".join([*INCLUDES[room], FOR_ALL])
            faults.append((match.start(), f"{room} includes {allowed} and itself, not {match[1]}"))
        for at, says in sorted(faults):
            yield f"{csrc.name}/{relative}:{code.count(chr(10), 0, at) + 1}: {says}"
    try:
        TopologicalSorter(included).prepare()
    except CycleError as error:
        yield f"{csrc.name}/: headers include each other: {' <- '.join(error.args[1])}"


def spills(report: str) -> Iterator[str]:
    kernel = function = "?"
    for line in report.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            kernel = f"{match[1]} ({match[2]})"
        elif match := re.search(r"Function properties for (\S+)", line):
            function = match[1]
        elif "nvshmemi_" in function:
            continue  # NVSHMEM's own, called and not inlined
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            frame, stores, loads = map(int, match.groups())
            # the verbs of a network are calls, which take a frame
            calls = "NvshmemNetwork" in function or "LoopbackNetwork" in function
            if stores or loads or (frame and not calls):
                yield f"{kernel}: {line.strip()}"


def main() -> int:
    if not any(CSRC.rglob("*.*")):
        print("kernels: no csrc yet, nothing to check")
        return 0

    faults = list(broken_rules(CSRC))
    checked = "layers of csrc/ kept"
    if PTXAS_LOG.exists():
        report = PTXAS_LOG.read_text()
        faults += spills(report)
        kernels = set(re.findall(r"Compiling entry function '(\S+)'", report))
        checked += f", no spills in {len(kernels)} kernels"
    else:
        checked += "; SPILLS NOT CHECKED: nothing was compiled here (no nvcc?)"

    for fault in faults:
        print(f"kernels: {fault}", file=sys.stderr)
    if not faults:
        print(f"kernels: {checked}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
