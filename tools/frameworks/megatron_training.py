"""Train a MoELayer of Megatron-Core over hybrid_ep and over its own all-to-all dispatcher.

    torchrun --nproc-per-node RANKS megatron_training.py [--steps N]

Experts are spread over the ranks; both layers start from the same weights and see the same tokens,
others on each rank. The losses must agree at every step, and fall. The layers are made by the
container of Megatron-LM's test_token_dispatcher.py, whose folder `tests` must be on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import shared_gpus
import torch
import torch.distributed as dist

SEQUENCE, BATCH, HIDDEN, EXPERTS = 64, 4, 512, 16
WAYS = ((torch.bfloat16, 2, 2e-2), (torch.float32, 6, 1e-3))  # topk, tolerance of the losses


def train(layer: Any, dtype: torch.dtype, steps: int) -> list[float]:
    """Losses, means over the ranks."""
    world = dist.get_world_size()
    torch.manual_seed(1)
    teacher = torch.randn(HIDDEN, HIDDEN).cuda() / HIDDEN**0.5
    torch.manual_seed(2 + dist.get_rank())
    batches = [torch.randn(SEQUENCE, BATCH, HIDDEN).cuda() for _ in range(2)]
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        x = batches[step % len(batches)]
        y, _ = layer(x.to(dtype))
        loss = (y.float() - torch.tanh(x @ teacher)).square().mean()
        optimizer.zero_grad()
        (loss / world).backward()  # gradients of experts are sums over the tokens of all ranks
        for parameter in layer.router.parameters():  # every rank has these
            dist.all_reduce(parameter.grad)
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    world = int(os.environ["WORLD_SIZE"])
    shared_gpus.install(world)
    from megatron.core.transformer.moe.fused_a2a import reset_hybrid_ep_buffer
    from tests.unit_tests.test_utilities import Utils
    from tests.unit_tests.transformer.moe.test_token_dispatcher import MoEModelTestContainer

    faults = 0
    for dtype, topk, tolerance in WAYS:
        container = MoEModelTestContainer(
            tp_size=1,
            ep_size=world,
            pp_size=1,
            num_moe_experts=EXPERTS,
            moe_router_topk=topk,
            hidden_size=HIDDEN,
            moe_token_dispatcher_type="flex",
            moe_flex_dispatcher_backend="hybridep",
            test_dtype=dtype,
        )
        ours = container.new_moe_layer()
        theirs = container.new_moe_layer(
            moe_token_dispatcher_type="alltoall", moe_flex_dispatcher_backend=None
        )
        theirs.load_state_dict(ours.state_dict())
        got, wanted = (train(layer, dtype, args.steps) for layer in (ours, theirs))
        off = max(abs(a - b) / b for a, b in zip(got, wanted, strict=True))
        fell = got[-1] < 0.9 * got[0]
        passed = off <= tolerance and fell
        faults += not passed
        if dist.get_rank() == 0:
            print(f"{dtype}, top-{topk}, {type(ours.token_dispatcher._comm_manager).__name__}:")
            print("  hybrid_ep ", " ".join(f"{loss:.5f}" for loss in got))
            print("  alltoall  ", " ".join(f"{loss:.5f}" for loss in wanted))
            told = "passed" if passed else "FAILED"
            print(f"  {told}: losses differ by at most {off:.1e}, of {tolerance:.0e}", flush=True)
        reset_hybrid_ep_buffer()
        del container, ours, theirs
    Utils.destroy_model_parallel()
    dist.destroy_process_group()
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
