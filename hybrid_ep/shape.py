"""The sizes of a problem: what follows from them, their rules, and what the kernels can carry.

Every layer takes a ``Shape`` and not its numbers. A rule about sizes is stated here, once; the
command line puts it into the words of its options. Known without a GPU and without the extension.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from hybrid_ep.integers import as_integer, round_up

ROW_ALIGN = 16  # bytes, of TMA
MAX_RANKS = 72  # kMaxRanks of csrc/layout/bytes.h: one NVLink domain
MAX_TOPK = 32  # kMaxTopk of csrc/layout/bytes.h: a lane per top-k slot
MAX_NETWORK_RANKS = 1024  # of several nodes
MAX_NODE_RANKS = 32  # kMaxNodeRanks of csrc/layout/nodes_layout.h, of a node among several: a bit
MAX_EXPERTS = 2**15 - 1  # an expert travels as int16
MAX_LOCAL_EXPERTS = 2**13  # counted in the shared memory of a block
MAX_SCALE_BYTES = 2**14  # per token: they share a stage with a slice of the row
MAX_ROW_NUMBER = 2**31 - 1  # a row is numbered by an int32
MAX_ROWS = MAX_ROW_NUMBER // 2  # of tokens; as many are left to padding
MAX_SCALED_ROW_BYTES = 2**15  # two in a ring of csrc/layout/ring_shape.h, beside what scales them
MAX_SUMMED_BYTES = 2**36  # of the rows of a combine: kMostTermBytes of csrc/preconditions.h

VALUES_PER_SCALE = 128  # of fp8 rows as most recipes scale them, float32 each

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
"""Payloads by the names that commands have for them."""

SUM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Rows that the kernels add."""

