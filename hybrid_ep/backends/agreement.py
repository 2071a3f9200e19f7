"""What ranks tell each other when a call of the torch backend begins: tables of one row per peer.

A row has these words:

    call     which call this is: equal on all ranks, or their calls do not belong together
    next     the sizes of a dispatch that the rank makes next, in the same call of the user
    counts   another for each peer: ``torch_layout.count_for_peers``
"""

from __future__ import annotations

import torch
from torch import Tensor

_PHASES = ("route", "dispatch", "combine")
_SIZES = {  # of a phase, in the order in which ranks tell them to each other
    "route": ("topk",),
    "dispatch": (
        "bytes of x per token",
        "bytes of scales per token",
        "bytes of weights per token",
        "the dtype of x",
        "the dtype of scales",
    ),
    "combine": ("bytes per row", "the dtype of rows", "values beside the rows"),
}
_COMMON = 5  # words before the sizes: phase, Buffer, call, and who made the layout
_MOST_SIZES = max(map(len, _SIZES.values()))
_CALL = slice(0, _COMMON + _MOST_SIZES)
_NEXT = slice(_CALL.stop, _CALL.stop + len(_SIZES["dispatch"]))
_DTYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)

NUM_WORDS = _NEXT.stop
"""Of a row, without the counts: the same in all phases, as no rank knows what the others call."""


def describe_call(
    phase: str,
    buffer: int,
    call: int,
    made_by: tuple[int, int],
    sizes: tuple[int, ...],
    next_sizes: tuple[int, ...] = (),
) -> list[int]:
    """The row without counts.

    Args:
        phase: of ``Backend``'s verbs.
        buffer: its number.
        call: its number.
        made_by: of the layout in use, (0, 0) for none.
        sizes: of this call: ``dispatch_sizes``, ``combine_sizes`` or topk.
        next_sizes: of the dispatch that follows; none where no other does, or not at once.
    """
    words = [_PHASES.index(phase), buffer, call, *made_by, *sizes]
    words += [0] * (_CALL.stop - len(words)) + [*next_sizes]
    return words + [0] * (NUM_WORDS - len(words))


def dispatch_sizes(x: Tensor, scales: Tensor | None, weights: Tensor | None) -> tuple[int, ...]:
    """Bytes per token of each, 0 for None; and the dtypes that are free."""
    widths = (0 if t is None else t.shape[1] * t.element_size() for t in (x, scales, weights))
    return *widths, _number_of(x.dtype), 0 if scales is None else _number_of(scales.dtype)


def combine_sizes(rows: Tensor, values: Tensor | None) -> tuple[int, ...]:
    """Bytes per row, the dtype, and whether values go along."""
    row_bytes = rows.shape[1] * rows.element_size()
    return row_bytes, _number_of(rows.dtype), int(values is not None)


def _number_of(dtype: torch.dtype) -> int:
    """The same on all ranks, as they run the same torch; never 0, which stands for no tensor."""
    return 1 + _DTYPES.index(dtype)


def goes_on(row: list[int]) -> bool:
    """Whether the rank that told this row makes a dispatch next, and told its sizes."""
    return any(row[_NEXT])


def difference(mine: list[int], theirs: list[int]) -> str | None:
    """In words, how the calls of two rows differ; None where they belong together."""
    if mine[_CALL] == theirs[_CALL]:
        return None
    phase = _PHASES[mine[0]]
    if theirs[0] != mine[0]:
        return f"the peer made another call: {phase} here, {_PHASES[theirs[0]]} there"
    if theirs[1] != mine[1]:
        return f"the peer made a call of another Buffer: {mine[1]} here, {theirs[1]} there"
    if theirs[2] != mine[2]:
        return f"the peer made another call: its number is {mine[2]} here, {theirs[2]} there"
    if text := _differing(phase, mine[_COMMON:], theirs[_COMMON:]):
        return text
    here, there = (f"call {row[4]} of Buffer {row[3]}" for row in (mine, theirs))
    return (
        f"the peer replays the layout of another route: that of {here} here, that of {there} there"
    )


def next_difference(mine: list[int], theirs: list[int]) -> str | None:
    """In words, how the dispatches that follow differ; None where they belong together."""
    return _differing("dispatch", mine[_NEXT], theirs[_NEXT])


def _differing(phase: str, mine: list[int], theirs: list[int]) -> str | None:
    differing = [
        f"{name} is {_told(name, here)} here, {_told(name, there)} there"
        for name, here, there in zip(_SIZES[phase], mine, theirs, strict=False)
        if here != there
    ]
    return f"the peer made another call: {'; '.join(differing)}" if differing else None


def _told(name: str, value: int) -> str:
    if "dtype" in name:
        return str(_DTYPES[value - 1]).removeprefix("torch.") if value else "none"
    return str(value)
