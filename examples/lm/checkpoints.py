"""Save, and resume on any number of ranks.

Experts are DTensors by expert in the state dicts, the dense part is FSDP's DTensors or copies, so
torch.distributed.checkpoint gives each rank what it has now.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, int]
) -> None:
    """``progress["step"]`` names the checkpoint; *collective*, in a folder that all ranks see."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, **progress}
    dcp.save(state, checkpoint_id=folder / str(progress["step"]))


def load_newest(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, int]
) -> dict[str, int]:
    """What ``save`` was given, or ``progress`` as it is where nothing was saved; *collective*."""
    # .metadata is written last: a checkpoint without it was interrupted
    step = max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)
    if step == 0:
        return progress
    weights, moments = get_state_dict(model, optimizer)  # what is loaded, and where to
    state: dict[str, Any] = {"model": weights, "optimizer": moments, **progress}
    dcp.load(state, checkpoint_id=folder / str(step))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return {name: state[name] for name in progress}
