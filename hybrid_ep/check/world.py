"""The ranks of a check: Buffers by their sizes, and one verdict for all ranks."""

from __future__ import annotations

import functools
import os
import platform
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep.buffer import Buffer
from hybrid_ep.check.case import EXPERTS_PER_RANK, HIDDEN, TOKENS, TOPK
from hybrid_ep.check.result import Property
from hybrid_ep.config import Config
from hybrid_ep.errors import GroupError
from hybrid_ep.group import Group


class World:
    """The ranks of a group; the arguments are those of Buffer."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        backend: str,
        device: torch.device | str | None,
        ranks_per_node: int | None,
        timeout_s: float,
    ) -> None:
        self._group = group
        self._arguments = {
            "backend": backend,
            "device": device,
            "ranks_per_node": ranks_per_node,
            "config": Config(timeout_s=timeout_s),
        }
        ranks = Group(group)
        self.rank, self.num_ranks = ranks.rank, ranks.num_ranks
        self.gather = ranks.gather
        self._buffers: dict[tuple[Any, ...], Buffer] = {}

    def buffer(
        self, tokens: int = TOKENS, hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16
    ) -> Buffer:
        """The Buffer of these sizes; made by all ranks together where there is none yet."""
        key = (tokens, hidden, dtype)
        if key not in self._buffers:
            self._buffers[key] = Buffer(
                self._group,
                hidden=hidden,
                num_experts=EXPERTS_PER_RANK * self.num_ranks,
                max_tokens=tokens,
                topk=TOPK,
                dtype=dtype,
                **self._arguments,
            )
        return self._buffers[key]

    def agree(self, check: Callable[[World], str | None]) -> Property:
        """Run one property everywhere and tell everybody what everybody saw."""
        broken = False
        try:
            seen = check(self)
            self._raise_faults()
        except Exception as error:  # whatever it is, the line of this property says so
            broken = True
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(where.filename)}:{where.lineno}"
            seen = f"{type(error).__name__}: {error} ({place})"
        name = (check.__doc__ or check.__name__).rstrip(".")
        try:
            everybody = self.gather((seen, broken))
            if any(broken for _, broken in everybody):
                self.close()  # ranks stopped at different calls: the next property starts afresh
        except RuntimeError as error:
            raise GroupError(
                f"the group no longer answers after {name!r}, where this rank saw: {seen}"
            ) from error
        failures = {rank: seen for rank, (seen, _) in enumerate(everybody) if seen is not None}
        return Property(name, failures)

    def _raise_faults(self) -> None:
        """Raise what kernels found: their results were wrong, and the next call would be blamed."""
        for buffer in self._buffers.values():
            if buffer.device.type == "cuda":
                torch.cuda.synchronize(buffer.device)
            buffer.check()

    @functools.cached_property
    def places(self) -> list[str]:
        """Host and device of each rank."""
        return self.gather(f"{platform.node()} {self.buffer().device}")

    def close(self) -> None:
        """Destroy the Buffers, once no rank is in a call."""
        if self._buffers and self.num_ranks > 1:
            dist.barrier(self._group)
        for buffer in self._buffers.values():
            buffer.destroy()
        self._buffers.clear()
