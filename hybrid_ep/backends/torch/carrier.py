"""Which backend of a group carries the tensors of a device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybrid_ep.errors import SetupError

_CPU = torch.device("cpu")


class Carrier(NamedTuple):
    """What carries a Buffer's payload.

    Attributes:
        name: of the backend, as ``torch.distributed`` has it.
        staged: payload on a GPU goes through host memory.
    """

    name: str
    staged: bool = False

    @property
    def is_nothing(self) -> bool:
        """Whether there is nothing to carry, in a world of one rank."""
        return self == NOTHING

    @property
    def is_nccl(self) -> bool:
        """Whether collectives of NCCL carry it."""
        return self.name == "nccl"

    def __str__(self) -> str:
        return self.name + (" through host memory" if self.staged else "")


NOTHING = Carrier("nothing")


def serving_backend(group: Any, device: torch.device) -> str:
    """Name of the backend of ``group`` that serves tensors on ``device``; "" if none does.

    ``dist.get_backend`` does not tell: of a group that was made with "cpu:gloo,cuda:nccl" it
    returns all of that, and of one that was made without a name "undefined".
    """
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device_type: name for device_type, _, name in pairs}.get(device.type, "")


def choose_carrier(group: Any, device: torch.device, shares_gpus: bool) -> Carrier:
    """What carries tensors on ``device`` between the ranks of ``group``, where there are several.

    Args:
        group: of ``torch.distributed``.
        device: of this rank.
        shares_gpus: some ranks have the same GPU, where NCCL refuses to run.

    Raises:
        SetupError: the group has no backend that could.
    """
    on_gpu = device.type == "cuda"
    if on_gpu and not shares_gpus and serving_backend(group, device) == "nccl":
        return Carrier("nccl")
    name = serving_backend(group, _CPU)
    if not name:
        why = "ranks share a GPU, where NCCL does not run" if on_gpu else "tensors are on the CPU"
        raise SetupError(
            f"the group has no backend that carries the torch backend's tensors: {why}, and it "
            f"has {dist.get_backend_config(group)} alone; make it with "
            'init_process_group("cpu:gloo,cuda:nccl")'
        )
    return Carrier(name, staged=device.type != "cpu")
