"""Pictures by matplotlib, which is optional and imported late."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_pyplot() -> Any:
    """``matplotlib.pyplot``, drawing into files alone.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def write(figure: Any, path: Path) -> None:
    """Write a figure of pyplot, in the format of the name's ending, and forget it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    load_pyplot().close(figure)
