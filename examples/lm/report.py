"""The results of a run, and the lines of rank 0."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import hybrid_ep
from examples.lm.options import Options
from examples.lm.trainer import Trainer


@dataclass
class Result:
    """The results of a run, equal on all ranks.

    Attributes:
        options: of the run; the sizes among them.
        machine: torch, device, ranks, backend.
        command: that started it.
        first_step: the first step made here.
        losses: nats per byte of each step made here, mean over all tokens of the step.
        grad_norms: of each step, before clipping.
        tokens_per_second: of all ranks, of each stretch between two lines.
        load: rows of the busiest expert / mean, of the last step of each stretch.
        dropped: rows beyond the bound, since the beginning.
        communication_share: time in dispatch and combine / time, of the profiled steps; mean over
            ranks. It holds the waits for peers, and where they run beside other work, that too.
        peak_bytes: of PyTorch's allocator, the largest rank's; None without a GPU.
        held_out: nats per byte of text that the model was not trained on.
    """

    options: dict[str, Any]
    machine: dict[str, Any]
    command: str | None = None
    first_step: int = 1
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    dropped: int = 0
    communication_share: float | None = None
    peak_bytes: int | None = None
    held_out: float | None = None

    @property
    def speed(self) -> float:
        """Median tokens per second, without the first stretch where there are others."""
        return statistics.median(self.tokens_per_second[1:] or self.tokens_per_second)


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def headline(trainer: Trainer) -> str:
    options = trainer.options
    carrier = options.way if options.way == "nccl" else f"hybrid_ep on {trainer.buffer.backend}"
    text = f"{trainer.num_parameters / 1e6:,.1f} M parameters on {trainer.num_ranks} rank(s), "
    text += f"{carrier}, overlap {options.overlap}, dense part: {trainer.dense}; "
    return text + f"{len(trainer.windows.text) / 1e6:.1f} MB of Python to learn from"


def line(trainer: Trainer, result: Result, is_profiled: bool) -> str:
    parts = [
        f"step {trainer.progress['step']:5}",
        f"loss {result.losses[-1]:.4f}",
        f"norm {result.grad_norms[-1]:.3f}",
        f"{result.tokens_per_second[-1]:,.0f} tokens/s",
        f"load {result.load[-1]:.2f}",
    ]
    if is_profiled:
        parts.append(f"communication {result.communication_share:.0%}")
    if result.dropped:
        parts.append(f"{result.dropped:,} rows DROPPED")
    if trainer.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(trainer.device)
        parts.append(f"peak {peak / 2**30:.1f} GiB")
    return "  ".join(parts)


def summary(result: Result) -> str:
    text = f"held-out text: {result.held_out / math.log(2):.3f} bits per byte"
    return text + (f"; {result.speed:,.0f} tokens/s" if result.losses else "")


def as_json(options: Options) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(options), default=str))


def machine(trainer: Trainer) -> dict[str, Any]:
    device = trainer.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "hybrid_ep": hybrid_ep.__version__,
        "ranks": trainer.num_ranks,
        "backend": trainer.buffer.backend if trainer.options.way == "hybrid_ep" else "nccl",
        "dense": trainer.dense,
        "dtype": str(trainer.dtype),
        "parameters": trainer.num_parameters,
    }
