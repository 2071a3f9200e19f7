"""Which backend serves a group, and how it is made: on all ranks, or on none."""

from __future__ import annotations

import logging
from typing import Any

from hybrid_ep.backends import Backend
from hybrid_ep.backends.cuda import settings
from hybrid_ep.backends.cuda.backend import CudaBackend
from hybrid_ep.backends.torch.backend import TorchBackend
from hybrid_ep.config import Config
from hybrid_ep.errors import SetupError
from hybrid_ep.group import Group
from hybrid_ep.shape import Shape

BACKENDS = ("auto", "torch", "nvlink", "nvshmem")
REASONS = {
    "nvlink": "all ranks reach each other's memory on one host",
    "nvshmem": "ranks of several nodes reach each other through NVSHMEM",
}

_log = logging.getLogger("hybrid_ep")


def choose(
    asked: str, shape: Shape, group: Group, config: Config, *, number: int
) -> tuple[Backend, str]:
    """A backend, and why this one: the same on all ranks, which have met; collective.

    What is ``asked`` for is one of ``BACKENDS``; ``number`` is the Buffer's, equal on all ranks.

    Raises:
        RuntimeError: the one asked for cannot run here.
    """
    of_buffer = shape, group, config
    if asked == "torch":
        return build("torch", *of_buffer, number=number), "backend='torch' was asked for"
    name = asked
    if asked == "auto":
        name = "nvlink" if len(set(group.hosts)) == 1 else "nvshmem"
    why_not = _why_not(name, shape, group)
    if why_not is None:
        try:
            return build(name, *of_buffer, number=number), REASONS[name]
        except (RuntimeError, MemoryError) as error:  # on all ranks
            why_not = str(error)
    why_not = f"the {name} backend cannot run: {why_not}"
    if asked != "auto":
        raise SetupError(why_not)
    if group.rank == 0 and group.device.type == "cuda":
        _log.warning("using the torch backend, which is slow: %s", why_not)
    return build("torch", *of_buffer, number=number), why_not


def build(
    name: str, shape: Shape, group: Group, config: Config, *, number: int, last_call: int = 0
) -> Backend:
    """The backend of this name, on all ranks or on none; collective.

    Layouts have the number of the Buffer and of a call, and no two may come twice: ``last_call`` is
    the Buffer's last one, where a backend served it before.

    Raises:
        RuntimeError: it cannot run, on some rank.
    """
    built = None
    try:
        with group.together():
            numbers = {"number": number, "last_call": last_call}
            if name == "torch":
                built = TorchBackend(shape, group, config, **numbers)
            else:
                built = CudaBackend(_memory_of(name).Memory, shape, group, config, **numbers)
    except BaseException:
        if built is not None:  # a peer failed
            built.destroy()
        raise
    return built


def _memory_of(name: str) -> Any:
    # here, where a Buffer asks for it, since the import loads an extension
    from hybrid_ep.backends.cuda import nvlink, nvshmem

    return nvlink if name == "nvlink" else nvshmem


def _why_not(name: str, shape: Shape, group: Group) -> str | None:
    """The first rank that cannot run the backend and why, on all ranks alike; collective."""
    try:
        load = _memory_of(name).load_extension
        reason = settings.what_is_lacking(name, shape, group.device, load)
    except (RuntimeError, AssertionError) as error:  # torch cannot use the device
        reason = str(error)
    reasons = group.gather(reason)
    for rank, (reason, host) in enumerate(zip(reasons, group.hosts, strict=True)):
        if reason is None and name == "nvlink" and host != group.hosts[0]:
            reason = "it is on another host than rank 0"
        if reason is not None:
            return f"rank {rank}: {reason}"
    return None
