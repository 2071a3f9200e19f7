"""What ranks send each other in the torch backend, with a deadline that names the peer.

A call of a verb is ``begin()``, any number of exchanges, and ``settle()`` after the last one. It
starts with ``tell``: short tables by which the ranks make sure that they make the same call. Rows
follow, ``pick`` and ``send``.

    Messages       point to point, over gloo and what else knows tags
    Collectives    over NCCL (collectives.py)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.backends.torch.tensors import empty
from hybrid_ep.errors import PeerError
from hybrid_ep.group import Group

# gloo takes 100 years, and of 500 it makes a deadline that has passed
LONGEST_S = timedelta(days=3650).total_seconds()
SHORTEST_S = 0.001  # gloo counts milliseconds, and takes 0 for the timeout of its group
_FIRST_TAG = 1 << 24  # above the tags that people choose, below the limit of any carrier

Operation = tuple[Any, Tensor, int]  # isend or irecv, what it sends or fills, the peer
Table = list[list[int]]  # a row for each rank


def tag_of(buffer: int) -> int:
    """The tag of a Buffer's messages: its own among the Buffers of a group."""
    return _FIRST_TAG + buffer % _FIRST_TAG


class Told(NamedTuple):
    """What I told each peer, and what each told me."""

    mine: Table
    theirs: Table


class Rows(NamedTuple):
    """Rows for the peers: of ``source`` those at ``index``, or all, ordered by peer."""

    source: Tensor
    index: Tensor | None = None


@dataclass
class Exchange(ABC):
    """The exchanges of a Buffer's calls, and what becomes of the Buffer if one fails.

    An error between the first and the last exchange of a call leaves messages that a later call
    would take for its own: ``stop()`` keeps the reason, and ``begin()`` raises it from then on.

    Attributes:
        timeout_s: seconds to wait for a peer; ``math.inf`` for no deadline.
        call: phase and number of the call that the next exchange is of.
        failure: why the Buffer cannot be used any more, None where it can.
    """

    group: Group
    timeout_s: float
    failure: RuntimeError | None = field(default=None, kw_only=True)
    call: tuple[str, int] = field(default=("", 0), kw_only=True)
    _half_way: tuple[str, int] | None = field(default=None, kw_only=True)  # between its exchanges

    def begin(self) -> None:
        """Raise what an earlier call left behind, if one did."""
        if self.failure is None and self._half_way is not None:  # not even stop() could end
            self.stop(None)
        if self.failure is not None:
            raise self.failure

    def open(self) -> None:
        """Peers may see something of the call from now on; an exchange does this by itself."""
        self._half_way = self.call

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
        self.failure = None

    @abstractmethod
    def tell(self, fields: list[int], counts: Tensor | None, num_counts: int) -> Any:
        """Start an exchange of equal tables between all ranks; ``hear`` ends it.

        Args:
            fields: what every peer is told.
            counts: int64 ``[R, num_counts]``, what each peer is told besides; None: zeros.
            num_counts: equal in all exchanges of a Buffer, as is the number of fields.
        """

    @abstractmethod
    def hear(self, told: Any) -> Told:
        """Wait for the peers' tables, on the host."""

    @abstractmethod
    def pick(self, source: Tensor, index: Tensor | None = None) -> Rows:
        """What ``send`` will send: rows of ``source [N, W]``, ordered by peer."""

    @abstractmethod
    def send(self, rows: Rows, send_counts: list[int], recv_counts: list[int]) -> Any:
        """Start to send so many rows to each rank, and to receive so many; ``receive`` ends it."""

    @abstractmethod
    def receive(self, sent: Any) -> Tensor:
        """The peers' rows, ``[sum(recv_counts), W]``, ordered by peer."""

    def lacks(self, peer: int, reason: str) -> PeerError:
        """The error of a call in which something of the peer is missing; it is kept."""
        phase, call = self._half_way
        self.failure = PeerError(
            rank=self.group.rank, peer=peer, phase=phase, call=call, reason=reason
        )
        return self.failure

    @contextmanager
    def blaming(self, peer: int, what: str) -> Iterator[None]:
        """An exchange with this peer fails in here: a PeerError that names it, and is kept."""
        try:
            yield
        except torch.OutOfMemoryError:  # a RuntimeError, and no peer's doing
            raise
        except RuntimeError as error:
            text = (str(error) or type(error).__name__).splitlines()[0]
            raise self.lacks(peer, f"{what} ({text})") from error

    def in_time(self) -> str:
        return "" if self.timeout_s >= LONGEST_S else f" within {self.timeout_s:g} s"


