"""The files that commands write: whether they can be written shows before the work begins."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def make_room(option: str, path: Path | None) -> None:
    """Make the folder of a file that an option names.

    Raises:
        ValueError: the file cannot be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} must name a file that can be written: {error}") from error
    check_writable(option, path)


def check_writable(option: str, path: Path | None) -> None:
    """Check a file whose folder exists.

    Raises:
        ValueError: it cannot be written.
    """
    if path is None:
        return
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} must name a file that can be written, got {path}")


def check_matplotlib(path: Path | None) -> None:
    """Check what --plot needs.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave --plot out")
