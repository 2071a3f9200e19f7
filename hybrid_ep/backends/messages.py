"""Point-to-point messages between ranks, with a deadline that names the peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.errors import PeerError
from hybrid_ep.topology import Topology


@dataclass
class Exchange:
    """Point-to-point messages of equal meaning between all ranks: one list of tensors a peer."""

    group: Any
    topology: Topology
    timeout: timedelta
    staged: bool  # gloo cannot send from a GPU: go through host memory
    failure: PeerError | None = None

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
        work: list[tuple[int, dist.Work]] = []
        keep: list[Tensor] = []  # isend does not hold its tensor
        landed: list[tuple[Tensor, Tensor]] = []
        try:
            operations = []
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
                        keep.append(buffer)
                        operations.append((dist.isend, buffer, target))
            work = self._start(operations)
            for peer, request in work:
                self._wait(request, peer, phase, call)
        except PeerError as error:
            self.failure = error
            raise
        if self.staged:
            for tensor, buffer in landed:
                tensor.copy_(buffer)

    def _start(self, operations: list[tuple[Any, Tensor, int]]) -> list[tuple[int, dist.Work]]:
        peers = [peer for _, _, peer in operations]
        to_global = self._global_rank
        if dist.get_backend(self.group) == "nccl" and operations:
            batch = [dist.P2POp(op, t, to_global(p), self.group) for op, t, p in operations]
            requests = dist.batch_isend_irecv(batch)
            return [(peers[0], request) for request in requests]
        return [(p, op(t, to_global(p), group=self.group)) for op, t, p in operations]

    def _global_rank(self, peer: int) -> int:
        return dist.get_global_rank(self.group, peer)

    def _wait(self, request: dist.Work, peer: int, phase: str, call: int) -> None:
        try:
            if dist.get_backend(self.group) == "nccl":
                request.wait()  # orders the stream; NCCL's watchdog keeps the deadline
            else:
                request.wait(self.timeout)
        except RuntimeError as error:
            raise PeerError(
                rank=self.topology.rank,
                peer=peer,
                phase=phase,
                call=call,
                reason=f"nothing came within {self.timeout.total_seconds():g} s or the connection "
                f"closed ({str(error).splitlines()[0]})",
            ) from error
