#!/usr/bin/env python3
"""Draws docs/overview.svg: tokens of two ranks on their way to rows of experts and back.

With --check, fails if the file is not what this would draw.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "docs" / "overview.svg"
RANKS = {0: "abc", 1: "def"}  # the tokens of each rank
EXPERTS = {0: (0, 1), 1: (2, 3)}  # the experts of each rank
TOPK = {"a": (0, 2), "b": (2, 3), "c": (0, 1), "d": (1, 3), "e": (0, 3), "f": (2, 3)}
COLOURS = {0: "#0072B2", 1: "#D55E00"}  # of the rank that a token comes from
INK, FRAME, PAPER = "#222222", "#8c8c8c", "#ffffff"

WIDTH, HEIGHT, BAND, TOP = 900, 432, 172, 46  # of the picture, of a rank's band, of the first band
TOKENS, ROWS, SUMS = (72, 132), (400, 500), (768, 828)  # left and right edges of the columns
TOKEN_HEIGHT, ROW_HEIGHT = 30, 18
NAME = 30  # width of an expert's name beside its rows
FAN = 60  # from where a copy parts, or parts join, to the rows


def main() -> None:
    drawn = "\n".join(draw()) + "\n"
    if sys.argv[1:] == ["--check"]:
        if not TARGET.exists() or TARGET.read_text() != drawn:
            sys.exit("docs/overview.svg is not what tools/draw_overview.py draws: run it")
        return
    TARGET.write_text(drawn)


def draw() -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14" text-anchor="middle">'
    )
    yield "<title>Tokens of two ranks go straight to rows of experts and return as sums</title>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{PAPER}"/>'
    for rank in RANKS:
        yield (
            f'<rect x="12" y="{band(rank)}" width="{WIDTH - 24}" height="{BAND}" rx="6" '
            f'fill="none" stroke="{FRAME}"/>'
        )
        yield text(20, band(rank) + 20, f"rank {rank}", anchor="start", weight="bold")
    for x, words in (
        (sum(TOKENS) / 2, "tokens"),
        ((TOKENS[1] + ROWS[0]) / 2, "dispatch"),
        (sum(ROWS) / 2, "rows by expert"),
        ((ROWS[1] + SUMS[0]) / 2, "combine"),
        (sum(SUMS) / 2, "sums"),
    ):
        yield text(x, 30, words, weight="bold")
    yield text(sum(ROWS) / 2, band(1) - 7, "NVLink", size=12, colour=FRAME)
    for rank, tokens in RANKS.items():
        for token in tokens:
            yield from copies(rank, token)
    for rank, tokens in RANKS.items():
        for token in tokens:
            y = token_y(rank, token)
            yield box(TOKENS, y, TOKEN_HEIGHT, COLOURS[rank], token)
            yield box(SUMS, y, TOKEN_HEIGHT, COLOURS[rank], f"y({token})")
    for rank in RANKS:
        yield from rows(rank)
    yield "</svg>"


def copies(rank: int, token: str) -> Iterator[str]:
    """A line per rank that has experts of the token, each way, and how it parts and joins."""
    y = token_y(rank, token)
    for owner in RANKS:
        targets = [row_y(owner, e, token) for e in EXPERTS[owner] if e in TOPK[token]]
        if not targets:
            continue
        middle = sum(targets) / len(targets)
        wide = 2.2 if owner != rank else 1.2
        yield curve(TOKENS[1], y, ROWS[0] - FAN, middle, COLOURS[rank], wide)
        yield curve(ROWS[1] + FAN, middle, SUMS[0], y, COLOURS[rank], wide)
        for target in targets:
            yield curve(ROWS[0] - FAN, middle, ROWS[0], target, COLOURS[rank], wide)
            yield curve(ROWS[1], target, ROWS[1] + FAN, middle, COLOURS[rank], wide)


def rows(rank: int) -> Iterator[str]:
    for expert in EXPERTS[rank]:
        placed = rows_of(expert)
        places = [row_y(rank, expert, token) for _, token in placed]
        middle = sum(places) / len(places)
        for (source, token), y in zip(placed, places, strict=True):
            yield box((ROWS[0] + NAME, ROWS[1]), y, ROW_HEIGHT - 2, COLOURS[source], token, size=12)
        where = f'y="{places[0] - ROW_HEIGHT / 2 - 1:.1f}" height="{ROW_HEIGHT * len(places) + 2}" '
        wide = ROWS[1] - ROWS[0] + 2
        yield f'<rect x="{ROWS[0]}" {where} width="{wide}" fill="none" stroke="{INK}"/>'
        yield f'<rect x="{ROWS[0]}" {where} width="{NAME - 2}" fill="{INK}"/>'
        yield text(
            ROWS[0] + NAME / 2 - 1, middle + 4, f"E{expert}", 12, weight="bold", colour=PAPER
        )


def rows_of(expert: int) -> list[tuple[int, str]]:
    """The rows of an expert, as the library orders them: by source rank, then by token."""
    return [(rank, t) for rank, tokens in RANKS.items() for t in tokens if expert in TOPK[t]]


def band(rank: int) -> int:
    """The upper edge of a rank's band."""
    return TOP + rank * (BAND + 22)


def token_y(rank: int, token: str) -> float:
    return band(rank) + 44 + 42 * RANKS[rank].index(token)


def row_y(rank: int, expert: int, token: str) -> float:
    before = sum(len(rows_of(e)) for e in EXPERTS[rank] if e < expert)
    gaps = 10 * EXPERTS[rank].index(expert)
    number = before + [t for _, t in rows_of(expert)].index(token)
    high = ROW_HEIGHT * sum(len(rows_of(e)) for e in EXPERTS[rank]) + 10
    return band(rank) + (BAND - high + ROW_HEIGHT) / 2 + gaps + ROW_HEIGHT * number


def box(edges: tuple[int, int], y: float, high: int, colour: str, words: str, size=14) -> str:
    left, right = edges
    return (
        f'<rect x="{left}" y="{y - high / 2:.1f}" width="{right - left}" height="{high}" rx="3" '
        f'fill="{colour}"/>' + text((left + right) / 2, y + size / 3, words, size, colour=PAPER)
    )


def curve(x0: float, y0: float, x1: float, y1: float, colour: str, wide: float) -> str:
    bend = (x1 - x0) / 2
    path = f"M{x0} {y0:.1f} C{x0 + bend} {y0:.1f} {x1 - bend} {y1:.1f} {x1} {y1:.1f}"
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{wide}"/>'


def text(x, y, words, size=14, *, anchor="middle", weight="normal", colour=INK) -> str:
    return (
        f'<text x="{x:g}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{colour}">{words}</text>'
    )


if __name__ == "__main__":
    main()
