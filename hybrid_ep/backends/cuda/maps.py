"""Dense routing maps and top-k routing, by a kernel each; see ``hybrid_ep/maps.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.backends import streams
from hybrid_ep.backends.cuda.arguments import DENSE, Fields, address_of
from hybrid_ep.backends.empty import empty_on

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
    num_tokens, num_experts = routing_map.shape
    empty = _allocator(routing_map.device)()
    topk_idx = empty((num_tokens, topk), (topk, 1), torch.int16)
    num_blocks = min(max(1, -(-num_tokens // _TOKENS_PER_BLOCK)), _MOST_BLOCKS)
    most = empty((num_blocks,), DENSE, torch.int32)
    weights, strides = None, (0, 0)
    if probs is not None:
        weights, strides = empty((num_tokens, topk), (topk, 1), torch.float32), probs.stride()
    fields = (
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
    )
    _launch(_extension().map_to_topk, fields, routing_map.device)
    return topk_idx, weights, most


def topk_to_dense(values: Tensor, topk_idx: Tensor, num_experts: int) -> Tensor:
    """Float32 ``[T, E]``: each value where its expert is."""
    values, topk_idx = values.contiguous(), topk_idx.contiguous()
    num_tokens, topk = values.shape
    empty = _allocator(values.device)()
    dense = empty((num_tokens, num_experts), (num_experts, 1), torch.float32)
    fields = (
        address_of(values),
        address_of(topk_idx),
        topk_idx.element_size(),
        num_tokens,
        topk,
        num_experts,
        address_of(dense),
    )
    _launch(_extension().topk_to_dense, fields, values.device)
    return dense


_allocator = functools.cache(empty_on)


def _launch(kernel: Callable[[Fields, int], None], fields: Fields, device: torch.device) -> None:
    """On the current stream of the device."""
    with torch.cuda.device(device):
        kernel(fields, streams.stream_reader(device)())
