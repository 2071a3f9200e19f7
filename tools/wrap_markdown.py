#!/usr/bin/env python3
"""Wraps the prose of Markdown files at 100 columns: paragraphs and list items with a longer line.

Tables, headings and code stay as they are. With --check, names the lines that are too long.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

WIDTH = 100
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.) +")
_MARK = re.compile(r"^(?:[-*+>]|\d+\.|#+)$")  # a word that means something else where a line begins
_GLUE = "\ufeff"


def wrap(text: str) -> str:
    """The text with its paragraphs wrapped where a line of them is too long."""
    made: list[str] = []
    for is_prose, lines in _parts(text):
        if is_prose and any(len(line) > WIDTH for line in lines):
            made += _wrap_one(lines)
        else:
            made += lines
    return "\n".join(made)


def too_long(text: str) -> list[int]:
    """Numbers of the lines of prose that are too long; one word alone may be."""
    numbers, at = [], 1
    for is_prose, lines in _parts(text):
        if is_prose:
            numbers += [
                at + i for i, line in enumerate(lines) if len(line) > WIDTH and " " in line.strip()
            ]
        at += len(lines)
    return numbers


def _parts(text: str) -> Iterator[tuple[bool, list[str]]]:
    """Paragraphs and list items, and between them what is no prose."""
    prose: list[str] = []
    in_code = False
    for line in text.split("\n"):
        is_fence = line.lstrip().startswith("```")
        other = in_code or is_fence or not line.strip() or line.lstrip().startswith(("|", "#", "<"))
        if prose and (other or _ITEM.match(line)):
            yield True, prose
            prose = []
        if other:
            yield False, [line]
        else:
            prose = [*prose, line]
        in_code ^= is_fence
    if prose:
        yield True, prose


def _wrap_one(lines: list[str]) -> list[str]:
    marker = _ITEM.match(lines[0])
    first = marker[0] if marker else re.match(r"\s*", lines[0])[0]
    words = " ".join([lines[0][len(first) :], *lines[1:]]).split()
    glued: list[str] = []
    for word in words:  # so that none of them begins a line
        if glued and _MARK.match(word):
            glued[-1] += _GLUE + word
        else:
            glued.append(word)
    wrapped = textwrap.wrap(
        " ".join(glued),
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_GLUE, " ") for line in wrapped]


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    failed = False
    for path in map(Path, (each for each in arguments if each != "--check")):
        text = path.read_text()
        if check:
            for number in too_long(text):
                failed = True
                print(f"{path}:{number}: longer than {WIDTH} columns; make format wraps it")
        elif (wrapped := wrap(text)) != text:
            path.write_text(wrapped)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
