"""Point-to-point messages between ranks, with a deadline that names the peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.errors import PeerError
from hybrid_ep.topology import Topology

# gloo takes 100 years, and of 500 it makes a deadline that has passed
LONGEST_S = timedelta(days=3650).total_seconds()
SHORTEST_S = 0.001  # gloo counts milliseconds, and takes 0 for the timeout of its group
_FIRST_TAG = 1 << 24  # above the tags that people choose, below the limit of any carrier

Operation = tuple[Any, Tensor, int]  # isend or irecv, what it sends or fills, the peer


def tag_of(buffer: int) -> int:
    """The tag of a Buffer's messages: its own among the Buffers of a group."""
    return _FIRST_TAG + buffer % _FIRST_TAG


@dataclass
class Exchange:
    """Point-to-point messages of equal meaning between all ranks: one list of tensors per peer.

    A call of a verb is ``begin()``, any number of exchanges, and ``settle()`` after the last one.
    An error between the first and the last leaves messages of this call that a later call would
    take for its own: ``stop()`` keeps the reason, and ``begin()`` raises it from then on.

    Attributes:
        timeout_s: seconds to wait for each message; ``math.inf`` for no deadline. gloo keeps it
            whatever the timeout of its group is, longer or shorter.
        staged: gloo cannot send from a GPU, so messages go through host memory.
        tag: keeps these messages apart from all others of the group. NCCL knows no tags.
        failure: why the Buffer cannot be used any more, None where it can.
    """

    group: Any
    topology: Topology
    timeout_s: float
    staged: bool
    tag: int
    failure: RuntimeError | None = None
    _half_way: tuple[str, int] | None = None  # phase and number of the call between its messages
    # after a failure both stay for the messages under way; requests use tensors and go first
    _requests: list[tuple[int, dist.Work]] = field(default_factory=list)
    _tensors: list[Tensor] = field(default_factory=list)

    def begin(self) -> None:
        """Raise what an earlier call left behind, if one did."""
        if self.failure is None and self._half_way is not None:  # not even stop() could end
            self.stop(None)
        if self.failure is not None:
            raise self.failure

    def open(self, phase: str, call: int) -> None:
        """Peers may see something of the call from now on; an exchange does this by itself."""
        self._half_way = phase, call

    def settle(self) -> None:
        """The last message of the call has come: whatever happens now, the ranks are in step."""
        self._half_way = None

    def stop(self, error: BaseException | None) -> None:
        """The call ends here, by ``error``: if it is half way, no other may follow."""
        if self._half_way is None or self.failure is not None:
            return
        phase, call = self._half_way
        cause = "an interrupt" if error is None else type(error).__name__
        if str(error or "").strip():
            cause += f" ({str(error).strip().splitlines()[0]})"
        failure = RuntimeError(
            f"an earlier call stopped between its messages, in {phase} (call {call}), because of "
            f"{cause}: this rank is no longer in step with its peers, so this Buffer cannot be "
            f"used any more; destroy() it on every rank"
        )
        failure.__cause__ = error
        self.failure = failure

    def drop(self) -> None:
        """Let go of what a failed exchange left under way, and of the frames of its error."""
        self._requests, self._tensors, self.failure = [], [], None

    def __call__(
        self,
        sends: Sequence[Sequence[Tensor]],
        recvs: Sequence[Sequence[Tensor]],
        *,
        phase: str,
        call: int,
    ) -> None:
        """Send ``sends[r]`` to rank r and fill ``recvs[r]`` from it; my own rank is left alone."""
        if self.topology.num_ranks == 1:
            return
        operations: list[Operation] = []
        landed: list[tuple[Tensor, Tensor]] = []
        for step in range(1, self.topology.num_ranks):
            # rank r talks to r+1, r+2, ... so that no receiver gets everything at once
            source = (self.topology.rank - step) % self.topology.num_ranks
            target = (self.topology.rank + step) % self.topology.num_ranks
            for tensor in recvs[source]:
                if tensor.numel():
                    buffer = torch.empty_like(tensor, device="cpu") if self.staged else tensor
                    landed.append((tensor, buffer))
                    operations.append((dist.irecv, buffer, source))
            for tensor in sends[target]:
                if tensor.numel():
                    buffer = tensor.cpu() if self.staged else tensor
                    operations.append((dist.isend, buffer, target))
        if not operations:
            return
        batched = dist.get_backend(self.group) == "nccl"
        self._tensors = [tensor for _, tensor, _ in operations]
        self.open(phase, call)
        (self._start_batch if batched else self._start_each)(operations)
        # over NCCL, wait() orders the stream and NCCL's watchdog keeps the deadline
        deadline = () if batched else (self._deadline(),)
        for peer, request in self._requests:
            with self._blaming(peer, f"nothing came{self._in_time()} or the connection closed"):
                request.wait(*deadline)
        self._requests, self._tensors = [], []
        if self.staged:
            for tensor, buffer in landed:
                tensor.copy_(buffer)

    def _start_each(self, operations: list[Operation]) -> None:
        for start, tensor, peer in operations:
            target = dist.get_global_rank(self.group, peer)
            with self._blaming(peer, "the connection is closed"):
                request = start(tensor, target, group=self.group, tag=self.tag)
            self._requests.append((peer, request))

    def _start_batch(self, operations: list[Operation]) -> None:
        batch = [
            dist.P2POp(start, tensor, dist.get_global_rank(self.group, peer), self.group)
            for start, tensor, peer in operations
        ]
        first = operations[0][2]  # NCCL does not say which one failed
        with self._blaming(first, "the messages with this or another peer could not be started"):
            self._requests = [(first, request) for request in dist.batch_isend_irecv(batch)]

    @contextmanager
    def _blaming(self, peer: int, what: str) -> Iterator[None]:
        """A message of this peer fails in here: a PeerError that names it, and is kept."""
        try:
            yield
        except torch.OutOfMemoryError:  # a RuntimeError, and no peer's doing
            raise
        except RuntimeError as error:
            phase, call = self._half_way
            self.failure = PeerError(
                rank=self.topology.rank,
                peer=peer,
                phase=phase,
                call=call,
                reason=f"{what} ({(str(error) or type(error).__name__).splitlines()[0]})",
            )
            raise self.failure from error

    def _deadline(self) -> timedelta:
        return timedelta(seconds=min(max(self.timeout_s, SHORTEST_S), LONGEST_S))

    def _in_time(self) -> str:
        return "" if self.timeout_s >= LONGEST_S else f" within {self.timeout_s:g} s"
