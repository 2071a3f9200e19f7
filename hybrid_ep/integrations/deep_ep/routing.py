"""Routing as frameworks have it, indices and weights or a dense map and probs, from one another."""

from __future__ import annotations

import torch
from torch import Tensor

import hybrid_ep


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """The dense map and probs of top-k routing; -1 is no expert, and weights of repeats add.

    Args:
        topk_idx: integers ``[T, K]``.
        topk_weights: ``[T, K]``, or None.
        num_of_tokens: T.
        num_of_experts: E.

    Returns:
        tuple: bool ``[T, E]`` and float32 ``[T, E]``, None without weights.
    """
    device = topk_idx.device
    # -1 goes into a column of its own, behind the others
    column = torch.where(topk_idx >= 0, topk_idx, num_of_experts).long()
    shape = (num_of_tokens, num_of_experts + 1)
    routing_map = torch.zeros(shape, dtype=torch.bool, device=device).scatter_(1, column, True)
    routing_map = routing_map[:, :num_of_experts].contiguous()
    if topk_weights is None:
        return routing_map, None
    return routing_map, hybrid_ep.topk_to_dense(topk_weights.float(), topk_idx, num_of_experts)


def weights_of(
    topk_weights: Tensor | None, probs: Tensor | None, topk_idx: Tensor
) -> Tensor | None:
    """Float32 ``[T, K]``: of probs ``[T, E]`` those of the experts, 0 where there is none.

    Without probs they are ``topk_weights``, which may be None.
    """
    if probs is None:
        return None if topk_weights is None else topk_weights.float()
    weights = probs.float().gather(1, topk_idx.clamp(min=0).long())
    return torch.where(topk_idx >= 0, weights, 0.0)


def without_repeats(topk_idx: Tensor) -> Tensor:
    """-1 where a slot names an expert that an earlier one has named."""
    same = topk_idx.unsqueeze(2) == topk_idx.unsqueeze(1)  # [T, slot, other slot]
    return torch.where(same.tril(-1).any(dim=2), -1, topk_idx)
