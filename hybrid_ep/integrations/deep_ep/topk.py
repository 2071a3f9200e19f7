"""The number of experts per token, K: a Buffer needs it, and a routing map does not tell it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from hybrid_ep.backends import endings
from hybrid_ep.errors import TooManyExperts
from hybrid_ep.group import Group
from hybrid_ep.integrations.deep_ep import settings
from hybrid_ep.shape import MAX_TOPK

_log = logging.getLogger("hybrid_ep.integrations")


class TopK:
    """K for maps with one number of experts, E: as configured, or learnt from the first map.

    A map with more experts for some token is an error of the dispatch, on all ranks; it holds no
    state here, so calls on several streams do not meet.

    Args:
        group: of the ranks.
        num_experts: E.
    """

    def __init__(self, group: Group, num_experts: int) -> None:
        self._group, self._num_experts = group, num_experts
        configured = settings.current().topk
        self._topk = None if configured is None else min(configured, num_experts)
        self._source = "as configured"

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

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Around calls that may raise for a token with more than K experts: says how to set K.

        Raises:
            ValueError: in the place of a TooManyExperts.
        """
        try:
            yield
        except TooManyExperts as error:
            raise ValueError(
                f"a token has {error.experts} experts, more than topk={self._topk}, "
                f"{self._source}: set it by "
                "hybrid_ep.integrations.deep_ep.configure(topk=...) or HYBRID_EP_TOPK, to at most "
                f"{MAX_TOPK} on GPUs. With padding to an expert's capacity a token may have any "
                f"number of experts. ({error})"
            ) from error
