"""Sums and means over the ranks, through host memory, which any machine's gloo can send."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sum_gradients(parameters: list[nn.Parameter]) -> None:
    """All-reduce the gradients in place, as one message."""
    gradients = [p.grad for p in parameters]
    flat = torch.cat([g.flatten() for g in gradients]).cpu()
    dist.all_reduce(flat)
    parts = flat.to(gradients[0].device).split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def gathered(tensor: Tensor) -> list[Tensor]:
    """The tensor of each rank, on the CPU; of one shape everywhere."""
    tensor = tensor.detach().cpu()
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, tensor)
    return everybody


def mean_over_ranks(value: Tensor) -> float:
    """Added in float64 and rank order, so that every rank has the same."""
    values = [float(v) for v in gathered(value.double())]
    return sum(values) / len(values)
