#!/usr/bin/env python3
"""Fails on spilled registers and on source that breaks the layers of csrc/.

The spills come from ptxas's report of the last build (build/ptxas.log). The rules keep the
extension quick to build, free of torch's ABI and readable.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PTXAS_LOG = ROOT / "build" / "ptxas.log"


@dataclass(frozen=True)
class Rule:
    pattern: re.Pattern[str]
    says: str
    allowed_in: str | None = None  # a folder of csrc/


RULES = [
    Rule(
        re.compile(r"\basm\b|\bcuda::ptx\b|#\s*include\s*<cuda/ptx>"),
        "asm and cuda::ptx belong in csrc/device/",
        "device",
    ),
    Rule(re.compile(r"<<<"), "kernels are launched in csrc/kernels/ alone", "kernels"),
    Rule(
        re.compile(r"#\s*include\s*[<\"](torch|ATen|c10)/"),
        "the extension includes no torch header",
    ),
    Rule(
        re.compile(r"#\s*(if|ifdef|ifndef|elif)\b(?!.*\b__CUDA(CC|_ARCH)__)"),
        "a feature is a file, a role or a template type, not an #if (headers: #pragma once)",
    ),
    Rule(
        # With libstdc++ linked statically beside torch's, streams and regex crash in std::locale.
        re.compile(r"#\s*include\s*<(\w*stream|iomanip|locale|regex)>"),
        "no iostreams and no std::regex in the extension",
    ),
]

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


def broken_rules(csrc: Path) -> Iterator[str]:
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"}):
        relative = path.relative_to(csrc)
        for number, line in enumerate(code_only(path.read_text()).splitlines(), 1):
            for rule in RULES:
                if relative.parts[0] != rule.allowed_in and rule.pattern.search(line):
                    yield f"{csrc.name}/{relative}:{number}: {rule.says}"


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
