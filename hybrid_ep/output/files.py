"""The files that commands write: whether they can be written shows before the work begins."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STDOUT = "-"  # --json without a file; hybrid_ep_cli.options knows it too


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
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} must name a file that can be written, got {path}")


def check_report(target: str | None) -> None:
    """Check ``--json [FILE]`` before the work begins; see ``tell``."""
    make_room("--json", None if target in (None, STDOUT) else Path(target))


def tell(target: str | None, report: dict[str, Any], show: Callable[[], None]) -> None:
    """Show text, or write JSON to stdout in its place, or both if the JSON goes to a file."""
    text = json.dumps(report, indent=2) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
        return
    show()
    if target is not None:
        Path(target).write_text(text)
        print(f"written to {target}")


def make_room_for_plot(path: Path | None) -> None:
    """As ``make_room`` for --plot, and check that matplotlib can draw such a file.

    Raises:
        ValueError: matplotlib is not installed, it has no such format, or the file cannot be
            written.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave --plot out")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in formats:
        endings = ", ".join(f".{name}" for name in formats)
        raise ValueError(f"--plot must end in one of {endings}, got {path}")
    make_room("--plot", path)
