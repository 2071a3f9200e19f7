"""Pictures by matplotlib, which is optional and imported late: their look, labels and bars."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Okabe and Ito's colours, which the colour-blind tell apart, in an order that greyscale keeps
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#595959"  # of what is compared with
MARKERS = "os^Dvp"
_LOOK = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
}
_LINE_INCHES = 0.2  # a line of text
PANEL_WIDTH = 7.4  # inches
_TITLE_INCHES_PER_CHARACTER = 0.115
_EDGE = 0.3
_ABOVE, _BELOW = 0.75, 0.75  # a panel's axes: room for two titles, for ticks and their name
_BAR_INCHES = 0.26


class End(NamedTuple):
    """A label where a curve ends: its place in data, its text, its colour."""

    x: float
    y: float
    text: str
    colour: str


class Bar(NamedTuple):
    """A bar: its name, where it begins and ends, what stands at its end, its colour."""

    name: str
    begin: float
    end: float
    text: str
    colour: str


class Panel(NamedTuple):
    """Draws into axes, below a bold title and a grey line.

    Inches: its height with these lines and with its ticks, and the margins beside its axes.
    """

    draw: Callable[[Any], None]
    title: str
    subtitle: str
    height: float
    left: float
    right: float


def load_pyplot() -> Any:
    """``matplotlib.pyplot``, drawing into files alone, with the look of our pictures.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update(_LOOK)
    from matplotlib import pyplot

    return pyplot


def write(figure: Any, path: Path) -> None:
    """Write a figure of pyplot, in the format of the name's ending, and forget it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    load_pyplot().close(figure)


def write_panels(
    rows: Sequence[Sequence[Panel | None]],
    title: str,
    path: Path,
    *,
    panel_width: float = PANEL_WIDTH,
) -> None:
    """Write rows of panels below a title; each panel keeps its own height and margins."""
    heights = [max(panel.height for panel in row if panel) for row in rows]
    width = panel_width * len(rows[0])
    lines = textwrap.wrap(title, int((width - 2 * _EDGE) / _TITLE_INCHES_PER_CHARACTER))
    above = 0.25 + 0.25 * len(lines)
    height = sum(heights) + above
    figure = load_pyplot().figure(figsize=(width, height))

    def put(text: str, left: float, below: float, **look: Any) -> None:
        figure.text(left / width, below / height, text, va="center", **look)

    put("\n".join(lines), _EDGE, height - above / 2, fontsize=14)
    top = height - above
    for row, row_height in zip(rows, heights, strict=True):
        for column, panel in enumerate(row):
            if panel is not None:
                left = column * panel_width
                put(panel.title, left + _EDGE, top - 0.2, fontweight="bold", fontsize=12)
                put(panel.subtitle, left + _EDGE, top - 0.43, fontsize=10, color=GREY)
                wide = panel_width - panel.left - panel.right
                high = panel.height - _ABOVE - _BELOW
                place = (left + panel.left, top - _ABOVE - high, wide, high)
                panel.draw(figure.add_axes(_fractions(place, width, height)))
        top -= row_height
    write(figure, path)


def _fractions(place: Sequence[float], width: float, height: float) -> list[float]:
    return [inches / (width, height)[i % 2] for i, inches in enumerate(place)]


def label_ends(axes: Any, ends: Sequence[End]) -> None:
    """Write each label to the right of the axes, as near to its point as the others allow.

    Args:
        axes: with their limits set.
        ends: the labels.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = sorted(ends, key=lambda end: end.y)
    wanted = [to_axes.transform((end.x, end.y))[1] for end in ends]
    height = axes.get_position().height * axes.figure.get_figheight()
    for end, place in zip(ends, spread(wanted, _LINE_INCHES / height), strict=True):
        axes.annotate(
            end.text,
            xy=(end.x, end.y),
            xytext=(1.06, place),
            textcoords="axes fraction",
            va="center",
            color=end.colour,
            arrowprops={
                "arrowstyle": "-",
                "color": end.colour,
                "linewidth": 0.7,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 4,
            },
            annotation_clip=False,
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Ascending places moved apart, so that none is nearer to the next one than ``gap``.

    Those that touch share the move: their middle stays where it was.
    """
    groups: list[list[float]] = []  # [middle, number of places]
    for place in places:
        groups.append([place, 1])
        while len(groups) > 1:
            (below, many), (above, more) = groups[-2:]
            if above - below >= gap * (many + more) / 2:
                break
            groups[-2:] = [[(below * many + above * more) / (many + more), many + more]]
    return [
        middle + gap * (i - (number - 1) / 2)
        for middle, number in groups
        for i in range(round(number))
    ]


def bars_panel(
    title: str, subtitle: str, xlabel: str, groups: Mapping[str, Sequence[Bar]]
) -> Panel:
    """A panel of horizontal bars, each group below its heading (none if it is empty)."""
    lines = sum(len(bars) + bool(heading) + 0.4 for heading, bars in groups.items())
    longest = max(len(bar.name) for bars in groups.values() for bar in bars)
    height, left = _ABOVE + _BELOW + _BAR_INCHES * lines, 0.4 + 0.085 * longest
    draw = functools.partial(_draw_bars, xlabel, groups)
    return Panel(draw, title, subtitle, height, left, right=0.6)


def _draw_bars(xlabel: str, groups: Mapping[str, Sequence[Bar]], axes: Any) -> None:
    names, places, place = [], [], 0.0
    for heading, bars in groups.items():
        if heading:
            axes.text(0, place, heading, fontweight="bold", va="center")
            place += 1
        for bar in bars:
            axes.barh(place, bar.end - bar.begin, 0.75, left=bar.begin, color=bar.colour)
            axes.annotate(
                bar.text, (bar.end, place), xytext=(4, 0), textcoords="offset points", va="center"
            )
            names.append(bar.name)
            places.append(place)
            place += 1
        place += 0.4
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place - 0.7, -0.8)  # the first one on top
    axes.set_xlim(0, 1.12 * max(bar.end for bars in groups.values() for bar in bars))
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(xlabel)
    axes.grid(axis="x")
