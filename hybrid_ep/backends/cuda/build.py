"""What the extensions are built from, and whether one that is loaded was. Imports no torch.

setup.py links an id into each extension: a hash of csrc/ and of the flags below. An extension of
other sources, such as one from before a ``git pull``, would misread its arguments, so it is refused
where it is imported.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

COMPILE_FLAGS = [
    "-std=c++17",
    "-O3",
    "-lineinfo",
    "--expt-relaxed-constexpr",
    # Hopper and Blackwell in machine code; what comes after starts from the PTX.
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_100,code=[sm_100,compute_100]",
    "--threads=0",
    "-Xptxas=-v",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra",
]
# Hidden: a static libstdc++ or CUDA runtime inside must not meet the ones torch loaded.
LINK_FLAGS = ["-shared", "-cudart=static", "-Xlinker=--exclude-libs=ALL"]

ID_SYMBOL = "hybrid_ep_build_id"
REPORT = "_build_report.json"  # beside the extensions
REBUILD = "build again: `make` in a clone, or `pip install .`"

_PACKAGE = Path(__file__).resolve().parents[2]


def id_of_sources(root: Path) -> str:
    """The id of an extension built from ``root/csrc`` with the flags above."""
    digest = hashlib.sha256(repr((COMPILE_FLAGS, LINK_FLAGS)).encode())
    for path in sorted((root / "csrc").rglob("*.*")):
        if path.suffix in (".h", ".cuh", ".cpp", ".cu") and is_source(path):
            name, content = path.relative_to(root).as_posix().encode(), path.read_bytes()
            digest.update(b"%d %s %d " % (len(name), name, len(content)))
            digest.update(content)
    return digest.hexdigest()[:16]


def is_source(path: Path) -> bool:
    """Not what editors and file systems leave beside sources: locks, links, hidden copies."""
    return not path.name.startswith(".") and path.is_file()


def id_of_extension(path: str) -> str | None:
    """The id linked into an extension; None in one that has none."""
    try:
        return (ctypes.c_char * 16).in_dll(ctypes.CDLL(path), ID_SYMBOL).value.decode()
    except ValueError:
        return None


def refuse_other_build(extension: Any) -> None:
    """Compare an extension with the sources beside the package, or with what it was installed with.

    Raises:
        ImportError: it was built from other sources.
    """
    try:
        needed, found = _needed_id(_PACKAGE), id_of_extension(extension.__file__)
    except OSError as error:
        raise ImportError(
            f"whether {extension.__file__} was built from the sources here cannot be told: {error}"
        ) from error
    if needed is not None and found != needed:
        raise ImportError(
            f"{extension.__file__} was built from other sources: its build id is "
            f"{found or 'missing'}, that of the sources here is {needed}; {REBUILD}"
        )


def why_left_out(extension: str) -> str:
    """Why the build left an extension out, in brackets behind a space; empty where nobody knows."""
    reason = left_out().get(extension)
    return f" (left out when this was built: {reason})" if reason else ""


def left_out() -> dict[str, str]:
    """The extensions that the build of this package left out, and why; empty where nobody knows."""
    return read_report(_PACKAGE).get("left_out", {})


def read_report(package: Path) -> dict[str, Any]:
    """What the build that made this package wrote: ``id``, ``nvcc``, ``built`` and ``left_out``."""
    try:
        report = json.loads((package / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


@functools.cache
def _needed_id(package: Path) -> str | None:
    root = package.parent
    is_ours = (root / "csrc" / "nvlink_bindings.cpp").is_file()  # and not another project's csrc
    if is_ours and (root / "setup.py").is_file():
        return id_of_sources(root)
    return read_report(package).get("id")
