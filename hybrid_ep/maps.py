"""Dense routing maps ``[T, E]`` and top-k routing ``[T, K]``: one made of the other.

A framework may say which experts a token has by a map of bools, and with which weights by a dense
matrix. The library takes the experts themselves. A row of a map becomes its experts, ascending,
then -1:

    0 1 0 0 1 0  -->  1  4 -1        topk 3
    0 0 0 0 0 0  --> -1 -1 -1
    1 1 1 0 0 1  -->  0  1  2        one expert is left out: the most are 4

All of it is exact. On a GPU a kernel of the nvlink extension does each (``backends/cuda/maps``),
torch does elsewhere, and where somebody transforms ops (a compiler, a tracer), with the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.backends.cuda import maps as kernels
from hybrid_ep.integers import as_integer
from hybrid_ep.ops import replay
from hybrid_ep.ops.gradients import needs_grad
from hybrid_ep.ops.rules import TOPK_DTYPES
from hybrid_ep.ops.verbs import transformed
from hybrid_ep.shape import MAX_EXPERTS


def map_to_topk(
    routing_map: Tensor, probs: Tensor | None, topk: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The experts of each token and their weights; differentiable in probs.

    The host waits for nothing.

    Args:
        routing_map: bool ``[T, E]``, true where the token has the expert.
        probs: float32 ``[T, E]``, or None. Read only where the map is true.
        topk: K, at most E.

    Returns:
        tuple: int16 ``[T, K]``, the experts in ascending order, then -1. A token with more than K
        of them keeps the first K. Then float32 ``[T, K]``, the probs of these experts, +0.0 where
        there is none; None without probs. Then int32 ``[B]``, the most experts of a token in each
        of B groups of the tokens, B being 1 or more, 0 for a group without tokens: a number
        beyond K says that experts were left out. ``dispatch(..., most=...)`` makes it an error.

    Raises:
        ValueError: an argument breaks a rule.
    """
    if routing_map.dtype != torch.bool or routing_map.dim() != 2:
        raise ValueError(
            f"routing_map must be bool [T, E], got {routing_map.dtype} {list(routing_map.shape)}"
        )
    num_experts = routing_map.shape[1]
    if not 0 < num_experts <= MAX_EXPERTS:
        raise ValueError(f"routing_map must have 1 to {MAX_EXPERTS} experts, got {num_experts}")
    topk = as_integer("topk", topk, 1)
    if topk > num_experts:
        raise ValueError(f"topk must be at most the {num_experts} experts of the map, got {topk}")
    if probs is not None:
        _check_float32("probs", probs)
        if probs.shape != routing_map.shape:
            raise ValueError(
                f"probs must have the shape of routing_map, {list(routing_map.shape)}, got "
                f"{list(probs.shape)}"
            )
        _check_device("probs", probs, "routing_map", routing_map)
    if needs_grad(probs):
        return _MapToTopk.apply(probs, routing_map, topk)
    return _find_experts(routing_map, probs, topk)


def topk_to_dense(values: Tensor, topk_idx: Tensor, num_experts: int) -> Tensor:
    """One value for each slot of a token, put where its expert is; differentiable in values.

    It is the transpose of what ``map_to_topk`` does with probs, and so its gradient.

    Args:
        values: float32 ``[T, K]``.
        topk_idx: int16, int32 or int64 ``[T, K]``, experts in ``[0, num_experts)``; -1 is no
            expert, whose value is not read.
        num_experts: E.

    Returns:
        Tensor: float32 ``[T, E]``, +0.0 for an expert that no slot names. The values of an expert
        named twice are added to that zero in the order of the slots.

    Raises:
        ValueError: an argument breaks a rule.
    """
    _check_float32("values", values)
    if values.dim() != 2 or topk_idx.shape != values.shape:
        raise ValueError(
            f"values and topk_idx must have one shape [T, K], got {list(values.shape)} and "
            f"{list(topk_idx.shape)}"
        )
    if topk_idx.dtype not in TOPK_DTYPES:
        raise ValueError(f"topk_idx must be int16, int32 or int64, got {topk_idx.dtype}")
    _check_device("topk_idx", topk_idx, "values", values)
    return _to_dense(values, topk_idx, as_integer("num_experts", num_experts, 1))


def _to_dense(values: Tensor, topk_idx: Tensor, num_experts: int) -> Tensor:
    way = _Scatter.apply if needs_grad(values) else _scatter
    return way(values, topk_idx, num_experts)


class _MapToTopk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, ...]:
        topk_idx, weights, most = _find_experts(routing_map, probs, topk)
        ctx.mark_non_differentiable(topk_idx, most)
        ctx.save_for_backward(topk_idx)
        ctx.num_experts = probs.shape[1]
        return topk_idx, weights, most

    @staticmethod
    def backward(
        ctx: Any, _: Tensor | None, grad: Tensor, __: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (topk_idx,) = ctx.saved_tensors
        return _to_dense(grad, topk_idx, ctx.num_experts), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, topk_idx: Tensor) -> Tensor:
        ctx.save_for_backward(topk_idx)
        ctx.num_experts = probs.shape[1]
        return _gather(probs, topk_idx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (topk_idx,) = ctx.saved_tensors
        return _to_dense(grad, topk_idx, ctx.num_experts), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, topk_idx: Tensor, num_experts: int) -> Tensor:
        ctx.save_for_backward(topk_idx)
        return _scatter(values, topk_idx, num_experts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (topk_idx,) = ctx.saved_tensors
        return _Gather.apply(grad, topk_idx), None, None


def _check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(
            f"{name} must be where {other_name} is, on {other.device}, got {tensor.device}"
        )


def _check_float32(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.float32:
        raise ValueError(f"{name} must be float32, got {tensor.dtype}")


# ---- what the kernels do


def _find_experts(
    routing_map: Tensor, probs: Tensor | None, topk: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Experts int16 ``[T, K]``, their probs, and the most experts of tokens, int32 ``[B]``."""
    if not transformed(routing_map, probs) and kernels.serve(routing_map.device):
        make = functools.partial(kernels.map_to_topk, routing_map, probs, topk)
        return replay.copied("map_to_topk", make)  # elsewhere the topk below is replayed
    num_tokens, num_experts = routing_map.shape
    device = routing_map.device
    # a key for each expert, the larger the earlier; 0 where the token does not have it
    keys = torch.arange(num_experts, 0, -1, dtype=torch.int16, device=device) * routing_map
    found = keys.topk(topk, dim=1).values
    topk_idx = torch.where(found > 0, num_experts - found, -1).to(torch.int16)
    if num_tokens == 0:
        most = torch.zeros(1, dtype=torch.int32, device=device)
    else:
        most = routing_map.sum(dim=1, dtype=torch.int32).amax(dim=0, keepdim=True)
    return topk_idx, None if probs is None else _gather(probs, topk_idx), most


def _gather(probs: Tensor, topk_idx: Tensor) -> Tensor:
    found = probs.gather(1, topk_idx.clamp(min=0).long())
    return torch.where(topk_idx >= 0, found, 0.0)


def _scatter(values: Tensor, topk_idx: Tensor, num_experts: int) -> Tensor:
    if not transformed(values, topk_idx) and kernels.serve(values.device):
        return kernels.topk_to_dense(values, topk_idx, num_experts)
    shape = (values.shape[0], num_experts)
    dense = torch.zeros(shape, dtype=torch.float32, device=values.device)
    values = torch.where(topk_idx >= 0, values, 0.0)
    return dense.scatter_add_(1, topk_idx.clamp(min=0).long(), values)
