"""The Buffers behind one HybridEPBuffer: one for each kind of call, larger ones in their place."""

from __future__ import annotations

import logging
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

import hybrid_ep
from hybrid_ep.backends import endings
from hybrid_ep.group import Group
from hybrid_ep.integers import round_up

_STEP = 64  # tokens: frameworks pad to it too
_log = logging.getLogger("hybrid_ep.integrations")
_captured: list[hybrid_ep.Buffer] = []  # Buffers that CUDA graphs call


class Kind(NamedTuple):
    """What two calls must have in common to share a Buffer; equal on all ranks but the device."""

    device: torch.device
    hidden: int
    num_experts: int
    dtype: torch.dtype
    scale_bytes: int = 0


class Buffers:
    """See the module.

    A Buffer is made by the first call of its kind, and anew by a call with more tokens or more
    experts per token. That is a step of all ranks together, so it must be one for all of them. An
    old Buffer lives on in its handles. When the last one is gone it gives its memory back, at a
    moment when no CUDA graph is captured. One that was called in a capture is kept: the graph
    has its addresses.

    Args:
        group: of the ranks.
        ranks_per_node: as of ``hybrid_ep.Buffer``.
        config: likewise.
        max_tokens: most tokens that a rank of the group has asked for.
        bound: whether no call may have more, as the user has said.
    """

    def __init__(
        self,
        group: Group,
        ranks_per_node: int | None,
        config: hybrid_ep.Config,
        max_tokens: int,
        *,
        bound: bool,
    ) -> None:
        self._group, self._ranks_per_node, self._config = group, ranks_per_node, config
        self.max_tokens, self._bound = max_tokens, bound
        self._by_kind: dict[Kind, hybrid_ep.Buffer] = {}
        self._twins: WeakKeyDictionary[hybrid_ep.Buffer, dict[int, hybrid_ep.Buffer]]
        self._twins = WeakKeyDictionary()

    def of(self, kind: Kind, num_tokens: int, topk: int) -> hybrid_ep.Buffer:
        """A Buffer for so many tokens with so many experts; collective where it must be made.

        Raises:
            ValueError: there are more tokens than the user has said.
        """
        if self._bound and num_tokens > self.max_tokens:
            raise ValueError(
                f"a call must have at most the configured max_tokens={self.max_tokens} tokens, got "
                f"{num_tokens}"
            )
        buffer = self._by_kind.get(kind)
        if buffer is None or buffer.max_tokens < num_tokens or buffer.topk < topk:
            buffer = self._by_kind[kind] = self._make_for(kind, num_tokens, topk, buffer)
        self.keep_if_captured(buffer)
        return buffer

    def keep_if_captured(self, buffer: hybrid_ep.Buffer) -> None:
        """Keep a Buffer that is called in a capture: the graph has its addresses.

        Until the process ends: the graph may outlive whoever made the Buffer.
        """
        if buffer.device.type == "cuda" and endings.is_capturing():
            if not any(buffer is each for each in _captured):
                _captured.append(buffer)

    def twin(self, buffer: hybrid_ep.Buffer, hidden: int) -> hybrid_ep.Buffer:
        """A Buffer that takes the layouts of another one, for rows of float32; collective."""
        twins = self._twins.setdefault(buffer, {})
        if hidden not in twins:
            kind = Kind(buffer.device, hidden, buffer.num_experts, torch.float32)
            twins[hidden] = self._make(kind, max_tokens=buffer.max_tokens, topk=buffer.topk)
        return twins[hidden]

    def _make_for(
        self, kind: Kind, num_tokens: int, topk: int, before: hybrid_ep.Buffer | None
    ) -> hybrid_ep.Buffer:
        endings.refuse_in_capture("made")
        self._group.device = kind.device
        if not self._bound:
            most = max(self.max_tokens, *self._group.gather(num_tokens))
            self.max_tokens = round_up(most, _STEP)
        if before is not None:
            topk = max(topk, before.topk)
            sizes = self.max_tokens, topk, before.max_tokens, before.topk
            _log.info(
                "a Buffer for %d tokens of top-%d takes the place of one for %d of top-%d", *sizes
            )
        return self._make(kind, max_tokens=self.max_tokens, topk=topk)

    def _make(self, kind: Kind, *, max_tokens: int, topk: int) -> hybrid_ep.Buffer:
        return hybrid_ep.Buffer(
            self._group.process_group,
            hidden=kind.hidden,
            num_experts=kind.num_experts,
            dtype=kind.dtype,
            scale_bytes=kind.scale_bytes,
            device=kind.device,
            ranks_per_node=self._ranks_per_node,
            config=self._config,
            max_tokens=max_tokens,
            topk=topk,
        )
