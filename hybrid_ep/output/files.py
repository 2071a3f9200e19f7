"""The files that commands write: whether they can be written shows before the work begins."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
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
    """Check ``--json [FILE]`` before the work begins; see ``tell`` and ``keep``."""
    make_room("--json", None if target in (None, STDOUT) else Path(target))


def tell(target: str | None, report: dict[str, Any], show: Callable[[], None]) -> None:
    """Show text, or write JSON to stdout in its place, or both if the JSON goes to a file.

    The file is written first: a reader of the text who leaves early, as in ``| head``, loses none.
    """
    text = json.dumps(report, indent=2) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
        return
    if target is not None:
        Path(target).write_text(text)
    show()
    if target is not None:
        print(f"wrote {target}")


def keep(target: str | None, report: dict[str, Any]) -> None:
    """Write the report of a measurement to the file or the stdout that ``--json`` asked for."""
    if target == STDOUT:
        sys.stdout.write(by_lines(report))
    elif target is not None:
        Path(target).write_text(by_lines(report))


def by_lines(report: dict[str, Any]) -> str:
    """JSON with a line per entry and per record, so that a difference names what differs."""
    entries = []
    for key, value in report.items():
        told = json.dumps(value)
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            told = "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"
        entries.append(f" {json.dumps(key)}: {told}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


@contextlib.contextmanager
def text_beside(target: str | None) -> Iterator[None]:
    """If the JSON goes to stdout, text that is printed meanwhile, by ranks too, goes to stderr."""
    if target != STDOUT:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)  # started ranks inherit it
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


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
