"""Train a model with an MoE layer, save it, and resume on another number of ranks.

    torchrun --nproc-per-node 4 examples/resume_moe.py --steps 40 checkpoints
    torchrun --nproc-per-node 2 examples/resume_moe.py --steps 80 checkpoints

Experts and their moments are saved as DTensors over the experts, so torch.distributed.checkpoint
gives each rank those that it has now. Nothing here is different for a model without experts.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hybrid_ep
from hybrid_ep.moe import MoELayer, replicated_parameters

HIDDEN, FFN_HIDDEN, EXPERTS, TOPK, TOKENS = 64, 128, 8, 2, 1024  # tokens of all ranks


class Model(nn.Module):
    def __init__(self, buffer: hybrid_ep.Buffer) -> None:
        super().__init__()
        torch.manual_seed(0)  # what every rank holds is equal on all; experts are so by themselves
        self.dense = nn.Linear(HIDDEN, HIDDEN, device=buffer.device)
        self.moe = MoELayer(buffer, FFN_HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.dense(x)
        out = self.moe(x.to(self.moe.buffer.dtype))
        return x + out.y, out.aux_loss


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Collective; the folder is one that all ranks see."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": step}
    dcp.save(state, checkpoint_id=folder / str(step))


def load_newest(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Collective; the steps that were made before, 0 where nothing was saved."""
    # .metadata is written last: a checkpoint without it was interrupted
    step = max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)
    if step == 0:
        return 0
    weights, moments = get_state_dict(model, optimizer)  # what is loaded, and where to
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=folder / str(step))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state["step"]


def train(buffer: hybrid_ep.Buffer, folder: Path, steps: int, save_every: int) -> list[float]:
    """The losses of the steps that were made here."""
    rank, num_ranks = buffer.topology.rank, buffer.topology.num_ranks
    model = Model(buffer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(load_newest(folder, model, optimizer), steps):
        batch = torch.Generator().manual_seed(step)  # equal for any number of ranks
        x = torch.randn(TOKENS, HIDDEN, generator=batch).chunk(num_ranks)[rank].to(buffer.device)
        y, aux_loss = model(x)
        loss = (y - torch.tanh(x.roll(1, dims=1))).square().mean()

        # the mean over ranks: what all ranks hold is summed, experts have the sum by themselves
        ((loss + 0.01 * aux_loss) / num_ranks).backward()
        for parameter in replicated_parameters(model):
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

        total = loss.detach().cpu()
        dist.all_reduce(total)
        losses.append(total.item() / num_ranks)
        if (step + 1) % save_every == 0:
            save(folder, step + 1, model, optimizer)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args()
    device, dtype = torch.device("cpu"), torch.float32
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    dist.init_process_group("gloo")
    buffer = hybrid_ep.Buffer(
        hidden=HIDDEN, num_experts=EXPERTS, max_tokens=TOKENS, topk=TOPK, dtype=dtype, device=device
    )
    losses = train(buffer, options.folder, options.steps, options.save_every)
    if dist.get_rank() == 0 and losses:
        first = options.steps - len(losses) + 1
        print(f"steps {first} to {options.steps}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    dist.barrier()  # peers may still read this rank's memory
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
