"""Tables of text that fit the terminal, and numbers as they stand in them.

No cell is ever cut. A table that is wider than the terminal is narrowed in this order: headers and
long texts are broken at spaces; then the columns are divided into several tables below each other,
each of which repeats the key columns. Output that goes to a file or a pipe keeps one line per row.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence

Rows = Sequence[Sequence[str]]

_GAP = "  "  # before each column
_UNBROKEN = 20  # a cell of at most so many characters stays on one line


def print_table(
    title: str,
    header: Sequence[str],
    rows: Rows,
    *,
    texts: int | None = None,
    keys: int = 1,
) -> None:
    """Print a table as wide as the terminal allows; with rich, where installed, in bold.

    Args:
        title: a line above it.
        header: names of the columns.
        rows: the cells.
        texts: so many columns, the first, are text and stand to the left, the others are numbers
            and stand to the right; None: all are text.
        keys: so many columns, the first, say what a row is about.
    """
    texts = len(header) if texts is None else texts
    say_title, say = _printers()
    say_title(title)
    for columns in _divide(header, rows, keys, _terminal_width()):
        part = [[line[i] for i in columns] for line in (header, *rows)]
        lefts = [i < texts for i in columns]
        widths = _fit(part, _terminal_width())
        for number, line in enumerate(part):
            for text in _lines(line, widths, lefts):
                (say_title if number == 0 else say)(text)
        print()


def drop_constants(
    header: Sequence[str], rows: Rows, names: Sequence[str]
) -> tuple[list[str], list[list[str]], str]:
    """Take the columns that have the same cell in all rows out of a table.

    Args:
        header: names of the columns.
        rows: the cells.
        names: columns that may be taken out.

    Returns:
        tuple: the header and the rows that are left, and the columns taken out, such as
            ``"hidden 7168, topk 8"``.
    """
    constant = [
        i
        for i, name in enumerate(header)
        if name in names and len({row[i] for row in rows}) == 1 and len(rows) > 1
    ]
    kept = [i for i in range(len(header)) if i not in constant]
    told = ", ".join(f"{header[i]} {rows[0][i]}" for i in constant)
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows], told


def in_bytes(value: float) -> str:
    """A number of bytes in the unit that suits it, of 1e3, 1e6, 1e9 or 1e12 bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f} B"


def _terminal_width() -> int | None:
    """Columns of the terminal; None where the output goes elsewhere and nobody set COLUMNS."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None


def _printers() -> tuple[Callable[[str], None], Callable[[str], None]]:
    """What prints a title, and what prints a row."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            return print, print
        console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        return (lambda text: console.print(text, style="bold")), console.print
    return print, print


def _divide(header: Sequence[str], rows: Rows, keys: int, limit: int | None) -> list[list[int]]:
    """Groups of columns, each with the key columns, that fit as far as they can."""
    lines = [header, *rows]
    narrowest = [_narrowest([line[i] for line in lines]) + len(_GAP) for i in range(len(header))]
    repeated = list(range(keys))
    groups: list[list[int]] = [[]]
    for i in range(keys, len(header)):
        width = sum(narrowest[j] for j in (*repeated, *groups[-1], i))
        if limit is not None and groups[-1] and width > limit:
            groups.append([])
        groups[-1].append(i)
    return [repeated + group for group in groups]


def _fit(lines: Rows, limit: int | None) -> list[int]:
    """Widths of columns: that of the widest cell, less where the lines would be too long."""
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    narrowest = [_narrowest(column) for column in columns]
    while limit is not None and sum(widths) + len(_GAP) * len(widths) > limit:
        spare = [i for i in range(len(widths)) if widths[i] > narrowest[i]]
        if not spare:
            break
        widths[max(spare, key=lambda i: widths[i])] -= 1
    return widths


def _narrowest(column: Sequence[str]) -> int:
    """The least width of a column, of which the first cell is the header."""
    words = [len(word) for word in column[0].split()]
    for cell in column[1:]:
        words += (
            [len(cell)] if len(cell) <= _UNBROKEN else map(len, (*cell.split(), "x" * _UNBROKEN))
        )
    return max(words, default=0)


def _lines(line: Sequence[str], widths: Sequence[int], lefts: Sequence[bool]) -> list[str]:
    """A row, in as many lines as its highest cell."""
    broken = [
        textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) or [""]
        if len(cell) > width
        else [cell]
        for cell, width in zip(line, widths, strict=True)
    ]
    lines = []
    for number in range(max(map(len, broken))):
        cells = [cell[number] if number < len(cell) else "" for cell in broken]
        lines.append(
            "".join(
                _GAP + (cell.ljust(width) if left else cell.rjust(width))
                for cell, width, left in zip(cells, widths, lefts, strict=True)
            ).rstrip()
        )
    return lines
