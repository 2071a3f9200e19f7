"""A model, its optimizer and its text, and one step of them."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples.lm import checkpoints, parallel
from examples.lm.model import Model, Routed
from examples.lm.moves import make_buffer, make_moves
from examples.lm.options import Options
from examples.lm.spans import Spans
from examples.lm.text import Windows, load_text
from hybrid_ep.shape import DTYPES

HELD_OUT_BATCHES = 4  # micro-batches of each rank


class Trainer:
    """A model, its optimizer, its text, and how far they are; *collective*.

    Args:
        options: what to train.
        device: of this rank.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        self.options, self.device = options, device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        options.check(self.num_ranks)
        if device.type == "cuda":
            options.check_device(torch.cuda.get_device_properties(device).multi_processor_count)
        self.dense = _dense(options, device)
        by_default = "bf16" if device.type == "cuda" else "fp32"
        self.dtype = DTYPES[by_default if options.dtype == "auto" else options.dtype]
        self.buffer = make_buffer(options, device, self.dtype)
        self.spans = Spans(device)
        self.moves = make_moves(options, self.buffer)
        self.model = Model(options, self.buffer, self.moves, self.spans)
        total = sum(p.numel() for p in self.model.parameters())
        self.held = parallel.share_out(self.model, self.dense, device)
        experts = sum(p.numel() for p in self.held.experts)
        self.num_parameters = total + experts * (self.num_ranks - 1)
        self.optimizer = parallel.make_optimizer(self.held, options.lr, options.weight_decay)
        text, self.held_out = load_text()
        self.windows = Windows(text, options.sizes.sequence, options.seed)
        self.progress = {"step": 0, "position": 0}
        if options.folder is not None:
            self.progress = checkpoints.load_newest(
                options.folder, self.model, self.optimizer, self.progress
            )

    def step(self) -> tuple[Tensor, Tensor, Routed]:
        """One optimizer step: this rank's loss, the norm of all gradients, and the routing."""
        try:
            loss, routed = self._accumulate()
        finally:  # an exception must not leave the settings of the process changed
            self.model.free_sms.reset()
        parallel.average_gradients(self.held)
        norm = parallel.clip_gradients(self.held, self.options.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress["step"] += 1
        self.progress["position"] += self.options.sizes.batch
        return loss, norm, routed

    def _accumulate(self) -> tuple[Tensor, Routed]:
        """Gradients of all micro-batches of a step; the mean of their losses, and the routing."""
        sizes = self.options.sizes
        num_micro = sizes.batch // (self.num_ranks * sizes.micro_batch)
        losses, layers = [], []
        for micro in range(num_micro):
            if self.dense == "fsdp":  # the ranks' gradients are summed once, after the last one
                self.model.set_requires_gradient_sync(micro == num_micro - 1)
            place = (micro * self.num_ranks + self.rank) * sizes.micro_batch
            text = self.windows.take(self.progress["position"] + place, sizes.micro_batch)
            with self._precision():
                loss, routed = self.model(self._to_device(text))
            ((loss + self.options.aux * routed.aux_loss) / num_micro).backward()
            losses.append(loss.detach())
            layers.append(Routed(*(each.detach() for each in routed)))
        aux_losses, counts, dropped = (torch.stack(each) for each in zip(*layers, strict=True))
        summed = Routed(aux_losses.mean(), counts.sum(dim=0), dropped.sum())
        return torch.stack(losses).mean(), summed

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Nats per byte of held-out text, spread over it; *collective*."""
        sizes = self.options.sizes
        windows = Windows(self.held_out, sizes.sequence, seed=0)
        losses = []
        for batch in range(HELD_OUT_BATCHES):
            place = (batch * self.num_ranks + self.rank) * sizes.micro_batch
            text = self._to_device(windows.take(place, sizes.micro_batch))
            try:
                with self._precision():
                    losses.append(self.model(text)[0])
            finally:
                self.model.free_sms.reset()
        return self.mean(torch.stack(losses).mean()).item()

    def save(self) -> None:
        """Into the folder of the options; *collective*."""
        checkpoints.save(self.options.folder, self.model, self.optimizer, self.progress)

    def mean(self, values: Tensor) -> Tensor:
        """Over the ranks; *collective*."""
        return self.over_ranks(values, dist.ReduceOp.SUM) / self.num_ranks

    def over_ranks(self, values: Tensor, op: Any) -> Tensor:
        """All-reduced by whatever the group carries, on the CPU; *collective*."""
        carried = values.detach().to(self.held.wire, copy=True)
        dist.all_reduce(carried, op)
        return carried.cpu()

    def close(self) -> None:
        """*Collective*."""
        dist.barrier()  # peers may still read this rank's memory
        self.moves.close()

    def _to_device(self, text: Tensor) -> Tensor:
        """From pinned memory, as a copy from any other would wait for the GPU."""
        if self.device.type == "cuda":
            return text.pin_memory().to(self.device, non_blocking=True)
        return text

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """FSDP rounds its parameters itself; copies are rounded by autocast."""
        by_autocast = self.dense == "copies" and self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype, enabled=by_autocast)

    def _learning_rate(self) -> float:
        """Linear warm-up, then a cosine to a tenth."""
        step, options = self.progress["step"] + 1, self.options
        warm = min(1.0, step / max(1, options.warmup))
        done = min(1.0, step / options.steps)
        return options.lr * warm * (0.55 + 0.45 * math.cos(math.pi * done))


def _dense(options: Options, device: torch.device) -> str:
    wire = parallel.wire_of(device)
    if options.way == "nccl" and wire != device:
        raise ValueError(
            "--way nccl must have a GPU for each rank, got ranks that share one: NCCL refuses them"
        )
    if options.dense == "auto":
        return "fsdp" if wire == device and parallel.CAN_SHARD else "copies"
    if options.dense == "fsdp" and wire != device:
        raise ValueError(
            "--dense fsdp must have a GPU for each rank, got ranks that share one: its collectives "
            "need NCCL. Use --dense copies"
        )
    return options.dense
