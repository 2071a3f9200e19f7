"""Text that every machine has: the sources of Python's standard library, byte by byte."""

from __future__ import annotations

import functools
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
HELD_OUT_EVERY = 20  # files


@functools.cache
def load_text() -> tuple[Tensor, Tensor]:
    """Bytes to learn from, and bytes of other files held out; uint8 ``[N]``."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in ("site-packages", "dist-packages")]
        files += [Path(place, name) for name in names if name.endswith(".py")]
    files.sort()
    if len(files) < 2 * HELD_OUT_EVERY:
        raise ValueError(f"this Python must come with its sources, found {len(files)} in {folder}")
    held_out = files[::HELD_OUT_EVERY]
    del files[::HELD_OUT_EVERY]
    return tuple(
        torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in part)), dtype=torch.uint8)
        for part in (files, held_out)
    )


class Windows:
    """Sequences of a text, in an order that starts anew, shuffled otherwise, with each pass.

    Args:
        text: uint8 ``[N]``.
        length: bytes of a sequence; each has one more, the target of its last byte.
        seed: of the order.
    """

    def __init__(self, text: Tensor, length: int, seed: int) -> None:
        self.text, self.length, self.seed = text, length, seed
        self.count = (len(text) - 1) // length
        if self.count < 1:
            raise ValueError(f"--sequence must be below the text's {len(text)} bytes, got {length}")
        self._order = -1, torch.empty(0, dtype=torch.int64)

    def take(self, begin: int, number: int) -> Tensor:
        """Int64 ``[number, length + 1]``: sequences ``begin``, ``begin + 1``, ... of all passes."""
        starts = [self._window(position) * self.length for position in range(begin, begin + number)]
        rows = torch.tensor(starts)[:, None] + torch.arange(self.length + 1)
        return self.text[rows].long()

    def _window(self, position: int) -> int:
        turn, place = divmod(position, self.count)
        if self._order[0] != turn:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + turn)
            self._order = turn, torch.randperm(self.count, generator=generator)
        return int(self._order[1][place])
