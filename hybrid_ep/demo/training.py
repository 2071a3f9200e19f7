"""What a rank does: compare the layer with one process, then train and time the steps.

The batch and every seed are the same for any number of ranks and any backend.
"""

from __future__ import annotations

import math
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.config import Config
from hybrid_ep.demo.clock import TimedBuffer
from hybrid_ep.demo.collectives import gathered, mean_over_ranks, sum_gradients
from hybrid_ep.demo.model import HIDDEN, NUM_EXPERTS, SEQUENCE, TOPK, Transformer
from hybrid_ep.demo.one_process import compare_with_one_process
from hybrid_ep.demo.report import NATS_PER_BIT, Progress, Report
from hybrid_ep.demo.text import load_text, unigram_bits, windows
from hybrid_ep.launch import COMMAND_TIMEOUT_S
from hybrid_ep.moe import replicated_parameters

BATCH = 32  # sequences per step, of all ranks together
LEARNING_RATE, WARMUP_STEPS = 4e-3, 10
AUX_LOSS_WEIGHT = 0.02
VALID_WINDOWS = 64


def check_and_train(device: torch.device, backend: str, steps: int) -> Report:
    """Compare the layer with one process; train where they agree.

    Runs on every rank; rank 0's report counts.
    """
    _be_deterministic(device)
    payload = torch.bfloat16 if device.type == "cuda" else torch.float32
    buffer = TimedBuffer(
        hidden=HIDDEN,
        num_experts=NUM_EXPERTS,
        max_tokens=BATCH // dist.get_world_size() * SEQUENCE,
        topk=TOPK,
        dtype=payload,
        device=device,
        backend=backend,
        config=Config(timeout_s=COMMAND_TIMEOUT_S),
    )
    report = Report(
        backend=buffer.backend,
        why=buffer.backend_reason,
        device="the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
        num_ranks=dist.get_world_size(),
        layer_error=compare_with_one_process(buffer, payload),
        layer_tolerance=2e-2 if payload == torch.bfloat16 else 1e-4,
    )
    _say(f"{report.backend} backend on {report.device}, because {report.why}")
    _say(
        f"the distributed layer {'equals' if report.layer_equal else 'DIFFERS FROM'} the same "
        f"layer on one process: outputs and gradients within {report.layer_error:.1e} "
        f"(allowed {report.layer_tolerance:.0e})"
    )
    if report.layer_equal:
        train(buffer, payload, steps, report)
        dist.barrier()
        buffer.destroy()
    return report


def train(buffer: TimedBuffer, payload: torch.dtype, steps: int, report: Report) -> None:
    """Train a new model, with the report filled in step by step."""
    training, held_out = (text.to(buffer.device) for text in load_text())
    model = Transformer(buffer, payload).to(buffer.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    local = sum(p.numel() for p in model.parameters())
    dense = sum(p.numel() for p in replicated_parameters(model))
    report.parameters = dense + (local - dense) * report.num_ranks
    report.unigram = unigram_bits(training, held_out)
    _say(
        f"{report.parameters / 1e6:.2f} M parameters; {len(training) / 1e6:.1f} MB of Python to "
        f"learn from, {len(held_out) / 1e6:.1f} MB held out"
    )
    report.valid.append((0, valid_bits(model, held_out)))
    valid_every = max(1, steps // 6)
    with Progress(steps, enabled=dist.get_rank() == 0) as progress:
        for step in range(1, steps + 1):
            buffer.take_seconds()  # forget what was not part of a step
            began = time.perf_counter()
            loss, load = train_step(model, optimizer, training, step, steps)
            report.step_seconds.append(time.perf_counter() - began)
            report.comm_seconds.append(buffer.take_seconds())
            report.losses.append(loss)
            report.expert_load.append(load)
            if step == steps or step % valid_every == 0:
                report.valid.append((step, valid_bits(model, held_out)))
            progress.update(report)


def train_step(
    model: Transformer, optimizer: torch.optim.Optimizer, text: Tensor, step: int, steps: int
) -> tuple[float, list[list[float]]]:
    """One optimizer step; returns the mean loss of all ranks and the load ``[layers][experts]``."""
    num_ranks = dist.get_world_size()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, steps)
    starts = torch.randint(
        len(text) - SEQUENCE, (BATCH,), generator=torch.Generator().manual_seed(step)
    )
    loss, routed = model.loss(windows(text, starts[dist.get_rank() :: num_ranks], SEQUENCE + 1))
    aux_loss = torch.stack([layer.aux_loss for layer in routed]).mean()
    # The objective is the mean over the ranks. Divided here, the experts have their whole gradient
    # after backward, and the parameters that all ranks hold lack only the sum.
    ((loss + AUX_LOSS_WEIGHT * aux_loss) / num_ranks).backward()
    sum_gradients(replicated_parameters(model))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    counts = torch.stack([layer.counts for layer in routed]).float()  # [layers, local experts]
    load = torch.cat(gathered(counts / counts.new_tensor(BATCH * SEQUENCE * TOPK / NUM_EXPERTS)), 1)
    return mean_over_ranks(loss), load.tolist()


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    warm = min(1.0, step / WARMUP_STEPS)
    return LEARNING_RATE * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))


@torch.no_grad()
def valid_bits(model: Transformer, text: Tensor) -> float:
    """Bits per byte over ``VALID_WINDOWS`` windows spread over the text, shared among the ranks."""
    num_ranks, batch = dist.get_world_size(), BATCH // dist.get_world_size()
    starts = torch.linspace(0, len(text) - SEQUENCE - 1, VALID_WINDOWS, dtype=torch.float64).long()
    mine = starts[dist.get_rank() :: num_ranks]
    losses = [model.loss(windows(text, part, SEQUENCE + 1))[0] for part in mine.split(batch)]
    return mean_over_ranks(torch.stack(losses).mean()) / NATS_PER_BIT


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _be_deterministic(device: torch.device) -> None:
    """So that two backends can be told apart by nothing but their time."""
    torch.manual_seed(0)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
