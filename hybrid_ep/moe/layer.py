"""The layer: router, dispatch, experts, combine."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybrid_ep.buffer import Buffer, combine, dispatch
from hybrid_ep.integers import as_integer
from hybrid_ep.moe.experts import GroupedExperts
from hybrid_ep.moe.router import Router
from hybrid_ep.saving import owners, save_by_expert

WEIGHT_PLACES = ("combine", "activation")


class MoEOutput(NamedTuple):
    """What ``MoELayer`` returns.

    Attributes:
        y: shape and dtype of x.
        aux_loss: float32 ``[]``, 1 where the load is even; add a small multiple (0.01) to the loss.
        counts: int32 ``[E_local]``, rows that each expert of this rank got from all ranks.
        overflow: bool ``[]``, true where ``max_rows`` was too small and rows were dropped.
    """

    y: Tensor
    aux_loss: Tensor
    counts: Tensor
    overflow: Tensor


class MoELayer(nn.Module):
    """Router, dispatch, experts, combine.

    Args:
        buffer: says how many experts there are, which are mine, top-k and where tensors live; any
            number of layers may share one.
        ffn_hidden: F, inner size of an expert.
        renormalise: make the K weights of a token sum to 1.
        max_rows: bound on the rows a rank receives. With it shapes are static and nothing waits for
            the host (CUDA graphs, ``torch.compile``), rows beyond it are dropped and ``overflow``
            says so. None: exact, nothing is dropped.
        weight_at: where the weight of a token's expert enters. ``"combine"``: the sum that combine
            makes is weighted. ``"activation"``: the expert multiplies its activation by it, combine
            makes a plain sum and keeps no rows for the backward. The two differ by rounding.
        main_grad: sum the experts' gradients in float32, in ``weight.main_grad``; ``weight.grad``
            stays None. See ``GroupedExperts``.
        seed: give every layer another one.
        dtype: of the experts' weights.
        device: of the weights. None: the meta device where it is torch's default device, else the
            Buffer's, as the layer runs on no other. For weights on the meta device call
            ``to_empty(device=...)`` and then ``reset_parameters()``, or load a checkpoint.
    """

    def __init__(
        self,
        buffer: Buffer,
        ffn_hidden: int,
        *,
        renormalise: bool = True,
        max_rows: int | None = None,
        weight_at: str = "combine",
        main_grad: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if device is None:
            is_deferred = torch.empty(0).is_meta
            device = torch.device("meta") if is_deferred else buffer.device
        if max_rows is not None:  # a compiler takes numpy's integers for tensors
            max_rows = as_integer("max_rows", max_rows, 0)
        if weight_at not in WEIGHT_PLACES:
            raise ValueError(f"weight_at must be one of {WEIGHT_PLACES}, got {weight_at!r}")
        self.buffer, self.max_rows, self.weight_at = buffer, max_rows, weight_at
        self.router = Router(
            buffer.hidden,
            buffer.num_experts,
            buffer.topk,
            renormalise=renormalise,
            seed=seed,
            device=device,
        )
        self.experts = GroupedExperts(
            buffer.num_local_experts,
            buffer.hidden,
            ffn_hidden,
            first_expert=buffer.topology.rank * buffer.num_local_experts,
            main_grad=main_grad,
            seed=seed,
            dtype=dtype,
            device=device,
        )
        save_by_expert(self.experts, buffer)

    def reset_parameters(self) -> None:
        """Draw the router and the experts from the seed, as they were when the layer was built."""
        self.router.reset_parameters()
        self.experts.reset_parameters()

    def forward(self, x: Tensor) -> MoEOutput:
        """Collective: all ranks call it, each with its own tokens (none is fine).

        Args:
            x: ``[..., H]`` of float32, float16 or bfloat16; its dtype is what travels.

        Returns:
            MoEOutput: y of x's shape and dtype, and what the router did.
        """
        tokens = x.reshape(-1, x.shape[-1])
        topk_idx, topk_weights, aux_loss = self.router(tokens)
        out = dispatch(self.buffer, tokens, topk_idx, topk_weights, max_rows=self.max_rows)
        if self.weight_at == "activation":
            rows = self.experts(out.rows, out.offsets, out.weights)
            y = combine(self.buffer, rows, out.handle)
        else:
            rows = self.experts(out.rows, out.offsets)
            y = combine(self.buffer, rows, out.handle, weights=out.weights)
        return MoEOutput(y.view(x.shape), aux_loss, out.counts, out.handle.overflow)


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that each rank has for itself, by name: ``GroupedExperts``, ``save_by_expert``."""
    experts = set(owners())
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            experts.update(module.parameters())
    return {name: weight for name, weight in model.named_parameters() if weight in experts}


def replicated_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that all ranks hold alike: everything but the experts."""
    experts = set(expert_parameters(model).values())
    return [parameter for parameter in model.parameters() if parameter not in experts]
