"""Which experts a token goes to, and with what weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_ep.moe.seeds import draw, generator_of


class Router(nn.Module):
    """Softmax over the experts in float32, then the K largest.

    Args:
        hidden: H.
        num_experts: E, over all ranks.
        topk: K.
        renormalise: make the K weights of a token sum to 1.
        seed: of the weight, which is equal on all ranks.
        device: of the weight, which is float32; None: torch's default device.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        *,
        renormalise: bool = True,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.topk, self.renormalise, self.seed = topk, renormalise, seed
        weight = torch.empty(num_experts, hidden, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(weight)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight from the seed; nothing is drawn on the meta device."""
        if not self.weight.is_meta:
            self.weight.copy_(draw(self.weight.shape, generator_of(self.seed, -1)) * 0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the experts.

        Args:
            x: ``[T, H]``.

        Returns:
            tuple: topk_idx int64 ``[T, K]``, topk_weights float32 ``[T, K]``, aux_loss float32
            ``[]``: E * sum over experts of (share of the slots) * (mean probability), of this
            rank's tokens.
        """
        with torch.autocast(x.device.type, enabled=False):  # near ties are decided in float32
            probs = F.linear(x.float(), self.weight.float()).softmax(dim=-1)
        weights, idx = probs.topk(self.topk, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)

        num_tokens, num_experts = max(1, probs.shape[0]), probs.shape[1]  # T may be 0
        slots = idx.flatten()
        load = probs.new_zeros(num_experts).scatter_add(0, slots, probs.new_ones(slots.shape))
        share = load / (num_tokens * self.topk)
        aux_loss = num_experts * (share * probs.sum(dim=0) / num_tokens).sum()
        return idx, weights, aux_loss