_ALL_DTYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)
NUMBER_OF_DTYPE = {dtype: number for number, dtype in enumerate(_ALL_DTYPES, start=1)}
"""The same on all ranks, as they run the same torch; never 0, which stands for no tensor."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one group's calls, equal on all its ranks.

    Attributes:
        num_ranks: R, ranks of the group.
        ranks_per_node: ranks that reach each other's memory by load and store; None: all.
        max_tokens: most tokens that a rank dispatches in one call.
        hidden: H, elements of a token.
        num_experts: E, over all ranks; rank r owns experts ``[r * E / R, (r + 1) * E / R)``.
        topk: K, experts of a token.
        dtype: of the widest payload.
        scale_bytes: bytes of scales per token beside that payload.

    Sizes may be of any integer type (numpy's too) and are kept as ints.

    Raises:
        ValueError: a size breaks a rule; the text has the rule and the values.
        TypeError: ``dtype`` is no torch.dtype.
    """

    num_ranks: int
    ranks_per_node: int | None = None
    max_tokens: int
    hidden: int
    num_experts: int
    topk: int
    dtype: torch.dtype = torch.bfloat16
    scale_bytes: int = 0

    def __post_init__(self) -> None:
        if self.ranks_per_node is None:
            object.__setattr__(self, "ranks_per_node", self.num_ranks)
        for name in _SIZES:
            least = 0 if name == "scale_bytes" else 1
            object.__setattr__(self, name, as_integer(name, getattr(self, name), least))
        if self.num_ranks % self.ranks_per_node:
            raise ValueError(
                f"ranks_per_node must divide the number of ranks, got ranks_per_node="
                f"{self.ranks_per_node} with {self.num_ranks} ranks"
            )
        if self.num_experts % self.num_ranks:
            raise ValueError(
                f"num_experts must be divisible by the number of ranks, got num_experts="
                f"{self.num_experts} with {self.num_ranks} ranks"
            )
        if self.topk > self.num_experts:
            raise ValueError(
                f"topk must be at most num_experts={self.num_experts}, got {self.topk}"
            )
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype like torch.bfloat16, got {self.dtype!r}")

    @property
    def num_nodes(self) -> int:
        """Nodes of the group."""
        return self.num_ranks // self.ranks_per_node

    @property
    def num_local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.num_ranks

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of ``dtype``."""
        return self.hidden * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of such a row and its scales."""
        return self.row_bytes + self.scale_bytes

    @property
    def row_capacity(self) -> int:
        """Bytes that an outbox has for a row and its scales, each padded to 16."""
        return round_up(self.row_bytes, 16) + round_up(self.scale_bytes, 16)

    @property
    def record_bytes(self) -> int:
        """Bytes of a token in an outbox and on the wire: row, scales and weights."""
        return self.row_capacity + round_up(4 * self.topk, 16)

    @property
    def sum_bytes(self) -> int:
        """Bytes of a summed row: of ``dtype``, and at least two per value."""
        return self.hidden * max(2, self.dtype.itemsize)

    @property
    def inbox_row_bytes(self) -> int:
        """Bytes that an inbox has for a summed row, padded to 16."""
        return round_up(self.sum_bytes, 16)

    def two_way_dtypes(self, *, aligned: bool) -> tuple[torch.dtype, ...]:
        """Dtypes of rows that dispatch and combine both carry: each is the other's backward.

        Args:
            aligned: rows must be what the kernels move.
        """
        room = min(self.row_capacity, self.inbox_row_bytes)
        return tuple(
            dtype
            for dtype in SUM_DTYPES
            if self.hidden * dtype.itemsize <= room
            and not (aligned and unaligned(self.hidden, dtype))
        )

    def refuse_unaligned(self) -> None:
        """Raise ValueError where rows of ``dtype`` are not what the kernels move."""
        if text := unaligned(self.hidden, self.dtype):
            raise ValueError(text)

    def beyond(self, backend: str) -> list[str]:
        """The limits of ``"nvlink"`` or ``"nvshmem"`` that the shape exceeds, a clause each."""
        exceeded = []
        if backend == "nvlink":
            if self.num_nodes > 1:
                exceeded.append(f"it serves one node, the ranks are on {self.num_nodes}")
            ranks = {"the number of ranks": (self.ranks_per_node, MAX_RANKS)}
        else:
            ranks = {
                "the number of ranks": (self.num_ranks, MAX_NETWORK_RANKS),
                "ranks_per_node": (self.ranks_per_node, MAX_NODE_RANKS),
            }
        if text := unaligned(self.hidden, self.dtype):
            exceeded.append(text)
        most = {
            **ranks,
            "topk": (self.topk, MAX_TOPK),
            "num_experts": (self.num_experts, MAX_EXPERTS),
            "experts of a rank": (self.num_local_experts, MAX_LOCAL_EXPERTS),
            "scale_bytes": (self.scale_bytes, MAX_SCALE_BYTES),
            "ranks * max_tokens * topk": (self.num_ranks * self.max_tokens * self.topk, MAX_ROWS),
        }
        exceeded += [
            f"{name} must be at most {limit}, got {value}"
            for name, (value, limit) in most.items()
            if value > limit
        ]
        return exceeded


_SIZES = [field.name for field in fields(Shape) if field.name != "dtype"]


def unaligned(hidden: int, dtype: torch.dtype) -> str | None:
    """The rule that rows of ``hidden`` values break in the kernels, which copy 16 bytes at once."""
    row_bytes = hidden * dtype.itemsize
    if row_bytes % ROW_ALIGN == 0:
        return None
    return f"rows must be a multiple of {ROW_ALIGN} bytes, got {row_bytes} ({hidden=}, {dtype})"


def dtype_name(dtype: torch.dtype) -> str:
    """Of ``DTYPES``; another dtype has torch's name."""
    return next((name for name, each in DTYPES.items() if each == dtype), str(dtype))


def default_scale_bytes(dtype: torch.dtype, hidden: int) -> int:
    """Bytes of scales per token where nobody says: a float32 for each 128 values of fp8."""
    return 4 * -(-hidden // VALUES_PER_SCALE) if dtype == DTYPES["fp8"] else 0
