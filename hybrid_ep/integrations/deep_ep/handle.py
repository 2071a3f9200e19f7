"""What ``dispatch_with_permute`` returns last."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import hybrid_ep


class PermuteHandle(Sequence):
    """Stands for the tuple of DeepEP's handle, of which frameworks read a few items.

    Its length and order change between versions of DeepEP. In all of them the last item is the
    overflow flag, which Megatron-Core reads, and item 7 are the counts, which NeMo Automodel reads.
    Items that nobody reads are None.

    It holds its own Buffer: another may have taken its place between a forward and a backward.

    Attributes:
        buffer: of the dispatch.
        inner: the library's handle.
        topk_idx: ``[T, K]``, experts of this rank's tokens, none twice for a token.
    """

    _LENGTH, _COUNTS, _NUM_TOKENS, _OVERFLOW = 12, 7, 8, 11

    def __init__(self, buffer: hybrid_ep.Buffer, inner: hybrid_ep.Handle, topk_idx: Tensor) -> None:
        self.buffer, self.inner, self.topk_idx = buffer, inner, topk_idx

    def __len__(self) -> int:
        return self._LENGTH

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(self._LENGTH)))
        index = index + self._LENGTH if index < 0 else index
        if not 0 <= index < self._LENGTH:
            raise IndexError(f"a handle has {self._LENGTH} items, got index {index}")
        if index == self._OVERFLOW:  # int32 [1]: not zero where rows were dropped
            return self.inner.overflow_word
        return {self._COUNTS: self.inner.counts, self._NUM_TOKENS: self.inner.num_tokens}.get(index)

    def counts_on_host(self) -> Tensor:
        """Int64, rows of each local expert with padding.

        They have come with the number of rows. The host waits for them where it did not wait for
        that.
        """
        on_gpu = self.inner.offsets.device.type == "cuda"
        where = {"dtype": torch.int64, "device": "cpu", "pin_memory": on_gpu}
        offsets = self.inner.host_offsets
        if offsets is not None:
            return torch.tensor([end - begin for begin, end in pairwise(offsets)], **where)
        counts = self.inner.padded_counts
        pinned = torch.empty(counts.shape, **where)
        pinned.copy_(counts, non_blocking=True)
        torch.cuda.current_stream(counts.device).synchronize()
        self.buffer.check()  # or they are no counts
        return pinned
