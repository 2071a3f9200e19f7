"""Integers as users give them, of whatever integer type, and rounding."""

from __future__ import annotations

import operator
from typing import Any

import torch


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
    """Raise ValueError for the first that is no integer or less than 1, by its name."""
    for name, value in counts.items():
        as_integer(name, value, 1)
