"""Routing and payload of all ranks, as functions of (rank, token); all of it on the host."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_ep.shape import Shape

EXPERTS_PER_RANK = 4
TOPK = 4
TOKENS = 96
HIDDEN = 128


def shape_of(num_ranks: int, ranks_per_node: int | None) -> Shape:
    """The sizes of most cases; ValueError where the ranks break a rule."""
    return Shape(
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        num_experts=EXPERTS_PER_RANK * num_ranks,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        topk=TOPK,
    )


@dataclass(frozen=True)
class Case:
    """What the ranks send and what their experts make of it.

    Attributes:
        num_ranks: the ranks.
        seed: of payload and weights, and of routing.
        routing_seed: of routing, where it is that of another case.
        tokens: T of each rank, None for ``TOKENS`` everywhere.
        holes: whether slots are empty (-1) or repeat an expert.
        align, max_rows: as of dispatch.
        hidden: H.
        dtype: of what the experts make.
    """

    num_ranks: int
    seed: int
    routing_seed: int | None = None
    tokens: tuple[int, ...] | None = None
    holes: bool = False
    align: int = 1
    max_rows: int | None = None
    hidden: int = HIDDEN
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """T of each rank."""
        return self.tokens or (TOKENS,) * self.num_ranks

    @functools.cached_property
    def topk_idx(self) -> list[Tensor]:
        """The routing of each rank, int64 ``[T, K]``."""
        return [self._draw_experts(rank) for rank in range(self.num_ranks)]

    @functools.cached_property
    def weights(self) -> list[Tensor]:
        """The slots' weights of each rank, float32 ``[T, K]``."""
        return [self._draw_weights(rank) for rank in range(self.num_ranks)]

    def payload(self, rank: int) -> Tensor:
        """bf16 ``[T, H]`` of any bits, NaN too: dispatch only moves them."""
        token = torch.arange(self.num_tokens[rank])
        return self.rows_of(torch.full_like(token, rank), token).view(torch.bfloat16)

    def rows_of(self, source: Tensor, token: Tensor) -> Tensor:
        """The payload's bits of these tokens, int16 ``[N, H]``."""
        return bits(key_of(source, token), self.hidden, self.seed)

    def outputs_of(self, source: Tensor, token: Tensor, expert: Tensor) -> Tensor:
        """What the experts make of these tokens, ``[N, H]``."""
        return numbers(key_of(source, token, expert), self.hidden, self.seed + 1, self.dtype)

    def _draw_experts(self, rank: int) -> Tensor:
        seed = self.seed if self.routing_seed is None else self.routing_seed
        generator = torch.Generator().manual_seed(seed * 7919 + rank)
        num_tokens, experts = self.num_tokens[rank], EXPERTS_PER_RANK * self.num_ranks
        chosen = torch.rand(num_tokens, experts, generator=generator).topk(TOPK, dim=1).indices
        if self.holes:
            luck = torch.rand(num_tokens, TOPK, generator=generator)
            chosen = torch.where(luck < 0.3, -1, chosen)
            chosen[:, -1] = torch.where(luck[:, -1] > 0.6, chosen[:, 0], chosen[:, -1])
            chosen[::7] = -1
        return chosen

    def _draw_weights(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 104729 + rank)
        return torch.rand(self.num_tokens[rank], TOPK, generator=generator)


# ---- values, a function of a key each


def key_of(source: Tensor | int, token: Tensor, expert: Tensor | None = None) -> Tensor:
    """int64 ``[N]``: names a token, or what an expert made of it."""
    key = source * 65537 + token
    return key if expert is None else key * 4099 + expert


def bits(key: Tensor, width: int, seed: int) -> Tensor:
    """int16 ``[N, width]``, any of them."""
    return ((_mixed(key, width, seed) & 0xFFFF) - 0x8000).to(torch.int16)


def numbers(key: Tensor, width: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``[N, width]``: from 2**-12 to 2**12 in size, and every other one plus or minus 2**30.

    Rounding to bf16 would hide in which order a sum was made, if large terms did not cancel.
    """
    mixed = _mixed(key, width, seed)
    significand = 1 + (mixed & 0xFFFF).float() / 0x10000
    exponent = (mixed >> 16) % 24 - 12
    size = torch.where(mixed >> 24 & 1 == 1, 2.0**30, torch.ldexp(significand, exponent))
    return (size * (1 - 2 * (mixed >> 25 & 1))).to(dtype)


def _mixed(key: Tensor, width: int, seed: int) -> Tensor:
    """int64 ``[N, width]`` of 32 well mixed bits, by key, place and seed."""
    value = key.unsqueeze(1) * 2654435761 + torch.arange(width) * 40503 + seed * 97_003 + 1
    for _ in range(2):
        value = ((value ^ (value >> 16)) * 73244475) & 0xFFFFFFFF
    return value ^ (value >> 16)
