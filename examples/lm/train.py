"""The loop of a run."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from examples.lm.model import Routed
from examples.lm.options import Options, parse
from examples.lm.report import Result, as_json, headline, line, machine, say, summary
from examples.lm.trainer import Trainer


def train(options: Options, device: torch.device, command: str | None = None) -> Result:
    """The steps that are left, with a line every ``log_every``; *collective*."""
    trainer = Trainer(options, device)
    first_step = trainer.progress["step"] + 1
    result = Result(as_json(options), machine(trainer), command, first_step)
    say(headline(trainer))
    stretch = _Stretch(trainer, result)
    while trainer.progress["step"] < options.steps:
        stretch.step()
        step = trainer.progress["step"]
        is_last = step == options.steps
        if is_last or (options.log_every and step % options.log_every == 0):
            say(stretch.end())
        saves = options.folder is not None
        if saves and (is_last or (options.save_every and step % options.save_every == 0)):
            with stretch.paused():
                trainer.save()
    if device.type == "cuda":
        peak = torch.tensor(torch.cuda.max_memory_allocated(device))
        result.peak_bytes = int(trainer.over_ranks(peak, dist.ReduceOp.MAX))
    result.held_out = trainer.held_out_loss()
    say(summary(result))
    if options.json is not None and dist.get_rank() == 0:
        speed = result.speed if result.losses else None
        values = {**asdict(result), "median_tokens_per_second": speed}
        options.json.write_text(json.dumps(values, indent=1) + "\n")
    trainer.close()
    return result


def steps_until_line(options: Options, done: int) -> int:
    """How many steps the first line covers, of a run that goes on behind ``done`` steps."""
    every = options.log_every or options.steps
    return min(options.steps, (done // every + 1) * every) - done


class _Stretch:
    """The steps between two lines: the GPU is read at the end alone, and while it is profiled."""

    def __init__(self, trainer: Trainer, result: Result) -> None:
        self._trainer, self._result = trainer, result
        self._profiled: list[float] = []  # shares of single steps of the first stretch
        self._made, done = 0, trainer.progress["step"]
        self._length = steps_until_line(trainer.options, done)  # of the first stretch
        self._begin()

    def _begin(self) -> None:
        self._began = time.perf_counter()
        self._steps: list[tuple[Tensor, Tensor, Routed]] = []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time that does not count."""
        _synchronize(self._trainer.device)
        since = time.perf_counter()
        yield
        _synchronize(self._trainer.device)
        self._began += time.perf_counter() - since

    def step(self) -> None:
        self._made += 1
        is_late = self._made > self._length - self._trainer.options.profiled
        if not (is_late and self._made <= self._length):
            self._steps.append(self._trainer.step())
            return
        spans = self._trainer.spans
        _synchronize(self._trainer.device)
        began, spans.enabled = time.perf_counter(), True
        self._steps.append(self._trainer.step())
        spans.enabled, seconds = False, spans.take_seconds()
        self._profiled.append(seconds / (time.perf_counter() - began))

    def end(self) -> str:
        """Fill the result in, begin anew; the line."""
        trainer, result, sizes = self._trainer, self._result, self._trainer.options.sizes
        _synchronize(trainer.device)
        seconds = time.perf_counter() - self._began
        result.tokens_per_second.append(len(self._steps) * sizes.batch * sizes.sequence / seconds)
        losses, norms, routed = zip(*self._steps, strict=True)
        result.losses += trainer.mean(torch.stack(losses)).tolist()
        result.grad_norms += torch.stack(norms).tolist()
        counts = routed[-1].counts.double()
        busiest = trainer.over_ranks(counts.max(), dist.ReduceOp.MAX)
        result.load.append((busiest / trainer.mean(counts.mean())).item())
        dropped = torch.stack([each.dropped for each in routed]).sum()
        result.dropped += int(trainer.over_ranks(dropped, dist.ReduceOp.SUM))
        is_profiled = bool(self._profiled)
        if is_profiled:
            share = torch.tensor(self._profiled, dtype=torch.float64).mean()
            result.communication_share = trainer.mean(share).item()
            self._profiled.clear()
        self._begin()
        return line(trainer, result, is_profiled)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    options = parse()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(
            "examples.lm: start it with torchrun --nproc-per-node RANKS -m examples.lm"
        )
    device, group = torch.device("cpu"), "gloo"
    if options.device != "cpu" and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
        torch.cuda.set_device(device)
        if int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus:  # NCCL refuses ranks that share a GPU
            group = "cpu:gloo,cuda:nccl"
    dist.init_process_group(group)
    command = f"torchrun --nproc-per-node {dist.get_world_size()} -m examples.lm"
    train(options, device, " ".join([command, *sys.argv[1:]]))
    dist.destroy_process_group()
