"""What the backends can carry; known without a GPU and without the extension."""

from __future__ import annotations

import operator
from typing import Any

import torch

MIN_CAPABILITY = (9, 0)  # Hopper: the kernels use TMA
ROW_ALIGN = 16  # bytes, of TMA
MAX_RANKS = 72  # kMaxRanks of csrc/layout/bytes.h: one NVLink domain
MAX_TOPK = 32  # kMaxTopk of csrc/layout/bytes.h: a lane per slot
MAX_NETWORK_RANKS = 1024  # of several nodes
MAX_NODE_RANKS = 32  # kMaxNodeRanks of csrc/layout/nodes_layout.h, of a node among several: a bit
MAX_CHUNK_TOKENS = 32  # kMaxChunkTokens there: a lane per token
MAX_EXPERTS = 2**15 - 1  # an expert travels as int16
MAX_LOCAL_EXPERTS = 2**13  # counted in the shared memory of a block
MAX_SCALE_BYTES = 2**14  # per token: they share a stage with a slice of the row
MAX_ROW_NUMBER = 2**31 - 1  # a row is numbered by an int32
MAX_ROWS = MAX_ROW_NUMBER // 2  # of tokens; as many are left to padding
MAX_SUMMED_BYTES = 2**36  # of the rows of a combine: kMostTermBytes of csrc/preconditions.h

VALUES_PER_SCALE = 128  # of fp8 rows as most recipes scale them, float32 each

MIN_QUEUE_DEPTH = 128  # of a queue pair, as NVSHMEM's IBGDA has it, in powers of two
MAX_QUEUE_DEPTH = 32768


def num_scales_of(dtype: str, hidden: int) -> int:
    """Scales per token where nobody says how many: one for each 128 values of fp8, else none.

    Args:
        dtype: of the payload, as the command line names it.
        hidden: values per token.
    """
    return -(-hidden // VALUES_PER_SCALE) if dtype == "fp8" else 0


def default_scale_bytes(dtype: str, hidden: int) -> int:
    """Bytes of those scales per token."""
    return 4 * num_scales_of(dtype, hidden)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def index_of(value: Any) -> int | None:
    """The integer that ``value`` is, of whatever integer type (numpy's, for example), else None.

    A bool is no integer here. Nor is a tensor: reading one could wait for a GPU.
    """
    if isinstance(value, (bool, torch.Tensor)):
        return None
    # a tuple of types: the compiler of torch 2.6 does not know what int | torch.SymInt is
    if isinstance(value, (int, torch.SymInt)):
        return value
    if getattr(getattr(value, "dtype", None), "kind", None) == "b":  # numpy's bool
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_integer(name: str, value: Any, least: int) -> int:
    """``index_of(value)``, for an argument.

    Args:
        name: of the argument.
        value: what was given.
        least: smallest value allowed.

    Raises:
        ValueError: the value is no integer or less than ``least``.
    """
    found = index_of(value)
    if found is None or found < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return found


def check_counts(**counts: int) -> None:
    """Refuse what is not a number of things, by its name.

    Raises:
        ValueError: a value is no integer or less than 1.
    """
    for name, value in counts.items():
        as_integer(name, value, 1)


def beyond(
    backend: str,
    *,
    num_nodes: int,
    ranks_per_node: int,
    max_tokens: int,
    topk: int,
    num_experts: int,
    row_bytes: int,
    scale_bytes: int,
) -> list[str]:
    """The limits of a backend that a shape exceeds, a clause each.

    Args:
        backend: ``"nvlink"`` or ``"nvshmem"``.
        num_nodes: nodes of the group.
        ranks_per_node: ranks that reach each other's memory.
        max_tokens: T.
        topk: K.
        num_experts: E, over all ranks.
        row_bytes: bytes of a row of the widest payload, without scales.
        scale_bytes: bytes of scales per token.

    Returns:
        list[str]: rule and value of each; empty where the shape fits.
    """
    num_ranks = num_nodes * ranks_per_node
    exceeded = []
    if backend == "nvlink":
        if num_nodes > 1:
            exceeded.append(f"it serves one node, the ranks are on {num_nodes}")
        ranks = {"the number of ranks": (ranks_per_node, MAX_RANKS)}
    else:
        ranks = {
            "the number of ranks": (num_ranks, MAX_NETWORK_RANKS),
            "ranks_per_node": (ranks_per_node, MAX_NODE_RANKS),
        }
    if row_bytes % ROW_ALIGN:
        exceeded.append(f"rows must be a multiple of {ROW_ALIGN} bytes, got {row_bytes}")
    most = {
        **ranks,
        "topk": (topk, MAX_TOPK),
        "num_experts": (num_experts, MAX_EXPERTS),
        "experts of a rank": (num_experts // num_ranks, MAX_LOCAL_EXPERTS),
        "scale_bytes": (scale_bytes, MAX_SCALE_BYTES),
        "ranks * max_tokens * topk": (num_ranks * max_tokens * topk, MAX_ROWS),
    }
    exceeded += [
        f"{name} must be at most {limit}, got {value}"
        for name, (value, limit) in most.items()
        if value > limit
    ]
    return exceeded
