"""Where NVSHMEM is on this machine. setup.py uses this file too, so it imports no torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

HOST_LIBRARY = "libnvshmem_host.so.3"

# The versions that docs/cluster.md, pyproject.toml and the doctor name. From MIN_VERSION on,
# NVSHMEM rings the card's bell from the CPU where the GPU may not.
MIN_VERSION = (3, 4, 5)
ROCE_VERSION = (3, 5)  # NVSHMEM#21: up to 3.4.5, IBGDA creates address handles from garbage


def find_home(environment: Mapping[str, str] | None = None) -> Path | None:
    """The folder with NVSHMEM's ``include`` and ``lib``: NVSHMEM_HOME, else that of a wheel."""
    if home := (os.environ if environment is None else environment).get("NVSHMEM_HOME"):
        return Path(home)
    try:
        found = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # no package nvidia either
        return None
    folders = list(found.submodule_search_locations or ()) if found else []
    return Path(folders[0]) if folders else None


def load_host_library(environment: Mapping[str, str] | None = None) -> None:
    """Load the library that ``hybrid_ep._nvshmem`` is linked with.

    Raises:
        ImportError: it is nowhere, or cannot be loaded; the text says where it was looked for.
    """
    home = find_home(environment)
    if home is None:
        raise ImportError(
            "NVSHMEM is not here: install the wheel nvidia-nvshmem-cu13 (or -cu12), or set "
            "NVSHMEM_HOME"
        )
    try:
        ctypes.CDLL(str(home / "lib" / HOST_LIBRARY), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ImportError(f"NVSHMEM cannot be loaded: {error}") from error
