"""The picture of a training: the loss, and the load of every expert, over the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybrid_ep.demo.report import NATS_PER_BIT, Report, ranks
from hybrid_ep.output import pictures


def plot(report: Report, path: Path) -> None:
    """Draw it into a file; needs matplotlib, the name's ending picks the format."""
    pyplot = pictures.load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    _draw_loss(report, left)
    image = _draw_load(report, right)
    figure.colorbar(image, ax=right, extend="max", label="tokens, over the mean of the experts")
    figure.suptitle(
        f"hybrid_ep demo: {ranks(report.num_ranks)} on {report.device}, "
        f"{report.backend} backend, {100 * report.comm_share:.0f}% of the time in dispatch and "
        "combine"
    )
    pictures.write(figure, path)


def _draw_loss(report: Report, axes: Any) -> None:
    steps = range(1, len(report.losses) + 1)
    bits = [loss / NATS_PER_BIT for loss in report.losses]
    axes.plot(steps, bits, color="tab:blue", linewidth=1.2, label="training batch")
    axes.plot(*zip(*report.valid, strict=True), "o-", color="tab:orange", label="held-out text")
    axes.axhline(
        report.unigram, color="gray", linestyle="--", linewidth=1, label="byte frequencies alone"
    )
    axes.set(xlabel="step", ylabel="bits per byte", title="Loss")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_load(report: Report, axes: Any) -> Any:
    """A row for each expert, the layers under each other, a column for each step."""
    load = torch.tensor(report.expert_load)
    steps, layers, experts = load.shape
    image = axes.imshow(
        load.flatten(1).t().tolist(),
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        vmin=0,
        vmax=2,
        extent=(0.5, steps + 0.5, layers * experts - 0.5, -0.5),
    )
    for layer in range(1, layers):
        axes.axhline(layer * experts - 0.5, color="black", linewidth=1)
    middles = [layer * experts + (experts - 1) / 2 for layer in range(layers)]
    axes.set_yticks(middles, [f"layer {layer}" for layer in range(layers)])
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="step", ylabel=f"{experts} experts per layer", title="Load of the experts")
    return image
