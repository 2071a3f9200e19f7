"""What the kernels need of a rank, and what a runtime is told of its Buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hybrid_ep.config import Config
from hybrid_ep.group import Group
from hybrid_ep.shape import Shape

MIN_CAPABILITY = (9, 0)  # Hopper: the kernels use TMA


def what_is_lacking(
    backend: str, shape: Shape, device: torch.device, load: Callable[[], Any]
) -> str | None:
    """What this rank lacks for a backend of CUDA kernels; ``load`` gets its extension."""
    if device.type != "cuda":
        return f"it needs a CUDA device, the Buffer is on {device}"
    try:
        extension = load()
    except ImportError as error:
        return str(error)
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        needed, found = ("{}.{}".format(*version) for version in (MIN_CAPABILITY, capability))
        return f"it needs compute capability {needed} (Hopper) or newer, the GPU has {found}"
    shared = extension.shared_memory_per_block(device.index or 0)
    if shared < extension.SHARED_MEMORY:
        return (
            f"it needs {extension.SHARED_MEMORY} bytes of shared memory per block, the GPU has "
            f"{shared}"
        )
    return "; ".join(shape.beyond(backend)) or None


def num_sms(device: torch.device) -> int:
    """The SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def layout_base(number: int) -> int:
    """What the layouts of a Buffer are numbered from, so that those of two are told apart."""
    return number % 64 << 16


def runtime_settings(
    shape: Shape, group: Group, config: Config, *, number: int, last_call: int, most_sms: int
) -> dict[str, Any]:
    """What a runtime is told, by the names of ``csrc/config.h``: the Config and the sizes.

    No kernel gets more than ``most_sms``, the SMs of the GPU that has the fewest: channels are
    counted by flags, so all ranks have as many. ``last_call`` counts the routes of the Buffer that
    another runtime made.
    """
    settings = vars(config) | {
        name: min(getattr(config, name), most_sms)
        for name in ("num_sms_publish", "num_sms_dispatch", "num_sms_combine")
    }
    sizes = ("num_ranks", "num_nodes", "ranks_per_node", "num_experts", "max_tokens", "topk")
    sizes += ("row_capacity", "inbox_row_bytes")
    return settings | {
        **{name: getattr(shape, name) for name in sizes},
        "device": group.device.index or 0,
        "rank": group.rank,
        "num_routes": last_call,
        "layout_base": layout_base(number),
    }
