"""The distributed layer beside plain arithmetic that sends nothing."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_ep.buffer import Buffer
from hybrid_ep.demo.collectives import gathered, sum_gradients
from hybrid_ep.demo.model import FFN_HIDDEN, HIDDEN, NUM_EXPERTS
from hybrid_ep.moe import GroupedExperts, MoELayer


def compare_with_one_process(buffer: Buffer, payload: torch.dtype) -> float:
    """Largest relative difference, on any rank, of outputs and gradients to plain arithmetic.

    The reference holds all experts on every rank and sends nothing, so each rank can follow its own
    tokens through all of them; the sum of its gradients over the ranks is the experts' gradient.
    """
    rank, device = buffer.topology.rank, buffer.device
    layer = MoELayer(buffer, FFN_HIDDEN, seed=7)
    everyone = GroupedExperts(NUM_EXPERTS, HIDDEN, FFN_HIDDEN, seed=7, device=device)
    generator = torch.Generator().manual_seed(rank)
    x, grad = torch.randn(2, 61 + 2 * rank, HIDDEN, generator=generator).to(device, payload)
    x.requires_grad_()

    y = layer(x).y
    y.backward(grad)
    found = [y, x.grad, layer.router.weight.grad, *(w.grad for w in layer.experts.parameters())]
    x.grad = layer.router.weight.grad = None
    y = _plain_moe(layer, everyone, x)
    y.backward(grad)
    wanted = [y, x.grad, layer.router.weight.grad]
    sum_gradients(list(everyone.parameters()))
    mine = slice(rank * buffer.num_local_experts, (rank + 1) * buffer.num_local_experts)
    wanted += [w.grad[mine] for w in everyone.parameters()]

    errors = [
        (a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-6)
        for a, b in zip(found, wanted, strict=True)
    ]
    worst = float(torch.stack(gathered(torch.stack(errors))).max())
    return math.inf if math.isnan(worst) else worst


def _plain_moe(layer: MoELayer, experts: GroupedExperts, x: Tensor) -> Tensor:
    """Sum over experts of weight * expert(x), each expert over all tokens, in float32."""
    topk_idx, topk_weights, _ = layer.router(x)
    gates = torch.zeros(len(x), NUM_EXPERTS, device=x.device).scatter(1, topk_idx, topk_weights)
    y = torch.zeros(x.shape, device=x.device)
    for expert in range(NUM_EXPERTS):
        w1, w3, w2 = (w[expert].to(x.dtype) for w in (experts.w1, experts.w3, experts.w2))
        y = y + gates[:, expert, None] * ((F.silu(x @ w1) * (x @ w3)) @ w2)
    return y.to(x.dtype)
