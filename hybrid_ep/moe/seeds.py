"""Weights drawn from a seed, alike on every device and whatever the defaults of torch."""

from __future__ import annotations

import torch
from torch import Tensor


def generator_of(seed: int, expert: int) -> torch.Generator:
    """Of one expert (-1: of the router), on the CPU so that every device draws alike."""
    return torch.Generator("cpu").manual_seed(seed * 1_000_003 + expert + 1)


def draw(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Float32 of the normal distribution, on the CPU; the defaults of torch do not matter."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
