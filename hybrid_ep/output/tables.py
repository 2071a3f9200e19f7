"""Tables of text, and numbers as they stand in them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def print_table(title: str, header: Sequence[str], rows: Rows, *, texts: int | None = None) -> None:
    """Print a table: by rich where that is installed and a person looks on, else as plain text.

    Args:
        title: a line above it.
        header: names of the columns.
        rows: the cells.
        texts: so many columns, the first, are text and stand to the left, the others are numbers
            and stand to the right; None: all are text.
    """
    texts = len(header) if texts is None else texts
    if sys.stdout.isatty():
        try:
            _print_rich(title, header, rows, texts)
            return
        except ImportError:
            pass
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    print(title)
    for line in lines:
        cells = [
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())
    print()


def in_bytes(value: float) -> str:
    """A number of bytes in the unit that suits it, of 1e3, 1e6 or 1e9 bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f} B"


def _print_rich(title: str, header: Sequence[str], rows: Rows, texts: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < texts else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
