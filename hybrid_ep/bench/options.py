"""What the bench is asked to measure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hybrid_ep.buffer import BACKENDS
from hybrid_ep.limits import num_scales_of

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
BASELINES = ("all_to_all", "nccl", "gloo")
SIZINGS = ("exact", "max_rows")
SWEEPS = {  # sizes that a sweep by name stands for
    "tokens": {"tokens": (1024, 2048, 4096, 8192, 16384, 32768), "experts": (16,), "sms": (48,)},
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure: the product of the lists.

    Attributes:
        backends: names as of Buffer.
        tokens: T of every rank.
        hidden: H.
        experts: E, over all ranks.
        topk: K.
        dtypes: keys of ``DTYPES``; fp8 rows travel with scales, and are dispatched only: what comes
            home is bf16.
        skew: 0 for uniform routing, else expert e (in shuffled order) is chosen by a Zipf law with
            this exponent.
        sms: values of all three ``Config.num_sms_*``; the torch backend uses none of them.
        sizings: of ``SIZINGS``.
        align: rows of an expert are padded to a multiple of it.
        weighted: combine sums with weights.
        backward: also time the gradients.
        iters: measured iterations.
        warmup: iterations before them.
    """

    backends: tuple[str, ...] = ("auto",)
    tokens: tuple[int, ...] = (4096,)
    hidden: tuple[int, ...] = (1024,)
    experts: tuple[int, ...] = (256,)
    topk: tuple[int, ...] = (8,)
    dtypes: tuple[str, ...] = ("bf16",)
    skew: tuple[float, ...] = (0.0,)
    sms: tuple[int, ...] = (32,)
    sizings: tuple[str, ...] = SIZINGS
    align: int = 1
    weighted: bool = False
    backward: bool = True
    iters: int = 20
    warmup: int = 5

    def check(self, num_ranks: int) -> None:
        """Raise ValueError where an option breaks a rule, before any rank is started."""
        for name, values, known in (
            ("backend", self.backends, BACKENDS),
            ("dtype", self.dtypes, tuple(DTYPES)),
            ("sizing", self.sizings, SIZINGS),
        ):
            for value in values:
                if value not in known:
                    raise ValueError(f"--{name} must be one of {', '.join(known)}, got {value!r}")
        for name in ("tokens", "hidden", "experts", "topk", "sms"):
            if min(getattr(self, name)) < 1:
                raise ValueError(f"--{name} must be at least 1, got {min(getattr(self, name))}")
        if min(self.skew) < 0:
            raise ValueError(f"--skew must not be negative, got {min(self.skew)}")
        for experts in self.experts:
            if experts % num_ranks:
                raise ValueError(
                    f"--experts must be divisible by the {num_ranks} ranks, got {experts}"
                )
        if max(self.topk) > min(self.experts):
            raise ValueError(
                f"--topk must be at most --experts {min(self.experts)}, got {max(self.topk)}"
            )
        for hidden, dtype in itertools.product(self.hidden, self.dtypes):
            if hidden * DTYPES[dtype].itemsize % 16:
                raise ValueError(
                    f"rows must be a multiple of 16 bytes, got --hidden {hidden} --dtype {dtype}"
                )
        for name, least in (("iters", 1), ("align", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}, got {getattr(self, name)}")

    def shapes(self) -> Iterator[Shape]:
        """Every combination of the sizes."""
        lists = (self.tokens, self.hidden, self.experts, self.topk, self.dtypes, self.skew)
        for values in itertools.product(*lists):
            yield Shape(*values)


def gpu_sweeps(options: Options) -> tuple[Options, ...]:
    """What is measured on GPUs unless sizes are named: meant for under a minute on two H200.

    The sizes are those of docs/performance.md and of the published figures of others.
    """
    sizes = replace(options, tokens=(4096,), hidden=(7168,), topk=(8,))
    return (
        replace(sizes, experts=(16, 256), dtypes=("bf16",), sms=(16, 32, 48)),
        replace(sizes, experts=(16,), dtypes=("fp8",), sms=(48,)),
    )


@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    tokens: int
    hidden: int
    experts: int
    topk: int
    dtype: str
    skew: float = 0.0

    @property
    def num_scales(self) -> int:
        """Scales of a token."""
        return num_scales_of(self.dtype, self.hidden)

    @property
    def dispatch_bytes(self) -> int:
        """Payload of a copy on its way out, scales included."""
        return self.hidden * DTYPES[self.dtype].itemsize + 4 * self.num_scales

    @property
    def combine_dtype(self) -> torch.dtype:
        """Dtype of the rows that come home."""
        return torch.bfloat16 if self.dtype == "fp8" else DTYPES[self.dtype]

    @property
    def combine_bytes(self) -> int:
        """Payload of a copy on its way home."""
        return self.hidden * self.combine_dtype.itemsize
