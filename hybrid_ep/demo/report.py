"""What rank 0 saw of a training, and how people see it: in lines and bars."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import dataclass, field

import torch

NATS_PER_BIT = math.log(2)


@dataclass
class Report:
    """What rank 0 saw; ``--json`` writes it.

    Attributes:
        device: name of rank 0's.
        layer_error: largest difference between the distributed layer and plain arithmetic, relative
            to the largest value; over outputs and all gradients.
        layer_tolerance: what is allowed.
        losses: nats per byte of each step's batch, mean over all ranks.
        valid: pairs (steps done, bits per byte of the held-out text).
        unigram: bits per byte of the held-out text, coded with the byte frequencies of the rest.
        step_seconds: wall time of each step on rank 0.
        comm_seconds: the part of it in route, dispatch and combine, forward and backward, with the
            waiting for peers.
        expert_load: ``[steps][layers][experts]``, rows of the expert over the mean of all experts.
    """

    backend: str = ""
    why: str = ""
    device: str = ""
    num_ranks: int = 0
    parameters: int = 0
    layer_error: float = math.inf
    layer_tolerance: float = 0.0
    losses: list[float] = field(default_factory=list)
    valid: list[tuple[int, float]] = field(default_factory=list)
    unigram: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    comm_seconds: list[float] = field(default_factory=list)
    expert_load: list[list[list[float]]] = field(default_factory=list)

    @property
    def layer_equal(self) -> bool:
        """Whether the distributed layer is the plain one, but for rounding."""
        return self.layer_error <= self.layer_tolerance

    @property
    def final_loss(self) -> float:
        """Mean of the last tenth of the steps, at most ten: one batch alone is noisy."""
        last = self.losses[-max(1, min(10, len(self.losses) // 10)) :]
        return sum(last) / len(last)

    @property
    def falling(self) -> bool:
        """Whether the loss ends finite and below its beginning (of one step: finite)."""
        steps = len(self.losses)
        return math.isfinite(self.losses[-1]) and (steps == 1 or self.final_loss < self.losses[0])

    @property
    def comm_share(self) -> float:
        """Of the steps' time, in dispatch and combine; without the first step, which warms up."""
        begin = 1 if len(self.step_seconds) > 1 else 0
        return sum(self.comm_seconds[begin:]) / sum(self.step_seconds[begin:])


class Progress:
    """A bar on a terminal with rich, a line now and then elsewhere."""

    def __init__(self, steps: int, *, enabled: bool) -> None:
        self._steps, self._enabled = steps, enabled
        self._bar = self._task = None
        if enabled and sys.stdout.isatty() and importlib.util.find_spec("rich"):
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("step {task.completed}/{task.total}"),
                progress.BarColumn(bar_width=8),  # so that 80 columns cut nothing
                progress.TextColumn("{task.description}"),
                progress.TimeRemainingColumn(),
            )

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, report: Report) -> None:
        """Show the last step of the report."""
        if not self._enabled:
            return
        step = len(report.losses)
        share = f"{100 * report.comm_share:.0f}% dispatch+combine"
        text = f"loss {report.losses[-1]:.6f} nats/byte, {share}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif step in (1, self._steps) or step % max(1, self._steps // 8) == 0:
            print(f"step {step:4}/{self._steps}  {text}", flush=True)


def ranks(count: int) -> str:
    """The count with its noun."""
    return f"{count} rank" if count == 1 else f"{count} ranks"


def show_load(report: Report) -> None:
    """Print one line per layer: the mean of the last quarter of the steps."""
    print("load of the experts at the end (each bar one expert, full height twice the mean):")
    steps = torch.tensor(report.expert_load)
    late = steps[-max(1, len(steps) // 4) :].mean(dim=0)  # [layers, experts]
    for layer, load in enumerate(late.tolist()):
        bars = "".join("▁▂▃▄▅▆▇█"[min(7, int(4 * value))] for value in load)
        busiest = torch.tensor(load).view(report.num_ranks, -1).mean(dim=1).max()
        print(
            f"  layer {layer}  {bars}  busiest expert {max(load):.2f}x, least busy "
            f"{min(load):.2f}x, busiest rank {busiest:.2f}x the mean"
        )


def summary(report: Report, seconds: float) -> str:
    """The last line."""
    step_ms = sorted(report.step_seconds)[len(report.step_seconds) // 2] * 1e3
    return (
        f"demo: loss {report.losses[0]:.4f} -> {report.final_loss:.4f} nats/byte in "
        f"{len(report.losses)} steps of {step_ms:.0f} ms, held-out text {report.valid[-1][1]:.3f} "
        f"bits/byte (byte frequencies alone: {report.unigram:.3f}), "
        f"{100 * report.comm_share:.0f}% of the time in dispatch and combine; {report.backend} "
        f"backend, {ranks(report.num_ranks)} on {report.device}, {seconds:.0f} s"
    )
