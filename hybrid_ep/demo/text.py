"""Text that every machine has: the sources of Python's standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library_files() -> list[Path]:
    """Python's own modules, in an order that depends on nothing but their names.

    Raises:
        ValueError: this Python came without its sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if len(files) < 20:
        raise ValueError(
            "the demo learns from the sources of Python's standard library, and this Python has "
            f"none in {folder}"
        )
    return files


def load_text() -> tuple[Tensor, Tensor]:
    """Bytes to learn from and bytes of other files, every tenth, held out; both int64 ``[N]``."""
    files = standard_library_files()
    held_out = files[5::10]
    del files[5::10]
    return _bytes_of(files), _bytes_of(held_out)


def _bytes_of(files: list[Path]) -> Tensor:
    text = bytearray(b"\n".join(file.read_bytes() for file in files))
    return torch.frombuffer(text, dtype=torch.uint8).long()


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """``[B, length]`` bytes from each start on, on the device of the text."""
    return text[starts[:, None].to(text.device) + torch.arange(length, device=text.device)]


def unigram_bits(training: Tensor, held_out: Tensor) -> float:
    """Bits per byte of a code that knows how often each byte occurs, and nothing else."""
    seen = torch.bincount(training.cpu(), minlength=256).double() + 1
    bits = -(seen / seen.sum()).log2()
    return float(bits[held_out.cpu()].mean())
