"""What the bench of a layer is asked to measure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_ep.bench.options import SIZINGS, Load, Timing, check_known, check_least
from hybrid_ep.moe import WEIGHT_PLACES
from hybrid_ep.shape import DTYPES


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer.

    Attributes:
        name: of ``SHAPES``, or ``"custom"``.
        tokens: T of every rank.
        hidden: H.
        ffn_hidden: F.
        experts: E, over all ranks.
        topk: K.
        dtype: key of ``DTYPES``, of tokens and of the experts' weights.
    """

    name: str
    tokens: int
    hidden: int
    ffn_hidden: int
    experts: int
    topk: int
    dtype: str

    def on(self, num_ranks: int) -> Load:
        """The sizes of its calls; ValueError where one breaks a rule."""
        return Load(
            num_ranks=num_ranks,
            num_experts=self.experts,
            max_tokens=self.tokens,
            hidden=self.hidden,
            topk=self.topk,
            dtype=DTYPES[self.dtype],
        )

    @property
    def product_flops(self) -> int:
        """Of one expert's matrix over the rows of a rank: 2 M H F, with the mean rank's M."""
        return 2 * self.tokens * self.topk * self.hidden * self.ffn_hidden

    def flops(self, pass_name: str) -> int:
        """Of the experts' products on one rank; three matrices, twice as many in the backward."""
        times = {"forward": 3, "backward": 6, "step": 9}[pass_name]
        return times * self.product_flops


@dataclass(frozen=True)
class NamedShape:
    """The MoE layer of a published model: H, F, experts of all layers' ranks, K."""

    hidden: int
    ffn_hidden: int
    experts: int
    topk: int

    def on(self, name: str, num_ranks: int, tokens: int, dtype: str) -> LayerShape:
        """With as many experts per rank as on 8 ranks, and K of at most all experts."""
        experts = self.experts // _NAMED_RANKS * num_ranks
        topk = min(self.topk, experts)
        return LayerShape(name, tokens, self.hidden, self.ffn_hidden, experts, topk, dtype)


_NAMED_RANKS = 8
SHAPES = {
    "deepseek-v3": NamedShape(7168, 2048, 256, 8),
    "qwen3-235b": NamedShape(4096, 1536, 128, 8),
    "qwen3-30b": NamedShape(2048, 768, 128, 8),
    "mixtral": NamedShape(4096, 14336, 8, 2),
}


@dataclass(frozen=True, kw_only=True)
class LayerOptions(Timing):
    """What to measure: the product of the lists.

    Attributes:
        shapes: sizes.
        sizings: of ``SIZINGS``.
        weight_at: of ``WEIGHT_PLACES``; holds for plain torch too.
        backward: also time backward and step.
    """

    shapes: tuple[LayerShape, ...]
    sizings: tuple[str, ...] = SIZINGS
    weight_at: str = "combine"
    backward: bool = True

    def check(self, num_ranks: int) -> None:
        """Raise ValueError where an option breaks a rule, before any rank is started."""
        super().check(num_ranks)
        check_known("sizing", self.sizings, SIZINGS)
        check_known("weight-at", (self.weight_at,), WEIGHT_PLACES)
        check_known("dtype", [shape.dtype for shape in self.shapes], ("bf16", "fp16", "fp32"))
        for shape in self.shapes:
            shape.on(num_ranks).refuse_unaligned()
            check_least("ffn", shape.ffn_hidden, 1)


def shapes_of(
    tokens: tuple[int, ...],
    hidden: tuple[int, ...],
    ffn_hidden: tuple[int, ...],
    experts: tuple[int, ...],
    topk: tuple[int, ...],
    dtypes: tuple[str, ...],
) -> Iterator[LayerShape]:
    """Every combination of the sizes."""
    for sizes in itertools.product(tokens, hidden, ffn_hidden, experts, topk, dtypes):
        yield LayerShape("custom", *sizes)
