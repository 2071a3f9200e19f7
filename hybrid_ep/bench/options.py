"""What the bench is asked to measure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybrid_ep.backends.choose import BACKENDS
from hybrid_ep.shape import DTYPES, Shape, default_scale_bytes, dtype_name

BASELINES = ("all_to_all", "nccl", "gloo")
SIZINGS = ("exact", "max_rows")
SWEEPS = {  # sizes that a sweep by name stands for
    "tokens": {"tokens": (1024, 2048, 4096, 8192, 16384, 32768), "experts": (16,), "sms": (48,)},
}


def check_known(option: str, values: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError for a value of an option that is none of those known."""
    for value in values:
        if value not in known:
            raise ValueError(f"--{option} must be one of {', '.join(known)}, got {value!r}")


def check_least(option: str, value: float, least: int) -> None:
    """Raise ValueError for a value of an option that is too small, or no number."""
    if not value >= least:
        raise ValueError(f"--{option} must be at least {least}, got {value}")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What each bench is asked about how it measures.

    Attributes:
        backends: names as of Buffer.
        sms: numbers of SMs of all three phases; the torch backend uses none of them.
        iters: measured iterations.
        warmup: iterations before them.
    """

    backends: tuple[str, ...] = ("auto",)
    sms: tuple[int, ...] = (32,)
    iters: int = 20
    warmup: int = 5

    def check(self, num_ranks: int) -> None:
        """Raise ValueError where an option breaks a rule, before any rank is started."""
        check_known("backend", self.backends, BACKENDS)
        check_least("sms", min(self.sms), 1)
        check_least("iters", self.iters, 1)
        check_least("warmup", self.warmup, 0)


@dataclass(frozen=True, kw_only=True)
class Options(Timing):
    """What to measure: the product of the lists.

    Attributes:
        tokens: T of every rank.
        hidden: H.
        experts: E, over all ranks.
        topk: K.
        dtypes: keys of ``DTYPES``; fp8 rows travel with scales, and are dispatched only: what comes
            home is bf16.
        skew: 0 for uniform routing, else expert e (in shuffled order) is chosen by a Zipf law with
            this exponent.
        sizings: of ``SIZINGS``.
        align: rows of an expert are padded to a multiple of it.
        weighted: combine sums with weights.
        backward: also time the gradients.
    """

    tokens: tuple[int, ...] = (4096,)
    hidden: tuple[int, ...] = (1024,)
    experts: tuple[int, ...] = (256,)
    topk: tuple[int, ...] = (8,)
    dtypes: tuple[str, ...] = ("bf16",)
    skew: tuple[float, ...] = (0.0,)
    sizings: tuple[str, ...] = SIZINGS
    align: int = 1
    weighted: bool = False
    backward: bool = True

    def check(self, num_ranks: int) -> None:
        """Raise ValueError where an option breaks a rule, before any rank is started."""
        super().check(num_ranks)
        check_known("dtype", self.dtypes, DTYPES)
        check_known("sizing", self.sizings, SIZINGS)
        check_least("align", self.align, 1)
        if min(self.skew) < 0:
            raise ValueError(f"--skew must not be negative, got {min(self.skew)}")
        for load in self.loads(num_ranks):
            load.refuse_unaligned()

    def loads(self, num_ranks: int) -> Iterator[Load]:
        """Every combination of the sizes; ValueError for one that breaks a rule."""
        lists = (self.tokens, self.hidden, self.experts, self.topk, self.dtypes, self.skew)
        for tokens, hidden, experts, topk, dtype, skew in itertools.product(*lists):
            yield Load(
                num_ranks=num_ranks,
                num_experts=experts,
                max_tokens=tokens,
                hidden=hidden,
                topk=topk,
                dtype=DTYPES[dtype],
                scale_bytes=default_scale_bytes(DTYPES[dtype], hidden),
                skew=skew,
            )


def gpu_sweeps(options: Options) -> tuple[Options, ...]:
    """What is measured on GPUs unless sizes are named: meant for under a minute on two H200.

    The sizes are those of docs/performance.md and of the published figures of others.
    """
    sizes = replace(options, tokens=(4096,), hidden=(7168,), topk=(8,))
    return (
        replace(sizes, experts=(16, 256), dtypes=("bf16",), sms=(16, 32, 48)),
        replace(sizes, experts=(16,), dtypes=("fp8",), sms=(48,)),
    )


@dataclass(frozen=True, kw_only=True)
class Load(Shape):
    """Sizes of one call, in which every rank sends ``max_tokens``, and how experts are chosen.

    Attributes:
        skew: as of ``Options``.
    """

    skew: float = 0.0

    @property
    def is_fp8(self) -> bool:
        """Whether rows travel with scales, and are dispatched only."""
        return self.dtype == DTYPES["fp8"]

    @property
    def combine_dtype(self) -> torch.dtype:
        """Dtype of the rows that come home."""
        return torch.bfloat16 if self.is_fp8 else self.dtype

    def record(self) -> dict[str, Any]:
        """For JSON, by the names of the options."""
        return {
            "tokens": self.max_tokens,
            "hidden": self.hidden,
            "experts": self.num_experts,
            "topk": self.topk,
            "dtype": dtype_name(self.dtype),
            "skew": self.skew,
        }
