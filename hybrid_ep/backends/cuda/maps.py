"""Dense routing maps and top-k routing, by a kernel each; see ``hybrid_ep/maps.py``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.backends.cuda.arguments import address_of

_LEAST_CAPABILITY = (9, 0)
_TOKENS_PER_BLOCK = 16  # at a time
_MOST_BLOCKS = 256  # each tells its most experts of a token, and a dispatch reads all of them


@functools.cache
def serve(device: torch.device) -> bool:
    """Whether the kernels run there."""
    if device.type != "cuda" or _extension() is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


@functools.cache
def _extension() -> Any:
    from hybrid_ep.backends.cuda import nvlink  # it loads the extension

    try:
        return nvlink.load_extension()
    except ImportError:
        return None


def load(device: torch.device) -> None:
    """Load the kernels, if there are any, before one runs that waits for a peer."""
    extension = _extension()
    if extension is not None:
        extension.load_kernels(device.index or 0)


def map_to_topk(
    routing_map: Tensor, probs: Tensor | None, topk: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Experts int16 ``[T, K]``, their probs float32 ``[T, K]``, and int32 ``[B]``.

    The last are the most experts of a token among the tokens of each of B blocks.
    """
    (num_tokens, num_experts), device = routing_map.shape, routing_map.device
    topk_idx = torch.empty((num_tokens, topk), dtype=torch.int16, device=device)
    num_blocks = min(max(1, -(-num_tokens // _TOKENS_PER_BLOCK)), _MOST_BLOCKS)
    most = torch.empty((num_blocks,), dtype=torch.int32, device=device)
    weights = None if probs is None else torch.empty_like(topk_idx, dtype=torch.float32)
    strides = (0, 0) if probs is None else probs.stride()
    with torch.cuda.device(device):
        _extension().map_to_topk(
            (
                address_of(routing_map),
                *routing_map.stride(),
                address_of(probs),
                *strides,
                num_tokens,
                num_experts,
                topk,
                address_of(topk_idx),
                address_of(weights),
                most.data_ptr(),
                num_blocks,
            ),
            torch.cuda.current_stream(device).cuda_stream,
        )
    return topk_idx, weights, most


def topk_to_dense(values: Tensor, topk_idx: Tensor, num_experts: int) -> Tensor:
    """Float32 ``[T, E]``: each value where its expert is."""
    values, topk_idx = values.contiguous(), topk_idx.contiguous()
    num_tokens, topk = values.shape
    dense = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=values.device)
    with torch.cuda.device(values.device):
        _extension().topk_to_dense(
            (
                address_of(values),
                address_of(topk_idx),
                topk_idx.element_size(),
                num_tokens,
                topk,
                num_experts,
                address_of(dense),
            ),
            torch.cuda.current_stream(values.device).cuda_stream,
        )
    return dense
