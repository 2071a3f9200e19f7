"""What dispatch hands out, and what combine needs to find the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(eq=False, repr=False)  # not frozen: that would be two thirds of the time to make one
class Handle:
    """The layout of one dispatch: which token went to which row, and how it comes home.

    A handle owns its tensors, and nobody sets its attributes again. Any number may be alive, in any
    order of use; one may be used again for the backward passes and for a second forward. Dropping
    it never waits. Its tensors are ordinary ones, which autograd may save, also where dispatch was
    called under ``torch.inference_mode()``, so a layer in training may replay it.

    Attributes:
        layout: int32 ``[buffer.layout_size]``; the backend's own record, opaque to everybody else.
        counts: int32 ``[num_local_experts]``; rows of each local expert, without padding.
        offsets: int32 ``[num_local_experts + 1]``; first row of each expert's group, padding
            included, so ``offsets[1:]`` is what a grouped GEMM takes.
        num_tokens: T, the tokens this rank sent.
        num_rows: M, the rows this rank received.
        max_rows: the bound given to dispatch, None where M is exact.
    """

    layout: Tensor
    counts: Tensor
    offsets: Tensor
    # int32; its last words: required_rows, overflow, and padded_counts of 8 bytes each
    _sizes: Tensor
    num_tokens: int
    num_rows: int
    max_rows: int | None
    _host_offsets: Sequence[int] | None = None

    def __repr__(self) -> str:
        """The sizes that the host knows: to read a tensor would wait for the GPU."""
        return (
            f"Handle(num_tokens={self.num_tokens}, num_rows={self.num_rows}, "
            f"max_rows={self.max_rows}, num_local_experts={self.counts.shape[0]}, "
            f"device='{self.layout.device}')"
        )

    @property
    def required_rows(self) -> Tensor:
        """Int32 ``[]``; rows that nothing dropped would have needed, padding included."""
        return self._sizes[-2 - 2 * self.counts.shape[0]]

    @property
    def overflow_word(self) -> Tensor:
        """Int32 ``[1]`` on the device: 1 exactly when rows were dropped on this rank, else 0.

        ``overflow`` as a number, without a kernel. Memory of the handle: read it only.
        """
        at = 2 * self.counts.shape[0]
        return self._sizes[-1 - at : -at]

    @property
    def padded_counts(self) -> Tensor:
        """Int64 ``[num_local_experts]``; rows of each local expert, padding included.

        The differences of ``offsets``, without a kernel. Memory of the handle: read it only.
        """
        return self._sizes[-2 * self.counts.shape[0] :].view(torch.int64)

    @property
    def overflow(self) -> Tensor:
        """Bool ``[]`` on the device: true exactly when rows were dropped on this rank."""
        if self.max_rows is None:
            return torch.zeros_like(self.required_rows, dtype=torch.bool)
        return self.required_rows > self.max_rows

    @property
    def host_offsets(self) -> tuple[int, ...] | None:
        """``offsets`` as ints, where the host knows them without a wait; else None.

        It knows them on the CPU, and on a GPU where M is exact: they come with it. But not in
        ``torch.compile``, nor where something else watches ops, such as a dispatch mode.
        """
        if self._host_offsets is not None:
            return tuple(self._host_offsets)
        return tuple(self.offsets.tolist()) if self.offsets.device.type == "cpu" else None

    def outside_inference_mode(self) -> Handle:
        """The same handle with ordinary tensors in the same memory, which autograd may save."""
        with torch.inference_mode(False):
            tensors = (self.layout, self.counts, self.offsets, self._sizes)
            sizes = self.num_tokens, self.num_rows, self.max_rows, self._host_offsets
            return Handle(*map(_in_the_same_memory, tensors), *sizes)


class Dispatched(NamedTuple):
    """The expert-grouped rows of this rank.

    Attributes:
        rows: ``[M, hidden]``, dtype of x; grouped by local expert, inside an expert ordered by
            (source rank, source token). Padding rows and the tail are zero.
        weights: float32 ``[M]``, the token's weight for this row's expert, zero on padding; None
            where dispatch got no weights.
        scales: ``[M, S]``, dtype of the scales given; None where dispatch got none.
        counts: int32 ``[num_local_experts]``, see ``Handle.counts``.
        offsets: int32 ``[num_local_experts + 1]``, see ``Handle.offsets``.
        handle: for combine, and for replaying this layout.
    """

    rows: Tensor
    weights: Tensor | None
    scales: Tensor | None
    counts: Tensor
    offsets: Tensor
    handle: Handle


def _in_the_same_memory(tensor: Tensor) -> Tensor:
    """As a tensor of its own: no view, with a version of its own."""
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), *place)
