"""How the ranks agree on a call of the torch backend: by tables of one row per peer.

A row has these words:

    call     which call this is: equal on all ranks, or their calls do not belong together
    next     the sizes of a dispatch that the rank makes next, in the same call of the user
    counts   another for each peer: ``layout.count_for_peers``
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hybrid_ep.backends.torch.layout import Counts, Layout
from hybrid_ep.backends.torch.messages import Exchange, Told
from hybrid_ep.shape import NUMBER_OF_DTYPE, Shape

_PHASES = ("route", "dispatch", "combine")
_SIZES = {  # of a phase, in the order in which ranks tell them to each other
    "route": ("topk",),
    "dispatch": (
        "bytes of x per token",
        "bytes of scales per token",
        "bytes of weights per token",
        "the dtype of x",
        "the dtype of scales",
        "num_sms",
    ),
    "combine": ("bytes per row", "the dtype of rows", "values beside the rows", "num_sms"),
}
_COMMON = 5  # words before the sizes: phase, Buffer, call, and who made the layout
_MOST_SIZES = max(map(len, _SIZES.values()))
_CALL = slice(0, _COMMON + _MOST_SIZES)
_NEXT = slice(_CALL.stop, _CALL.stop + len(_SIZES["dispatch"]))

_WORD = 1 << 31  # numbers wrap, to fit into a word of a layout

NUM_WORDS = _NEXT.stop
"""Of a row, without the counts: the same in all phases, as no rank knows what the others call."""


class Calls:
    """The calls of a Buffer, the same on all ranks.

    Args:
        exchange: between the ranks.
        shape: says how many counts each rank tells each.
        number: of the Buffer, equal on all ranks and its own among the Buffers of the group.
        last: number of the last call of the Buffer, where a backend served it before.
    """

    def __init__(self, exchange: Exchange, shape: Shape, number: int, last: int) -> None:
        self.exchange, self.number, self.last = exchange, number % _WORD, last
        self._num_counts = Counts.num_words(shape)

    @property
    def made_by(self) -> tuple[int, int]:
        """Of a layout that this call makes."""
        return self.number, self.last % _WORD

    def describe(
        self,
        phase: str,
        sizes: tuple[int, ...],
        layout: Layout | None = None,
        next_sizes: tuple[int, ...] = (),
    ) -> list[int]:
        """The row of the next call, without counts.

        Args:
            phase: of ``Backend``'s verbs.
            sizes: of this call: ``dispatch_sizes``, ``combine_sizes`` or topk.
            layout: that is in use.
            next_sizes: of the dispatch that follows; none where no other does, or not at once.
        """
        made_by = (0, 0) if layout is None else layout.made_by
        words = [_PHASES.index(phase), self.number, self.last + 1, *made_by, *sizes]
        words += [0] * (_CALL.stop - len(words)) + [*next_sizes]
        return words + [0] * (NUM_WORDS - len(words))

    def tell(self, phase: str, words: list[int], counts: Tensor | None = None) -> Any:
        """Start a call: tell all ranks which, and each rank its counts."""
        self.exchange.call = phase, self.last + 1
        return self.exchange.tell(words, counts, self._num_counts)

    def hear(self, told: Any) -> Told:
        """All ranks make the same call, so it counts; what I told each of them, and it me."""
        tables = self.compare(told)
        self.last += 1
        return tables

    def compare(self, told: Any) -> Told:
        """What I told each rank, and it me.

        Raises:
            PeerError: a peer makes another call.
        """
        tables = self.exchange.hear(told)
        for peer, rows in enumerate(zip(*tables, strict=True)):
            if text := difference(*rows):
                raise self.exchange.lacks(peer, text)
        return tables

    def agree_on_next(self, tables: Told) -> bool:
        """Whether all ranks make a dispatch next; then they need not tell each other again.

        Raises:
            PeerError: all do, and a peer's has other sizes.
        """
        if not all(any(row[_NEXT]) for row in tables.theirs):  # on all ranks alike
            return False
        for peer, (mine, theirs) in enumerate(zip(*tables, strict=True)):
            if mine[_NEXT] != theirs[_NEXT]:
                call = self.last + 1
                self.exchange.call = "dispatch", call
                self.exchange.open()
                told = (
                    f"dispatch, call {call}{_sizes_in_words('dispatch', row[_NEXT])}"
                    for row in (mine, theirs)
                )
                raise self.exchange.lacks(peer, _both("the peer made another call", *told))
        return True

    def send(self, picked: list[Any], layout: Layout, phase: str) -> list[Any]:
        """Start to send what was picked, None aside, in the call that was agreed on last."""
        counts = layout.send_counts, layout.recv_counts
        if phase == "combine":  # sums go the way back
            counts = counts[::-1]
        self.exchange.call = phase, self.last
        return [p if p is None else self.exchange.send(p, *counts) for p in picked]


def dispatch_sizes(
    x: Tensor, scales: Tensor | None, weights: Tensor | None, num_sms: int
) -> tuple[int, ...]:
    """Bytes per token of each, 0 for None; the dtypes that are free; what the user asks for."""
    widths = (0 if t is None else t.shape[1] * t.element_size() for t in (x, scales, weights))
    dtypes = NUMBER_OF_DTYPE[x.dtype], 0 if scales is None else NUMBER_OF_DTYPE[scales.dtype]
    return *widths, *dtypes, num_sms


def combine_sizes(rows: Tensor, values: Tensor | None, num_sms: int) -> tuple[int, ...]:
    """Bytes per row, the dtype, whether values go along, and what the user asks for."""
    row_bytes = rows.shape[1] * rows.element_size()
    return row_bytes, NUMBER_OF_DTYPE[rows.dtype], int(values is not None), num_sms


def difference(mine: list[int], theirs: list[int]) -> str | None:
    """In words, how the calls of two rows differ; None where they belong together."""
    if mine[_CALL] == theirs[_CALL]:
        return None
    calls = [_call_in_words(words) for words in (mine, theirs)]
    if theirs[1] != mine[1]:
        calls = [
            f"Buffer {row[1]}, {told}" for row, told in zip((mine, theirs), calls, strict=True)
        ]
        return _both("the peer made a call of another Buffer", *calls)
    if mine[:3] != theirs[:3] or mine[3:_COMMON] == theirs[3:_COMMON]:
        return _both("the peer made another call", *calls)
    made_by = (f"call {row[4]} of Buffer {row[3]}" for row in (mine, theirs))
    calls = [f"{call}, the layout of {route}" for call, route in zip(calls, made_by, strict=True)]
    return _both("the peer replays the layout of another route", *calls)


def _both(what: str, here: str, there: str) -> str:
    return f"{what}; here: {here}; there: {there}"


def _call_in_words(words: list[int]) -> str:
    """Such as ``dispatch, call 16, rows of 2,048 bytes (bfloat16)``."""
    phase = _PHASES[words[0]]
    return f"{phase}, call {words[2]}{_sizes_in_words(phase, words[_COMMON:])}"


def _sizes_in_words(phase: str, sizes: list[int]) -> str:
    """The sizes of a call, each behind a comma."""
    if phase == "route":
        return f", top-{sizes[0]}"
    if phase == "dispatch":
        x, scales, weights, dtype, dtype_of_scales, num_sms = sizes[:6]
        told = f", rows of {x:,} bytes ({_dtype_name(dtype)})"
        if dtype_of_scales:
            told += f", scales of {scales:,} bytes ({_dtype_name(dtype_of_scales)})"
        told += f", weights of {weights:,} bytes" if weights else ""
        return told + (f", num_sms={num_sms}" if num_sms else "")
    row_bytes, dtype, has_values, num_sms = sizes[:4]
    told = f", rows of {row_bytes:,} bytes ({_dtype_name(dtype)})"
    told += ", values beside the rows" if has_values else ""
    return told + (f", num_sms={num_sms}" if num_sms else "")


def _dtype_name(number: int) -> str:
    return str([*NUMBER_OF_DTYPE][number - 1]).removeprefix("torch.")
