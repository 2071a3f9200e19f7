"""Dispatch without permute: a row for each token and rank, made of a dispatch to ranks as experts.

The library groups rows by expert. With one expert per rank a group is all that a rank gets, ordered
by source rank and token, once per token. The map, the probs and the scales of a token travel as its
scales; probs return as rows of float32, on a Buffer of their own whose layouts are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hybrid_ep
from hybrid_ep.integrations.deep_ep.buffers import Buffers, Kind

Handle = tuple  # handle, Buffer, None, N on the host, map of this rank's experts, T, E


class Unpermuted:
    """See the module.

    Args:
        buffers: of the group.
        num_ranks: R.
        rank: this one.
        num_nodes: nodes of equally many ranks.
    """

    def __init__(self, buffers: Buffers, num_ranks: int, rank: int, num_nodes: int) -> None:
        self._buffers, self._num_ranks, self._rank = buffers, num_ranks, rank
        self._num_nodes = num_nodes

    def dispatch(
        self,
        hidden: Tensor,
        scales: Tensor | None,
        routing_map: Tensor | None,
        probs: Tensor | None,
        handle: Handle | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Handle]:
        """See ``HybridEPBuffer.dispatch``; either a routing map or a handle."""
        num_tokens = len(hidden)
        if handle is not None:
            num_experts = handle[6]
            if routing_map is None:  # its columns are sent all the same
                size = (num_tokens, num_experts)
                routing_map = torch.zeros(size, dtype=torch.bool, device=hidden.device)
        elif routing_map is None:
            raise ValueError("dispatch needs routing_map, topk_idx and num_of_experts, or a handle")
        if routing_map.dtype != torch.bool:
            raise ValueError(f"routing_map must be bool, got {routing_map.dtype}")
        num_experts = routing_map.shape[1]

        parts = [routing_map, None if probs is None else probs.float(), scales]
        widths = [0 if part is None else part.shape[1] * part.element_size() for part in parts]
        present = [part.contiguous() for part in parts if part is not None]
        side = torch.cat([part.view(torch.uint8) for part in present], dim=1)
        if handle is None:
            ranks = self._num_ranks
            of_ranks = routing_map.unflatten(1, (ranks, num_experts // ranks)).any(dim=2)
            to_ranks = hybrid_ep.map_to_topk(of_ranks, None, ranks)[0]
            dtype = torch.bfloat16 if hidden.element_size() == 1 else hidden.dtype
            # room for probs and float32 scales, wanted or not: then one Buffer does for all
            room = 5 * num_experts + 4 * -(-hidden.shape[1] // 128)
            kind = Kind(hidden.device, hidden.shape[1], ranks, dtype, max(room, side.shape[1]))
            buffer = self._buffers.of(kind, num_tokens, ranks)
            out = hybrid_ep.dispatch(buffer, hidden, to_ranks, scales=side)
        else:
            inner, buffer = handle[:2]
            self._buffers.keep_if_captured(buffer)
            out = hybrid_ep.dispatch(buffer, hidden, scales=side, handle=inner)

        map_bytes, prob_bytes, scale_bytes = out.scales.split(widths, dim=1)
        local = self._local_experts(num_experts)
        row_probs = row_scales = None
        if probs is not None:
            of_experts = prob_bytes.contiguous().view(torch.float32)
            row_probs = of_experts[:, self._node_experts(num_experts)].contiguous()
        if scales is not None:
            row_scales = scale_bytes.contiguous().view(scales.dtype)
        if handle is None:
            local_map = map_bytes.contiguous().view(torch.bool)[:, local].contiguous()
            count = torch.tensor([out.handle.num_rows], dtype=torch.int32, device="cpu")
            handle = (out.handle, buffer, None, count, local_map, num_tokens, num_experts)
        return out.rows, row_probs, row_scales, handle

    def combine(
        self, hidden: Tensor, probs: Tensor | None, handle: Handle
    ) -> tuple[Tensor, Tensor | None]:
        """See ``HybridEPBuffer.combine``."""
        inner, buffer, *_, num_experts = handle
        self._buffers.keep_if_captured(buffer)
        y = hybrid_ep.combine(buffer, hidden, inner)
        if probs is None:
            return y, None
        # of the columns of the node, those of this rank's experts are its own
        local, node = self._local_experts(num_experts), self._node_experts(num_experts)
        shape = (len(probs), num_experts)
        mine = torch.zeros(shape, dtype=torch.float32, device=probs.device)
        mine[:, local] = probs[:, local.start - node.start : local.stop - node.start].float()
        twin = self._buffers.twin(buffer, num_experts)
        self._buffers.keep_if_captured(twin)
        return y, hybrid_ep.combine(twin, mine, inner)

    def _local_experts(self, num_experts: int) -> slice:
        count = num_experts // self._num_ranks
        return slice(self._rank * count, (self._rank + 1) * count)

    def _node_experts(self, num_experts: int) -> slice:
        ranks = self._num_ranks // self._num_nodes
        first = self._rank // ranks
        count = num_experts // self._num_nodes
        return slice(first * count, (first + 1) * count)
