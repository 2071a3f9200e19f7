"""The two ways of moving tokens: dispatch and combine of hybrid_ep, or plain torch.

The rest of the model is the same for both. Weights of the top-k enter inside the experts, so that
combine is a plain sum in either way.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from examples.lm.options import Options
from hybrid_ep.bench.baselines import PlainTorch
from hybrid_ep.bench.layer.plain import PlainMoves


class Arrived(NamedTuple):
    """The result of a dispatch.

    Attributes:
        rows: ``[M, H]``, grouped by expert; None once they were computed.
        weights: float32 ``[M]``; None likewise.
        offsets: int32 ``[E_local + 1]``, first row of each expert.
        dropped: int32 ``[]``, rows beyond the bound; None where there is none.
        handle: for combine.
    """

    rows: Tensor | None
    weights: Tensor | None
    offsets: Tensor
    dropped: Tensor | None
    handle: Any

    def without_rows(self) -> Arrived:
        """The fields for combine and the log; they keep no rows alive."""
        return self._replace(rows=None, weights=None)


class Moves(Protocol):
    """A way of moving tokens.

    Attributes:
        host_waits: whether a dispatch holds the host until the GPU has routed.
    """

    host_waits: bool

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Arrived: ...

    def combine(self, rows: Tensor, arrived: Arrived) -> Tensor: ...

    def close(self) -> None: ...


class OnBuffer:
    """hybrid_ep, on a Buffer that all layers share."""

    def __init__(self, buffer: hybrid_ep.Buffer, max_rows: int | None, num_sms: int | None) -> None:
        self._buffer, self._max_rows, self._num_sms = buffer, max_rows, num_sms
        self.host_waits = max_rows is None

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Arrived:
        out = hybrid_ep.dispatch(
            self._buffer,
            x,
            topk_idx,
            topk_weights,
            max_rows=self._max_rows,
            num_sms=self._num_sms,
        )
        dropped = None
        if self._max_rows is not None:
            dropped = out.handle.required_rows - out.offsets[-1]
        return Arrived(out.rows, out.weights, out.offsets, dropped, out.handle)

    def combine(self, rows: Tensor, arrived: Arrived) -> Tensor:
        return hybrid_ep.combine(self._buffer, rows, arrived.handle, num_sms=self._num_sms)

    def close(self) -> None:
        self._buffer.destroy()


class InPlainTorch:
    """Sort and all_to_all_single: NCCL's on GPUs, gloo's on the CPU; made and closed by all ranks.

    The group is its own, with a communicator of its own: NCCL runs the collectives of one
    communicator one after the other, so on FSDP's group tokens and weights would wait for each
    other.
    """

    host_waits = True

    def __init__(self, buffer: hybrid_ep.Buffer) -> None:
        self._buffer, self.group = buffer, dist.new_group()
        self._moves = PlainMoves(PlainTorch(buffer.num_experts, self.group))

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Arrived:
        rows, weights, offsets, route = self._moves.dispatch(x, topk_idx, topk_weights)
        return Arrived(rows, weights, offsets, None, route)

    def combine(self, rows: Tensor, arrived: Arrived) -> Tensor:
        return self._moves.combine(rows, arrived.handle)

    def close(self) -> None:
        dist.destroy_process_group(self.group)
        self._buffer.destroy()


def make_buffer(options: Options, device: torch.device, dtype: torch.dtype) -> hybrid_ep.Buffer:
    """For all layers; *collective*. In plain torch it moves nothing and names the experts."""
    sizes = options.sizes
    return hybrid_ep.Buffer(
        hidden=sizes.hidden,
        num_experts=sizes.experts,
        max_tokens=_tokens_of_a_call(options),
        topk=sizes.topk,
        dtype=dtype,
        device=device,
        backend="torch" if options.way == "nccl" else options.backend,
    )


def make_moves(options: Options, buffer: hybrid_ep.Buffer) -> Moves:
    """Of the way that the options name; it destroys the Buffer when it is closed. *Collective*."""
    if options.way == "nccl":
        return InPlainTorch(buffer)
    max_rows = None
    if options.room is not None:  # even routing gives each rank as many rows as it has slots
        max_rows = math.ceil(options.room * _tokens_of_a_call(options) * options.sizes.topk)
    return OnBuffer(buffer, max_rows, options.num_sms)


def _tokens_of_a_call(options: Options) -> int:
    parts = 2 if options.overlap == "halves" else 1
    return options.sizes.micro_batch // parts * options.sizes.sequence
