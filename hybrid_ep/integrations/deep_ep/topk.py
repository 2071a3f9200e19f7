"""The number of experts per token, K: a Buffer needs it, and a routing map does not tell it."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.backends import endings
from hybrid_ep.group import Group
from hybrid_ep.integrations.deep_ep import settings
from hybrid_ep.shape import MAX_TOPK

_log = logging.getLogger("hybrid_ep.integrations")


class TopK:
    """K for maps with one number of experts, E: as configured, or learnt from the first map.

    A map with more experts for some token is an error. On the CPU all ranks find it in that call,
    before anything is sent. On a GPU that would make the host wait for each map. There a rank finds
    it when the number is on the host anyway: at the end of a call in blocking mode, else in a later
    call. Until then experts beyond the first K of a token are left out.

    Args:
        group: of the ranks.
        num_experts: E.
    """

    def __init__(self, group: Group, num_experts: int) -> None:
        self._group, self._num_experts = group, num_experts
        configured = settings.current().topk
        self._topk = None if configured is None else min(configured, num_experts)
        self._source = "as configured"
        self._most: Tensor | None = None  # of all maps so far, int32 [1] on the device
        self._on_host: Tensor | None = None  # what was copied of it last
        self._copied: torch.cuda.Event | None = None

    def for_map(self, routing_map: Tensor) -> int:
        """K; collective until it is known."""
        if self._topk is not None:
            return self._topk
        endings.refuse_in_capture("made")  # which it is next
        self._group.device = routing_map.device
        mine = int(routing_map.sum(dim=1).amax()) if len(routing_map) else 0
        most = max(self._group.gather(mine))
        # capacity may have dropped experts of the first tokens: the next power of two has room
        topk = min(1 << max(most - 1, 0).bit_length(), self._num_experts)
        if most > 0:  # nothing was learnt of tokens that go nowhere
            self._topk, self._source = topk, "learnt from the first routing map"
            _log.info("topk is %d, %s of %d experts", topk, self._source, self._num_experts)
        return topk

    def refuse_more(self, most: Tensor, topk: int) -> None:
        """Raise for more than K experts, on all ranks; on a GPU only take note of them."""
        if most.device.type == "cpu":
            most = most.view(1)
            if self._group.num_ranks > 1:
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group.process_group)
            self._raise_beyond(int(most), topk)
            return
        self._raise_if_known(topk)
        capturing = endings.is_capturing()
        if self._most is None:
            if capturing:  # its memory would be the graph's
                return
            self._most = torch.zeros(1, dtype=torch.int32, device=most.device)
            self._on_host = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        torch.maximum(self._most, most, out=self._most)
        if self._copied is None and not capturing:
            self._on_host.copy_(self._most, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def settle(self) -> None:
        """Raise for what is known by now; called where the host has waited."""
        if self._topk is not None:
            self._raise_if_known(self._topk)

    def _raise_if_known(self, topk: int) -> None:
        if self._copied is None or endings.is_capturing() or not self._copied.query():
            return
        self._copied = None
        self._raise_beyond(int(self._on_host), topk)

    def _raise_beyond(self, most: int, topk: int) -> None:
        if most > topk:
            raise ValueError(
                f"a token has {most} experts, more than topk={topk}, {self._source}: set it by "
                "hybrid_ep.integrations.deep_ep.configure(topk=...) or HYBRID_EP_TOPK, to at most "
                f"{MAX_TOPK} on GPUs. With padding to an expert's capacity a token may have any "
                "number of experts"
            )
