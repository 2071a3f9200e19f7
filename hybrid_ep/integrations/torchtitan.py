"""torchtitan's HybridEP dispatcher on this library, by torchtitan's own overrides.

    --override.imports MODULE.dispatcher MODULE.selective_ac    # MODULE: the name of this one

with ``moe_comm_backend="hybridep"``. Tokens are routed by their top-k experts, so there is no dense
map, no ``deep_ep`` and no op of torchtitan's. By default the scores weigh the experts' outputs
inside combine, in float32; ``dispatcher={"weighted_combine": false}`` multiplies the rows before
it, as torchtitan does. Where selective activation checkpointing is used, take both overrides: the
second one adds this library's ops to those whose outputs are saved.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

import hybrid_ep
from hybrid_ep.integers import round_up

try:
    from torchtitan.config import override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.token_dispatcher import (
        BaseEPTokenDispatcher,
        EPDispatchMetadata,
        HybridEPTokenDispatcher,
    )
except ImportError as error:
    raise ImportError(
        "hybrid_ep.integrations.torchtitan needs torchtitan 0.3 and what that needs: "
        f"pip install 'hybrid_ep[torchtitan]' ({error})"
    ) from error

SAVED_OPS = frozenset(
    getattr(getattr(torch.ops.hybrid_ep, verb), overload)
    for verb in ("route", "dispatch", "combine")
    for overload in ("default", "ordered")
)
"""Ops whose outputs selective checkpointing saves, so that nothing is sent again."""

_buffers: WeakValueDictionary[tuple[Any, ...], hybrid_ep.Buffer] = WeakValueDictionary()


class HybridEpDispatcher(BaseEPTokenDispatcher):
    """A token dispatcher of torchtitan; layers of equal sizes share a Buffer."""

    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):
        """Of torchtitan's dispatcher, and where the scores enter."""

        weighted_combine: bool = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config
        self._by_dtype: dict[torch.dtype, hybrid_ep.Buffer] = {}

    def init_buffer(self) -> None:
        """Make the Buffer for bfloat16; collective. One for another dtype is made when it comes.

        Raises:
            ValueError: the config lacks a size.
        """
        for name in ("hidden_dim", "num_max_tokens_per_rank"):
            if getattr(self._config, name) is None:
                raise ValueError(f"the dispatcher's config must have {name}, got None")
        self._buffer_for(torch.bfloat16)

    def dispatch(
        self,
        x_TD: Tensor,  # torchtitan's names, by which it may pass them
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, EPDispatchMetadata]:
        """Send tokens to the ranks of their experts.

        Returns:
            tuple: rows, those of each local expert (int64, with padding, on the device), and what
            ``combine`` takes.
        """
        config, align = self._config, self._config.pad_multiple or 1
        max_rows = None
        if config.non_blocking_capacity_factor is not None:
            ranks = self.ep_mesh.size()
            per_token = min(self.num_experts // ranks, self.top_k)
            most = len(x_TD) * ranks * per_token
            max_rows = round_up(int(most * config.non_blocking_capacity_factor), align)
        buffer = self._buffer_for(x_TD.dtype)
        out = hybrid_ep.dispatch(
            buffer, x_TD, topk_expert_ids_TK, topk_scores_TK.float(), max_rows=max_rows, align=align
        )
        metadata = EPDispatchMetadata(state=(buffer, out.handle, out.weights))
        return out.rows, out.handle.padded_counts, metadata

    def combine(
        self,
        routed_output_RD: Tensor,
        metadata: EPDispatchMetadata,
        x_TD: Tensor,
    ) -> Tensor:
        """The weighted sum of the experts' outputs of each token."""
        buffer, handle, weights = metadata.state
        if self._config.weighted_combine:
            return hybrid_ep.combine(buffer, routed_output_RD, handle, weights=weights)
        rows = routed_output_RD * weights.to(routed_output_RD.dtype).unsqueeze(1)
        return hybrid_ep.combine(buffer, rows, handle)

    def _buffer_for(self, dtype: torch.dtype) -> hybrid_ep.Buffer:
        if dtype not in self._by_dtype:
            config, group = self._config, self.ep_mesh.get_group()
            sizes = {
                "hidden": config.hidden_dim,
                "num_experts": self.num_experts,
                "max_tokens": config.num_max_tokens_per_rank,
                "topk": self.top_k,
                "dtype": dtype,
            }
            key = (id(group), self.ep_mesh.device_type, *sizes.values())
            buffer = _buffers.get(key)
            if buffer is None:
                device = None if self.ep_mesh.device_type == "cuda" else self.ep_mesh.device_type
                buffer = _buffers[key] = hybrid_ep.Buffer(group, device=device, **sizes)
            self._by_dtype[dtype] = buffer
        return self._by_dtype[dtype]


class SelectiveCheckpoint(SelectiveAC):
    """torchtitan's selective checkpointing; it saves the outputs of this library's ops too."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """Of torchtitan's."""

    def get_save_ops(self) -> set:
        """Ops whose outputs are saved."""
        return super().get_save_ops() | SAVED_OPS


@override(target=HybridEPTokenDispatcher.Config, description="hybrid_ep in place of DeepEP")
def dispatcher(
    cfg: HybridEPTokenDispatcher.Config, *, weighted_combine: bool = True
) -> HybridEpDispatcher.Config:
    """Take this dispatcher wherever the config has torchtitan's HybridEP dispatcher."""
    return HybridEpDispatcher.Config(**_fields_of(cfg), weighted_combine=weighted_combine)


@override(target=SelectiveAC.Config, description="hybrid_ep's ops are saved", exact=True)
def selective_ac(cfg: SelectiveAC.Config) -> SelectiveCheckpoint.Config:
    """Save the outputs of this library's ops in selective checkpointing."""
    return SelectiveCheckpoint.Config(**_fields_of(cfg))


def _fields_of(cfg: Any) -> dict[str, Any]:
    return {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
