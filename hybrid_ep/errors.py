"""The errors that a caller may want to catch by name."""

from __future__ import annotations

import functools
from typing import Any

GIVE_UP_REASONS = {
    1: "because it ran out of memory",
    2: "because it was interrupted",
    3: "because a call of its own failed",
    4: "because its topk_idx names an expert that does not exist",
}
"""What a rank may tell its peers when it cannot go on, by the word that travels."""


class UnknownExpert(ValueError):
    """``topk_idx`` named an expert that does not exist; raised on the rank whose it is."""


def give_up_reason(error: BaseException) -> int:
    """The word for an error, of ``GIVE_UP_REASONS``."""
    if isinstance(error, MemoryError) or "out of memory" in str(error):
        return 1
    if isinstance(error, UnknownExpert):
        return 4
    return 3 if isinstance(error, Exception) else 2


class SetupError(RuntimeError):
    """A backend cannot run here; raised on all ranks.

    The text says what is missing, and on which rank: commands print it without a traceback.
    """


class GroupError(RuntimeError):
    """Ranks of the group stopped answering; commands print the text without a traceback."""


class TooManyExperts(ValueError):
    """A token has more experts than top-k slots, on some rank; raised on all ranks.

    Attributes:
        rank: whose token it is; where several ranks have such tokens, one of them.
        experts: the most experts of a token of that rank.
    """

    MOST_TOLD = 1023  # by the kernels, csrc/layout/announcement.h

    def __init__(self, *, rank: int, experts: int, ends: bool) -> None:
        number = f"at least {experts:,}" if experts == self.MOST_TOLD else f"{experts:,}"
        super().__init__(
            f"a token of rank {rank} has {number} experts, more than its topk_idx has columns"
            + ("; this Buffer cannot be used any more" if ends else "")
        )
        self.rank, self.experts, self._ends = rank, experts, ends

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels between processes by pickle, whole."""
        told = {"rank": self.rank, "experts": self.experts, "ends": self._ends}
        return functools.partial(TooManyExperts, **told), ()


class PeerError(RuntimeError):
    """A rank waited for a peer that died, came too late, gave up, or made a different call.

    After it the buffer is unusable: every later call on it raises the same error again.

    Attributes:
        rank: the rank that waited.
        peer: the rank it waited for.
        phase: what it waited in: ``"route"``, ``"dispatch"`` or ``"combine"``.
        call: number of the call, counted from 1: among all calls on the Buffer on the torch
            backend, among those of its phase on nvlink.
        channel: whose flag did not come: a CUDA block's, in a dispatch that of 16 tokens, in a
            combine that of a token, across nodes also that of a slot of a window; None where the
            backend has no channels.
    """

    def __init__(
        self,
        *,
        rank: int,
        peer: int,
        phase: str,
        call: int,
        reason: str,
        channel: int | None = None,
    ) -> None:
        where = f"call {call}" if channel is None else f"call {call}, channel {channel}"
        super().__init__(f"rank {rank} waited for rank {peer} in {phase} ({where}): {reason}")
        self.rank = rank
        self.peer = peer
        self.phase = phase
        self.call = call
        self.channel = channel
        self._reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels between processes by pickle, whole."""
        told = {"rank": self.rank, "peer": self.peer, "phase": self.phase, "call": self.call}
        told |= {"reason": self._reason, "channel": self.channel}
        return functools.partial(PeerError, **told), ()
