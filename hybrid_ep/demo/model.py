"""A small transformer over bytes; every feed-forward is a ``MoELayer``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_ep.buffer import Buffer
from hybrid_ep.moe import MoELayer, MoEOutput

HIDDEN, FFN_HIDDEN, HEADS, LAYERS = 128, 128, 4, 3
NUM_EXPERTS, TOPK = 16, 2
SEQUENCE = 128


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out.

    Args:
        buffer: shared by all layers.
        payload: dtype of the matrix products and of what travels; parameters are float32.
    """

    def __init__(self, buffer: Buffer, payload: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)  # equal on all ranks
        self.payload = payload
        self.embed = nn.Embedding(256, HIDDEN)
        self.blocks = nn.ModuleList(Block(buffer, payload, seed) for seed in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 256, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def loss(self, text: Tensor) -> tuple[Tensor, list[MoEOutput]]:
        """Mean nats per byte of ``text`` ``[B, SEQUENCE + 1]``, and what each router did."""
        routed = []
        x = self.embed(text[:, :-1])
        with torch.autocast(x.device.type, self.payload, enabled=self.payload != torch.float32):
            for block in self.blocks:
                x, output = block(x)
                routed.append(output)
            logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten()), routed


class Block(nn.Module):
    """Causal attention with rotary positions, then experts."""

    def __init__(self, buffer: Buffer, payload: torch.dtype, seed: int) -> None:
        super().__init__()
        self.payload = payload
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.moe = MoELayer(buffer, FFN_HIDDEN, seed=seed)
        size = HIDDEN // HEADS
        frequency = 1000.0 ** (-torch.arange(0, size, 2) / size)
        angle = torch.outer(torch.arange(SEQUENCE), frequency)
        self.register_buffer("turn", torch.stack([angle.cos(), angle.sin()]), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, MoEOutput]:
        """Map ``[B, SEQUENCE, HIDDEN]`` to the same shape, and say what the router did."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(
            self._rotated(q), self._rotated(k), v, is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        routed = self.moe(self.norm2(x).to(self.payload))
        return x + routed.y, routed

    def _rotated(self, x: Tensor) -> Tensor:
        cos, sin = self.turn
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)
