"""Train one MoE layer with hybrid_ep in your own loop, under torchrun.

    torchrun --nproc-per-node 2 examples/train_moe.py

The task: a fixed random network is the teacher, the layer learns its outputs. Each rank draws its
own tokens and owns its share of the experts.
"""

import os

import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.moe import MoELayer, replicated_parameters

HIDDEN, FFN_HIDDEN, EXPERTS, TOPK, TOKENS, STEPS = 64, 128, 8, 2, 1024, 200


def main() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    else:
        device, dtype = torch.device("cpu"), torch.float32
    dist.init_process_group("gloo")  # sets up any machine; the data path does not need NCCL
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    buffer = hybrid_ep.Buffer(
        hidden=HIDDEN,
        num_experts=EXPERTS,
        max_tokens=TOKENS,
        topk=TOPK,
        dtype=dtype,
        device=device,
    )
    if rank == 0:
        print(buffer.describe())
    layer = MoELayer(buffer, FFN_HIDDEN)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)

    shared = torch.Generator().manual_seed(0)  # the teacher is the same on all ranks
    inner, outer = torch.randn(2, HIDDEN, HIDDEN, generator=shared).to(device) / HIDDEN**0.5
    own = torch.Generator().manual_seed(1 + rank)  # the tokens are not
    for step in range(1, STEPS + 1):
        x = torch.randn(TOKENS, HIDDEN, generator=own).to(device)
        target = torch.tanh(x @ inner) @ outer
        out = layer(x.to(dtype))
        loss = (out.y.float() - target).square().mean()

        # The objective is the mean over the ranks. Experts get the gradients of all ranks' tokens
        # by themselves; what every rank holds alike, here the router, is summed.
        ((loss + 0.01 * out.aux_loss) / num_ranks).backward()
        for parameter in replicated_parameters(layer):
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

        if step == 1 or step % 40 == 0:
            loss = loss.detach().cpu()
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step:4}  loss {loss.item() / num_ranks:.4f}")

    dist.barrier()  # peers may still read this rank's memory
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
