"""Which rank holds which parameter, and how gradients are averaged and clipped.

    experts   by rank: each rank has its own        gradients are sums over all ranks: / R
    sharded   FSDP2: each rank has a piece          gradients are means: FSDP's reduce-scatter
    copied    routers; with ``copies``, everything  gradients are this rank's: all-reduced, / R

So all of them are means over ranks before they are clipped.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from examples.lm.model import Model
from hybrid_ep.moe import expert_parameters

CAN_SHARD = "ignored_params" in inspect.signature(fully_shard).parameters
"""Whether fully_shard of this torch can leave the experts alone."""


@dataclass(frozen=True)
class Held:
    """The parameters of this rank, by the way they are spread over the ranks.

    Attributes:
        experts, sharded, copied: see above.
        wire: device of the collectives outside of FSDP: the GPU over NCCL, else the CPU.
    """

    experts: list[nn.Parameter]
    sharded: list[nn.Parameter]
    copied: list[nn.Parameter]
    wire: torch.device


def wire_of(device: torch.device) -> torch.device:
    """The device that the default group carries."""
    is_nccl = device.type == "cuda" and "nccl" in dist.get_backend_config()
    return device if is_nccl else torch.device("cpu")


def share_out(model: Model, dense: str, device: torch.device) -> Held:
    """Shard the dense part (``"fsdp"``) or leave copies of it (``"copies"``); *collective*.

    The experts are left alone: each rank has its own. The routers stay float32 copies, small as
    they are, so that near ties are decided alike with and without FSDP's bfloat16.
    """
    experts = set(expert_parameters(model).values())
    routers = {weight for block in model.blocks for weight in block.router.parameters()}
    if dense == "fsdp":
        if not CAN_SHARD:
            raise ValueError(
                "--dense fsdp needs a torch whose fully_shard has ignored_params, got torch "
                f"{torch.__version__}: use --dense copies"
            )
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy: dict[str, Any] = {}
        if model.dtype != torch.float32:
            policy["mp_policy"] = MixedPrecisionPolicy(  # rotary angles stay float32
                model.dtype, torch.float32, cast_forward_inputs=False
            )
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, ignored_params=experts | routers, **policy)
    groups: dict[str, list[nn.Parameter]] = {"experts": [], "sharded": [], "copied": []}
    for weight in model.parameters():
        kind = "experts" if weight in experts else "copied"
        groups["sharded" if isinstance(weight, DTensor) else kind].append(weight)
    return Held(**groups, wire=wire_of(device))


def make_optimizer(held: Held, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW in float32; sharded tensors and plain ones in groups of their own, as its kernels want.

    Vectors (the norms) do not decay.
    """
    groups = []
    for weights in (held.experts, held.sharded, held.copied):
        for decays in (True, False):
            chosen = [w for w in weights if (w.dim() > 1) == decays]
            if chosen:
                groups.append({"params": chosen, "weight_decay": weight_decay * decays})
    is_on_gpu = held.experts[0].is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=is_on_gpu)


@torch.no_grad()
def average_gradients(held: Held) -> None:
    """The mean of gradients that FSDP has not averaged; *collective*, once per optimizer step."""
    num_ranks = dist.get_world_size()
    torch._foreach_div_([weight.grad for weight in held.experts], num_ranks)
    grads = [weight.grad for weight in held.copied]
    flat = torch.cat([grad.flatten() for grad in grads]).to(held.wire)
    dist.all_reduce(flat)
    parts = (flat / num_ranks).to(grads[0].device).split([grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))


@torch.no_grad()
def clip_gradients(held: Held, largest: float) -> Tensor:
    """Scale all gradients so that their norm is at most ``largest``; *collective*.

    An expert is on one rank, and so is a piece of what is sharded: their squares are summed over
    the ranks. Copies are equal on all ranks and count once. The host waits for nothing over NCCL.

    Returns:
        Tensor: float32 ``[]``, the norm before, that of one process which holds everything.
    """
    own = [_local(weight.grad) for weight in (*held.experts, *held.sharded)]
    copied = [weight.grad for weight in held.copied]
    squares = _squares(own).to(held.wire)
    dist.all_reduce(squares)
    norm = (squares.to(own[0].device) + _squares(copied)).sqrt()
    torch._foreach_mul_(own + copied, (largest / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _squares(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).square().sum()
