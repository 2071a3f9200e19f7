"""Save, and resume on any number of ranks, with the dense part sharded or copied.

Experts are DTensors by expert in the state dicts, the dense part is FSDP's DTensors or copies, so
torch.distributed.checkpoint gives each rank its present part. The optimizer's state is saved by the
names of parameters, as its groups depend on how the dense part is held.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, int]
) -> None:
    """``progress["step"]`` names the checkpoint; *collective*, in a folder that all ranks see."""
    weights, moments = get_state_dict(model, optimizer, options=_BY_NAME)
    state = {"model": weights, "optimizer": moments, **progress}
    dcp.save(state, checkpoint_id=folder / str(progress["step"]))


def load_newest(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, int]
) -> dict[str, int]:
    """Load the newest checkpoint; *collective*.

    The settings of the optimizer (learning rate, weight decay, betas) stay those it was made with.

    Returns:
        dict: the progress that was saved, or ``progress`` as it is without a checkpoint.
    """
    # .metadata is written last: a checkpoint without it was interrupted
    step = max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)
    if step == 0:
        return progress
    settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    weights, moments = get_state_dict(model, optimizer, options=_BY_NAME)  # loaded in place
    state: dict[str, Any] = {"model": weights, "optimizer": moments, **progress}
    dcp.load(state, checkpoint_id=folder / str(step))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_BY_NAME,
    )
    for group, mine in zip(optimizer.param_groups, settings, strict=True):
        group.update(mine)
    return {name: state[name] for name in progress}
