"""The language model of examples/lm, on the CPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from examples.lm import parallel
from examples.lm.model import Routed
from examples.lm.options import Options
from examples.lm.train import train
from examples.lm.trainer import Trainer
from tests.launch import Rank


def run(me: Rank, options: Options) -> dict[str, Any]:
    """The results of a run."""
    return asdict(train(options, me.device))


def gradients(me: Rank, options: Options, largest: float) -> dict[str, Any]:
    """Of one step: what each rank has of the experts, what is equal on all, and the norm.

    ``clipped`` is the same after clipping to ``largest``.
    """
    trainer = Trainer(options, me.device)
    text = trainer.windows.take(me.rank * options.sizes.micro_batch, options.sizes.micro_batch)
    loss, told = trainer.model(text)
    assert isinstance(told, Routed)
    (loss + options.aux * told.aux_loss).backward()
    parallel.average_gradients(trainer.held)
    before = _whole(trainer)
    norm = parallel.clip_gradients(trainer.held, largest)
    after = _whole(trainer)
    trainer.close()
    return {"norm": norm, "unclipped": before, "clipped": after}


def _whole(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of this rank's experts, and those that all ranks share, by name."""
    mine = {id(weight) for weight in trainer.held.experts}
    experts, shared = {}, {}
    for name, weight in trainer.model.named_parameters():
        grad = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        (experts if id(weight) in mine else shared)[name] = grad.clone()
    return experts, shared


def shares_of_time(me: Rank, options: Options) -> tuple[float, int]:
    """Seconds in dispatch and combine of one step, and how many spans they are."""
    trainer = Trainer(options, me.device)
    trainer.spans.enabled = True
    trainer.step()
    ended = sum(None not in span for span in trainer.spans._spans)
    seconds = trainer.spans.take_seconds()
    trainer.spans.enabled = False
    trainer.step()
    assert trainer.spans.take_seconds() == 0.0
    trainer.close()
    return seconds, ended


def dtypes_of_what_is_held(me: Rank, options: Options) -> set[torch.dtype]:
    """Of all parameters: masters are float32."""
    trainer = Trainer(options, me.device)
    held = trainer.held
    dtypes = {weight.dtype for weight in (*held.experts, *held.sharded, *held.copied)}
    trainer.close()
    return dtypes
