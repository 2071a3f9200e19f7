"""What the bench of overlap is asked to measure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_ep.backends.choose import BACKENDS
from hybrid_ep.bench.options import Load, check_known, check_least
from hybrid_ep.shape import DTYPES

PRODUCT_SMS = ("all", "rest")


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """What to measure: the product of the lists.

    Attributes:
        backends: names as of Buffer.
        tokens: T of every rank.
        hidden: H.
        experts: E, over all ranks.
        topk: K.
        sms: ``num_sms`` of dispatch and combine.
        gemm: M, K and N of one product, bf16.
        gemms: products in the stream.
        product_sms: of ``PRODUCT_SMS``.
        iters: measured iterations.
        warmup: iterations before them.
    """

    backends: tuple[str, ...] = ("auto",)
    tokens: tuple[int, ...] = (4096,)
    hidden: tuple[int, ...] = (7168,)
    experts: tuple[int, ...] = (64,)
    topk: tuple[int, ...] = (8,)
    sms: tuple[int, ...] = (8, 16, 24, 32, 48)
    gemm: tuple[int, int, int] = (4096, 7168, 4096)
    gemms: int = 8
    product_sms: tuple[str, ...] = PRODUCT_SMS
    iters: int = 20
    warmup: int = 5

    def check(self, num_ranks: int) -> None:
        """Raise ValueError where an option breaks a rule, before any rank is started."""
        check_known("backend", self.backends, BACKENDS)
        for load in self.loads(num_ranks):
            load.refuse_unaligned()
        check_least("sms", min(self.sms), 1)
        check_least("gemm", min(self.gemm), 1)
        check_least("gemms", self.gemms, 1)
        check_least("iters", self.iters, 1)
        check_least("warmup", self.warmup, 0)

    def check_device(self, total_sms: int) -> None:
        """Raise ValueError where communication would take every SM of the GPU."""
        if max(self.sms) >= total_sms:
            raise ValueError(
                f"--sms must be below the {total_sms} SMs of this GPU with --overlap, got "
                f"{max(self.sms)}: no SM would be left for the products"
            )

    def loads(self, num_ranks: int) -> Iterator[Load]:
        """Every combination of the sizes; ValueError for one that breaks a rule."""
        sizes = itertools.product(self.tokens, self.hidden, self.experts, self.topk)
        for tokens, hidden, experts, topk in sizes:
            yield Load(
                num_ranks=num_ranks,
                num_experts=experts,
                max_tokens=tokens,
                hidden=hidden,
                topk=topk,
                dtype=DTYPES["bf16"],
            )