@dataclass
class Messages(Exchange):
    """Point-to-point messages; each exchange is over when the function that starts it returns.

    gloo keeps the deadline of each message, whether that of its group is longer or shorter. It
    cannot send from a GPU, so from there messages go through host memory.

    Attributes:
        tag: keeps these messages apart from all others of the group.
    """

    tag: int
    # after a failure both stay for the messages under way; requests use tensors and go first
    _requests: list[tuple[int, dist.Work]] = field(default_factory=list)
    _tensors: list[Tensor] = field(default_factory=list)

    def drop(self) -> None:
        self._requests, self._tensors = [], []
        super().drop()

    def tell(self, fields: list[int], counts: Tensor | None, num_counts: int) -> Told:
        ranks = self.group.num_ranks
        counts = [[0] * num_counts] * ranks if counts is None else counts.tolist()
        mine = [[*fields, *each] for each in counts]
        sent = torch.tensor(mine, dtype=torch.int64, device="cpu")
        got = sent.clone()
        self([[row] for row in sent], [[row] for row in got])
        return Told(mine, got.tolist())

    def hear(self, told: Told) -> Told:
        return told

    def pick(self, source: Tensor, index: Tensor | None = None) -> Rows:
        return Rows(source, index)

    def send(self, rows: Rows, send_counts: list[int], recv_counts: list[int]) -> Tensor:
        me, (source, index) = self.group.rank, rows
        if self.group.num_ranks == 1:
            return source if index is None else source.index_select(0, index)
        received = empty((sum(recv_counts), source.shape[1]), source)
        recvs = list(received.split(recv_counts))
        if index is None:
            sends = list(source.split(send_counts))
            recvs[me].copy_(sends[me])
        else:
            indices = index.split(send_counts)
            torch.index_select(source, 0, indices[me], out=recvs[me])
            sends = [
                source[:0] if peer == me else source.index_select(0, theirs)
                for peer, theirs in enumerate(indices)
            ]
        self([[rows] for rows in sends], [[rows] for rows in recvs])
        return received

    def receive(self, sent: Tensor) -> Tensor:
        return sent

    def gather(self, mine: Tensor) -> Tensor:
        """``mine [N, W]`` of each rank, ``[R * N, W]``."""
        me, ranks = self.group.rank, self.group.num_ranks
        everybody = mine.new_empty((ranks, *mine.shape))
        everybody[me].copy_(mine)
        self([[mine]] * ranks, [[theirs] for theirs in everybody])
        return everybody.flatten(0, 1)

    def __call__(
        self, sends: Sequence[Sequence[Tensor]], recvs: Sequence[Sequence[Tensor]]
    ) -> None:
        """Send ``sends[r]`` to rank r and fill ``recvs[r]`` from it; my own rank is left alone."""
        operations: list[Operation] = []
        landed: list[tuple[Tensor, Tensor]] = []
        for step in range(1, self.group.num_ranks):
            # rank r talks to r+1, r+2, ... so that no receiver gets everything at once
            source = (self.group.rank - step) % self.group.num_ranks
            target = (self.group.rank + step) % self.group.num_ranks
            for tensor in recvs[source]:
                if tensor.numel():
                    buffer = tensor
                    if tensor.device.type != "cpu":
                        buffer = torch.empty_like(tensor, device="cpu")
                        landed.append((tensor, buffer))
                    operations.append((dist.irecv, buffer, source))
            for tensor in sends[target]:
                if tensor.numel():
                    operations.append((dist.isend, tensor.cpu(), target))
        if not operations:
            return
        self._tensors = [tensor for _, tensor, _ in operations]
        self.open()
        for start, tensor, peer in operations:
            target = dist.get_global_rank(self.group.process_group, peer)
            with self.blaming(peer, "the connection is closed"):
                request = start(tensor, target, group=self.group.process_group, tag=self.tag)
            self._requests.append((peer, request))
        for peer, request in self._requests:
            with self.blaming(peer, f"nothing came{self.in_time()} or the connection closed"):
                request.wait(self._deadline())
        self._requests, self._tensors = [], []
        for tensor, buffer in landed:
            tensor.copy_(buffer)

    def _deadline(self) -> timedelta:
        return timedelta(seconds=min(max(self.timeout_s, SHORTEST_S), LONGEST_S))
