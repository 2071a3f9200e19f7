"""``HybridEPBuffer``, with the signatures of DeepEP's hybrid-ep branch at 94a9f8f and later ones.

    routing map [T, E], probs [T, E] --map_to_topk--> topk_idx, weights [T, K] --dispatch--> rows
    y [T, H], gradient of probs [T, E] <--topk_to_dense-- values [T, K] <--combine_values-- rows

Frameworks look at the signatures to learn what may be passed, so every parameter is written out.
"""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.group import Group, ranks_of_a_host
from hybrid_ep.integrations.deep_ep import settings
from hybrid_ep.integrations.deep_ep.buffers import Buffers, Kind
from hybrid_ep.integrations.deep_ep.handle import PermuteHandle
from hybrid_ep.integrations.deep_ep.routing import indices_to_map, weights_of, without_repeats
from hybrid_ep.integrations.deep_ep.topk import TopK
from hybrid_ep.integrations.deep_ep.unpermuted import Unpermuted

_DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
_log = logging.getLogger("hybrid_ep.integrations")
_named: set[str] = set()  # arguments without effect that the log has named


class HybridEPBuffer:
    """Dispatch and combine of one group, as DeepEP's class of this name does them.

    Collective to make, like every call. Tokens may differ in number between ranks, and need no
    padding. Only what follows has an effect.

    Args:
        group: ``torch.distributed`` group.
        hidden_dim: a first guess; calls may have others.
        max_num_of_tokens_per_rank: the largest of all ranks counts; a call with more tokens makes
            a larger Buffer, which must happen on all ranks at once.
        num_local_experts: a first guess as well.
        use_fp8: no effect: the dtype of a call's tokens counts.
        num_sms_dispatch_api: SMs of dispatch; the defaults that frameworks pass, 16 and 24, mean
            this library's default.
        num_sms_combine_api: SMs of combine, likewise.
        num_sms_preprocessing_api: no effect, like all that follow but the next to last.
        num_blocks_permute: no effect.
        num_blocks_unpermute: no effect.
        load_cached_kernels: no effect.
        use_shared_buffer: no effect.
        enable_custom_allgather: no effect.
        num_of_hybrid_ep_ranks_per_nvlink_domain: ranks of a node. The variable
            NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN wins. Default: the ranks of a host.
        use_mnnvl: no effect.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        _name_once(
            num_sms_preprocessing_api=num_sms_preprocessing_api,
            num_blocks_permute=num_blocks_permute,
            num_blocks_unpermute=num_blocks_unpermute,
            load_cached_kernels=load_cached_kernels,
            use_shared_buffer=not use_shared_buffer,
            enable_custom_allgather=enable_custom_allgather,
            use_mnnvl=use_mnnvl,
        )
        self.group, self.use_fp8 = group, use_fp8
        self._group = Group(group)
        self.rank, self.group_size = self._group.rank, self._group.num_ranks
        wanted = self._group.meet(max_num_of_tokens_per_rank)
        bound = settings.current().max_tokens
        max_tokens = bound or max(1, *wanted)
        asked = int(os.environ.get(_DOMAIN) or num_of_hybrid_ep_ranks_per_nvlink_domain or 0)
        domain = min(asked, self.group_size) or ranks_of_a_host(self._group.hosts)
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = domain
        self.local_rank, self.node_rank = self.rank % domain, self.rank // domain
        self.num_of_nodes = self.group_size // domain
        self.configurer = SimpleNamespace(
            buffer_config=SimpleNamespace(
                hidden_dim=hidden_dim,
                max_num_of_tokens_per_rank=max_tokens,
                num_of_experts_per_rank=num_local_experts,
                num_of_ranks_per_node=domain,
                num_of_nodes=self.num_of_nodes,
            )
        )
        config = settings.config_for(num_sms_dispatch_api, num_sms_combine_api)
        nodes = domain if asked else None
        self._buffers = Buffers(self._group, nodes, config, max_tokens, bound=bound is not None)
        self._topk = TopK(self._group)
        self._unpermuted = Unpermuted(self._buffers, self.group_size, self.rank, self.num_of_nodes)

    def empty_jit_cache(self) -> None:
        """Nothing is compiled at run time, so there is nothing to empty."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> SimpleNamespace:
        """The sizes of the buffer; there is nothing to update."""
        return self.configurer.buffer_config

    # ---- with permute: rows grouped by expert

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | Tensor | None = None,
        pad_multiple: int | None = None,
        handle: PermuteHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_of_tokens_per_rank: int | None = None,
        dense_routing: bool | None = None,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, PermuteHandle]:
        """Send every token to the ranks of its experts, into rows grouped by expert.

        Args:
            hidden: ``[T, H]``.
            topk_idx: integers ``[T, K]``, -1 for no expert; in place of ``routing_map``.
            topk_weights: ``[T, K]``, in place of ``probs``.
            num_of_experts_per_rank: no effect: the routing tells it.
            num_of_experts: E, with ``topk_idx``.
            use_fp8: no effect: the dtype of ``hidden`` counts.
            routing_map: bool ``[T, E]``.
            probs: ``[T, E]``, also beside ``topk_idx`` or a handle.
            scaling_factor: ``[T, S]``, read if ``hidden`` has values of one byte.
            num_permuted_tokens: M; None: as many rows as are needed, for which the host waits.
            pad_multiple: each expert's rows are padded with zeros to a multiple of it.
            handle: replay its dispatch; M and padding are its own.
            non_blocking: the counts stay on the device; needs ``num_permuted_tokens``.
            fuse_permute_dispatch: no effect: there is one way, which is fused.
            num_of_tokens_per_rank: no effect: ranks may have different T.
            dense_routing: no effect: both kinds of routing are told apart by what is passed.
            num_dispatched_tokens: no effect.
            use_host_meta: an old name for ``not non_blocking``.

        Returns:
            tuple: rows ``[M, H]``, probs float32 ``[M]`` or None, scales ``[M, S]`` or None, rows
            of each local expert with padding (int64, on the host unless ``non_blocking``, or on the
            device with a handle), and the handle.

        Raises:
            ValueError: an argument breaks a rule, or a token has more experts than topk.
        """
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        scales = scaling_factor if hidden.element_size() == 1 else None
        if handle is not None:
            return self._replay(hidden, topk_weights, probs, scales, num_permuted_tokens, handle)
        if non_blocking and num_permuted_tokens is None:
            raise ValueError("non_blocking needs num_permuted_tokens, the number of rows, got None")
        if num_permuted_tokens is not None:
            num_permuted_tokens = int(num_permuted_tokens)  # waits for a tensor on a GPU

        most = None
        if routing_map is not None:
            num_of_experts = routing_map.shape[1]
            probs, topk = None if probs is None else probs.float(), self._topk.for_map(routing_map)
            topk_idx, weights, most = hybrid_ep.map_to_topk(routing_map, probs, topk)
            distinct = topk_idx
        elif topk_idx is None or num_of_experts is None:
            raise ValueError(
                "dispatch_with_permute needs routing_map, topk_idx and num_of_experts, or a handle"
            )
        else:
            distinct = without_repeats(topk_idx)
            weights = weights_of(topk_weights, probs, distinct)
            if probs is not None:
                topk_idx = distinct
        buffer = self._buffer_for(hidden, num_of_experts, topk_idx.shape[1])
        with self._topk.explaining(num_of_experts):
            out = hybrid_ep.dispatch(
                buffer,
                hidden,
                topk_idx,
                weights,
                scales=scales,
                most=most,
                max_rows=num_permuted_tokens,
                align=pad_multiple or 1,
            )
            handle = PermuteHandle(buffer, out.handle, distinct)
            counts = out.handle.padded_counts if non_blocking else handle.counts_on_host()
        return out.rows, out.weights, out.scales, counts, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: PermuteHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Bring rows home and sum them.

        Args:
            hidden: ``[M, H]``, in the order of the dispatch's rows.
            probs: ``[M]``, one value per row, which return unsummed.
            handle: of the dispatch.
            pad_multiple: no effect: the handle has it, like all that follow.
            fuse_unpermute_combine: no effect.
            num_dispatched_tokens: no effect.

        Returns:
            tuple: ``[T, H]``, and the values float32 ``[T, E]``, 0 where a token lacks the expert.
        """
        handle = self._checked(handle)
        num_experts = handle.buffer.num_experts
        with self._topk.explaining(num_experts):
            if probs is None:
                return hybrid_ep.combine(handle.buffer, hidden, handle.inner), None
            values = probs.float()
            y, home = hybrid_ep.combine_values(handle.buffer, hidden, values, handle.inner)
        home = home[:, : handle.topk_idx.shape[1]]
        return y, hybrid_ep.topk_to_dense(home, handle.topk_idx, num_experts)

    # ---- without permute: a row for each token and rank

    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: tuple | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, tuple]:
        """Send every token once to each rank that has one of its experts.

        Rows are ordered by source rank and token. No framework in docs/integrations.md calls this;
        it takes more kernels than the calls with permute.

        Returns:
            tuple: rows ``[N, H]``, probs ``[N, E of a node]`` or None, scales or None, and a handle
            of 7 items: item 3 is int32 ``[1]``, N, on the host, item 4 bool ``[N, E of a rank]``.
        """
        if routing_map is None and topk_idx is not None:
            routing_map, dense = indices_to_map(topk_idx, topk_weights, len(hidden), num_of_experts)
            probs = dense if probs is None else probs
        scales = scaling_factor if hidden.element_size() == 1 else None
        return self._unpermuted.dispatch(hidden, scales, routing_map, probs, handle)

    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: tuple | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Sum the rows of each token at home; probs return as ``[T, E]``."""
        if handle is None:
            raise ValueError("combine needs the handle of its dispatch, got None")
        return self._unpermuted.combine(hidden, probs, handle)

    # ---- shared by them

    def _buffer_for(self, hidden: Tensor, num_experts: int, topk: int) -> hybrid_ep.Buffer:
        dtype = torch.bfloat16 if hidden.element_size() == 1 else hidden.dtype
        kind = Kind(hidden.device, hidden.shape[1], num_experts, dtype)
        buffer = self._buffers.of(kind, len(hidden), topk)
        self.configurer.buffer_config.max_num_of_tokens_per_rank = self._buffers.max_tokens
        return buffer

    def _replay(
        self,
        hidden: Tensor,
        topk_weights: Tensor | None,
        probs: Tensor | None,
        scales: Tensor | None,
        num_permuted_tokens: int | Tensor | None,
        handle: PermuteHandle,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, PermuteHandle]:
        inner = self._checked(handle).inner
        if isinstance(num_permuted_tokens, int) and num_permuted_tokens != inner.num_rows:
            raise ValueError(
                f"num_permuted_tokens must be that of the handle, {inner.num_rows}, got "
                f"{num_permuted_tokens}"
            )
        weights = weights_of(topk_weights, probs, handle.topk_idx)
        with self._topk.explaining(handle.buffer.num_experts):
            out = hybrid_ep.dispatch(
                handle.buffer, hidden, None, weights, scales=scales, handle=inner
            )
        return out.rows, out.weights, out.scales, inner.padded_counts, handle

    def _checked(self, handle: Any) -> PermuteHandle:
        if not isinstance(handle, PermuteHandle):
            raise TypeError(
                "handle must be one of dispatch_with_permute, got one of type "
                f"{type(handle).__name__}"
            )
        self._buffers.keep_if_captured(handle.buffer)
        return handle


def _name_once(**arguments: Any) -> None:
    """Tell the log which of the arguments that have no effect somebody has set."""
    new = [name for name, value in arguments.items() if value and name not in _named]
    if new:
        _named.update(new)
        _log.info("HybridEPBuffer: these arguments have no effect: %s", ", ".join(new))
