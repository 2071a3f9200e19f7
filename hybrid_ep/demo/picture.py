"""The picture of a training: the loss, and the load of every expert, over the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybrid_ep.demo.report import NATS_PER_BIT, Report, ranks
from hybrid_ep.output import pictures

MOST_NAMES = 32  # of rows, that can be read


def plot(report: Report, path: Path) -> None:
    """Draw it into a file; needs matplotlib, the name's ending picks the format."""
    pyplot = pictures.load_pyplot()
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(15, 5.5), gridspec_kw={"width_ratios": (1, 1.25)}
    )
    figure.subplots_adjust(left=0.05, right=0.98, bottom=0.11, top=0.85, wspace=0.55)
    _draw_loss(report, left)
    image = _draw_load(report, right)
    figure.colorbar(image, ax=right, extend="max", label="load; 1 is the mean of the experts")
    figure.suptitle(
        f"hybrid_ep demo: {ranks(report.num_ranks)} on {report.device}, "
        f"{report.backend} backend, {100 * report.comm_share:.0f}% of the time in dispatch and "
        "combine",
        x=0.05,
        ha="left",
    )
    pictures.write(figure, path)


def _draw_loss(report: Report, axes: Any) -> None:
    training, held_out = pictures.COLOURS[:2]
    bits = [loss / NATS_PER_BIT for loss in report.losses]
    axes.plot(range(1, len(bits) + 1), bits, color=training, linewidth=1.2)
    axes.plot(*zip(*report.valid, strict=True), "o-", color=held_out)
    axes.axhline(report.unigram, color=pictures.GREY, linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set_title("Loss", loc="left", fontweight="bold")
    axes.set_xlim(0, max(len(bits), 1))
    axes.set_ylim(bottom=0)
    axes.grid()
    step, valid = report.valid[-1]
    alone = f"byte frequencies alone  {report.unigram:.2f}"
    pictures.label_ends(
        axes,
        [
            pictures.End(len(bits), bits[-1], f"training batch  {bits[-1]:.2f}", training),
            pictures.End(step, valid, f"held-out text  {valid:.2f}", held_out),
            pictures.End(len(bits), report.unigram, alone, pictures.GREY),
        ],
    )


def _draw_load(report: Report, axes: Any) -> Any:
    """A row for each expert, by layer and by the rank that owns it, a column for each step."""
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
    of_a_rank = experts // report.num_ranks
    for group in range(1, layers * report.num_ranks):
        width = 2.5 if group % report.num_ranks == 0 else 0.7  # between layers, between ranks
        axes.axhline(group * of_a_rank - 0.5, color="black", linewidth=width)
    axes.set_yticks(*_names(layers, report.num_ranks, of_a_rank))
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="step")
    title = f"Load of the experts: {experts} per layer, {of_a_rank} per rank"
    axes.set_title(title, loc="left", fontweight="bold")
    return image


def _names(layers: int, num_ranks: int, of_a_rank: int) -> tuple[list[float], list[str]]:
    """Places and names of the ranks' rows; of the layers' alone where these are too many."""
    experts = num_ranks * of_a_rank
    if layers * num_ranks > MOST_NAMES:
        middles = [layer * experts + (experts - 1) / 2 for layer in range(layers)]
        return middles, [f"layer {layer}" for layer in range(layers)]
    places = [group * of_a_rank + (of_a_rank - 1) / 2 for group in range(layers * num_ranks)]
    names = [f"rank {group % num_ranks}" for group in range(layers * num_ranks)]
    for layer in range(layers):
        names[layer * num_ranks] = f"layer {layer}, rank 0"
    return places, names
