"""The build backend: setuptools', and NVSHMEM's wheel where the build can use one.

pip builds in an environment of its own, which has what this asks for. The extension of several
nodes is compiled with NVSHMEM, whose wheel must fit the CUDA of nvcc, and at run time the same
version must be there. So this asks for the version that the target environment has, else for a
recent one; and for none where no index offers it, as the rest can be built without.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the other hooks

MIN_NVSHMEM = "3.4.5"  # MIN_VERSION of hybrid_ep/backends/cuda/nvshmem_library.py
_TIMEOUT_S = 180


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *nvshmem_wheels()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *nvshmem_wheels()]


def find_nvcc() -> str | None:
    """The nvcc of CUDA_HOME if it has one, else the one on PATH."""
    cuda_home = os.environ.get("CUDA_HOME")
    return (cuda_home and shutil.which("nvcc", path=f"{cuda_home}/bin")) or shutil.which("nvcc")


def nvcc_version(nvcc: str) -> str | None:
    """Such as ``13.0.88``; None where it does not say."""
    told = _run(nvcc, "--version")
    match = re.search(r"release [\d.]+, V([\d.]+)", told or "")
    return match[1] if match else None


def nvshmem_wheels() -> list[str]:
    """The requirement of NVSHMEM's wheel, or none."""
    nvcc = find_nvcc()
    if nvcc is None or os.environ.get("NVSHMEM_HOME"):
        return []
    major = (nvcc_version(nvcc) or "").partition(".")[0]
    if major not in ("12", "13"):
        return []
    wheel = f"nvidia-nvshmem-cu{major}"
    installed = installed_version(wheel)
    wanted = f"{wheel}=={installed}" if installed else f"{wheel}>={MIN_NVSHMEM}"
    if offered(wanted):
        return [wanted]
    print(f"hybrid_ep: no index offers {wanted}, so this is built for one node.", file=sys.stderr)
    return []


def installed_version(package: str) -> str | None:
    """The version in the environment that is installed into; pip hides it from the build."""
    program = f"from importlib.metadata import version; print(version({package!r}))"
    return (_run(sys.executable, "-I", "-c", program) or "").strip() or None


def offered(requirement: str) -> bool:
    """Whether pip finds it; also where there is no pip to ask, whose builder will tell."""
    if _run(sys.executable, "-I", "-m", "pip", "--version") is None:
        return True
    options = ("--dry-run", "--no-deps", "--ignore-installed", "--quiet")
    return _run(sys.executable, "-I", "-m", "pip", "install", *options, requirement) is not None


def _run(*command: str | Path) -> str | None:
    """What a command prints; None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
