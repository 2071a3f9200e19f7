"""What the bench of overlap is asked to measure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_ep.bench.options import Load, Options, Timing, check_least

PRODUCT_SMS = ("all", "rest")


@dataclass(frozen=True, kw_only=True)
class OverlapOptions(Timing):
    """What to measure: the product of the lists.

    Attributes:
        tokens: T of every rank.
        hidden: H.
        experts: E, over all ranks.
        topk: K.
        sms: ``num_sms`` of dispatch and combine.
        gemm: M, K and N of one product, bf16.
        gemms: products in the stream.
        product_sms: of ``PRODUCT_SMS``.
    """

    tokens: tuple[int, ...] = (4096,)
    hidden: tuple[int, ...] = (7168,)
    experts: tuple[int, ...] = (64,)
    topk: tuple[int, ...] = (8,)
    sms: tuple[int, ...] = (8, 16, 24, 32, 48)
    gemm: tuple[int, int, int] = (4096, 7168, 4096)
    gemms: int = 8
    product_sms: tuple[str, ...] = PRODUCT_SMS

    def check(self, num_ranks: int) -> None:
        """Raise ValueError where an option breaks a rule, before any rank is started."""
        super().check(num_ranks)
        for load in self.loads(num_ranks):
            load.refuse_unaligned()
        check_least("gemm", min(self.gemm), 1)
        check_least("gemms", self.gemms, 1)

    def check_device(self, total_sms: int) -> None:
        """Raise ValueError where communication would take every SM of the GPU."""
        if max(self.sms) >= total_sms:
            raise ValueError(
                f"--sms must be below the {total_sms} SMs of this GPU with --overlap, got "
                f"{max(self.sms)}: no SM would be left for the products"
            )

    def loads(self, num_ranks: int) -> Iterator[Load]:
        """Every combination of the sizes; ValueError for one that breaks a rule."""
        sizes = {name: getattr(self, name) for name in ("tokens", "hidden", "experts", "topk")}
        return Options(**sizes).loads(num_ranks)
