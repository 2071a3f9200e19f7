"""The number of experts per token, K: a Buffer needs it, and a routing map does not tell it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from hybrid_ep.backends import endings
from hybrid_ep.errors import TooManyExperts
from hybrid_ep.group import Group
from hybrid_ep.integrations.deep_ep import settings
from hybrid_ep.shape import MAX_TOPK

_log = logging.getLogger("hybrid_ep.integrations")


class TopK:
    """K for maps with E experts: as configured, or learnt from the first map with so many.

    A map with more experts for some token is an error of the dispatch, on all ranks; it holds no
    state here, so calls on several streams do not meet.

    Args:
        group: of the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._known: dict[int, tuple[int, str]] = {}  # by E: K, and where it is from

    def for_map(self, routing_map: Tensor) -> int:
        """K; collective until it is known."""
        num_experts = routing_map.shape[1]
        if num_experts in self._known:
            return self._known[num_experts][0]
        configured = settings.current().topk
        if configured is not None:
            topk = min(configured, num_experts)
            self._known[num_experts] = topk, "as configured"
            return topk
        endings.refuse_in_capture("made")  # which it is next
        self._group.device = routing_map.device
        mine = int(routing_map.sum(dim=1).amax()) if len(routing_map) else 0
        most = max(self._group.gather(mine))
        # capacity may have dropped experts of the first tokens: the next power of two has room
        topk = min(1 << max(most - 1, 0).bit_length(), num_experts)
        if most > 0:  # nothing was learnt of tokens that go nowhere
            source = "learnt from the first routing map"
            self._known[num_experts] = topk, source
            _log.info("topk is %d, %s of %d experts", topk, source, num_experts)
        return topk

    def explaining(self, num_experts: int) -> AbstractContextManager[None]:
        """Around calls of a Buffer, which may raise what an earlier one left behind.

        Raises:
            ValueError: a token has more than K experts; the text says how to set K.
        """
        known = self._known.get(num_experts)
        return nullcontext() if known is None else _explaining(*known)


@contextmanager
def _explaining(topk: int, source: str) -> Iterator[None]:
    try:
        yield
    except TooManyExperts as error:
        raise ValueError(
            f"a token has {error.experts} experts, more than topk={topk}, {source}: set it by "
            "hybrid_ep.integrations.deep_ep.configure(topk=...) or HYBRID_EP_TOPK, to at most "
            f"{MAX_TOPK} on GPUs. With padding to an expert's capacity a token may have any "
            f"number of experts. ({error})"
        ) from error
