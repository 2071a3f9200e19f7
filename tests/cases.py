"""The inputs that every backend must get right: a case is data with a name.

A case describes all ranks by rules, so that the same case runs on any number of them
(``case.on(8)``); the inputs of each rank come from a generator seeded with the case and the rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """One dispatch and its combine on all ranks.

    Attributes:
        name: the test's id; starts with the public report that it stems from, if it does.
        num_ranks: ranks where nothing else is asked for.
        tokens: T of each rank, dealt out to the ranks in turn.
        max_tokens: of the Buffer; None: the largest T.
        topk: K; None: all experts.
        routing: a function of this module named ``route_<routing>``.
        num_scales, scale_dtype: S and dtype of the scales; 0: none.
        weights: whether top-k weights are dispatched.
        max_rows: None (exact), or, from the rows that the fullest rank needs, ``"enough"``,
            ``"block_less"`` (one block of ``align`` rows), ``"third"``, ``"zero"``, ``"more"``.
        ranks_per_node: None: one node.
    """

    name: str
    num_ranks: int = 2
    tokens: tuple[int, ...] = (16, 13)
    max_tokens: int | None = None
    hidden: int = 32
    experts_per_rank: int = 4
    topk: int | None = 2
    topk_dtype: torch.dtype = torch.int64
    routing: str = "uniform"
    dtype: torch.dtype = torch.bfloat16
    num_scales: int = 0
    scale_dtype: torch.dtype = torch.float32
    weights: bool = True
    align: int = 1
    max_rows: str | None = None
    ranks_per_node: int | None = None
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def on(self, num_ranks: int, ranks_per_node: int | None = None) -> Case:
        """The same case on other ranks; on its own nodes, unless others are asked for."""
        ranks_per_node = ranks_per_node or self.ranks_per_node
        return replace(self, num_ranks=num_ranks, ranks_per_node=ranks_per_node)

    @property
    def num_experts(self) -> int:
        return self.experts_per_rank * self.num_ranks

    @property
    def num_slots(self) -> int:
        return self.num_experts if self.topk is None else self.topk

    @property
    def has_experts_enough(self) -> bool:
        """For K slots per token, which a Buffer wants."""
        return self.num_slots <= self.num_experts

    @property
    def has_gradients(self) -> bool:
        """Of x and of the weights."""
        return self.dtype.itemsize > 1 and self.weights

    @property
    def sum_dtype(self) -> torch.dtype:
        """What the experts return: the payload's dtype, or bf16 for one that cannot be summed."""
        return self.dtype if self.dtype.itemsize > 1 else torch.bfloat16

    def num_tokens(self, rank: int) -> int:
        return self.tokens[rank % len(self.tokens)]

    def sizes(self) -> dict[str, object]:
        """The Buffer's arguments."""
        return {
            "hidden": self.hidden,
            "num_experts": self.num_experts,
            "max_tokens": self.max_tokens or max(1, *self.tokens),
            "topk": self.num_slots,
            "dtype": self.dtype,
            "scale_bytes": self.num_scales * self.scale_dtype.itemsize,
            "ranks_per_node": self.ranks_per_node,
        }

    def generator(self, rank: int, purpose: str) -> torch.Generator:
        """Another stream of random numbers for each rank and purpose."""
        key = f"{self.seed} {rank} {purpose}".encode()
        return torch.Generator().manual_seed(zlib.crc32(key))

    def inputs(self, rank: int) -> Inputs:
        generator = self.generator(rank, "inputs")
        tokens, slots = self.num_tokens(rank), self.num_slots
        topk_idx = ROUTINGS[self.routing](self, tokens, generator)
        weights = torch.rand((tokens, slots), generator=generator)
        scales = None
        if self.num_scales:
            scales = random_bytes((tokens, self.num_scales), self.scale_dtype, generator)
        return Inputs(
            x=random_bytes((tokens, self.hidden), self.dtype, generator),
            topk_idx=topk_idx.to(self.topk_dtype),
            weights=weights if self.weights else None,
            scales=scales,
        )

    def all_inputs(self) -> list[Inputs]:
        return [self.inputs(rank) for rank in range(self.num_ranks)]

    def leaves(self, rank: int, device: torch.device, needs_grad: bool = True) -> Leaves:
        """Inputs on a device whose ``x`` can be summed; ``x`` and weights may want gradients."""
        inputs = self.inputs(rank)
        x = self.values(rank, "x", len(inputs.x))
        given = (x, inputs.topk_idx, inputs.weights, inputs.scales)
        leaves = Leaves(*(None if each is None else each.to(device) for each in given))
        for leaf in (leaves.x, leaves.weights):
            if leaf is not None:
                leaf.requires_grad_(needs_grad)
        return leaves

    def values(self, rank: int, purpose: str, rows: int) -> Tensor:
        """``[rows, hidden]`` of numbers that can be summed: experts' outputs, gradients."""
        shape = (rows, self.hidden)
        return torch.randn(shape, generator=self.generator(rank, purpose)).to(self.sum_dtype)


class Leaves(NamedTuple):
    """What one rank passes to dispatch in a step of training."""

    x: Tensor
    topk_idx: Tensor
    weights: Tensor | None
    scales: Tensor | None


@dataclass(frozen=True)
class Inputs:
    """What one rank passes to dispatch."""

    x: Tensor
    topk_idx: Tensor
    weights: Tensor | None = None
    scales: Tensor | None = None


def random_bytes(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bit pattern, NaN and infinity included: dispatch moves bytes and knows no dtype."""
    rows, columns = shape
    size = (rows, columns * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=generator).view(dtype)


# ---- routings: which experts a rank's tokens choose


def route_uniform(case: Case, tokens: int, generator: torch.Generator) -> Tensor:
    scores = torch.rand((tokens, case.num_experts), generator=generator)
    return scores.argsort(dim=1)[:, : case.num_slots]


def route_skewed(case: Case, tokens: int, generator: torch.Generator) -> Tensor:
    """The first experts get most tokens, the last next to none."""
    scores = torch.rand((tokens, case.num_experts), generator=generator)
    return (scores * torch.arange(1, case.num_experts + 1) ** 2).argsort(dim=1)[:, : case.num_slots]


def route_one_rank(case: Case, tokens: int, generator: torch.Generator) -> Tensor:
    """All tokens go to the experts of the last rank; slots beyond their number are empty."""
    scores = torch.rand((tokens, case.experts_per_rank), generator=generator)
    chosen = torch.full((tokens, case.num_slots), -1)
    used = min(case.num_slots, case.experts_per_rank)
    first = case.num_experts - case.experts_per_rank
    chosen[:, :used] = first + scores.argsort(dim=1)[:, :used]
    return chosen


def route_nowhere(case: Case, tokens: int, generator: torch.Generator) -> Tensor:
    return torch.full((tokens, case.num_slots), -1)


def route_holes(case: Case, tokens: int, generator: torch.Generator) -> Tensor:
    """Three slots in ten are -1."""
    chosen = route_uniform(case, tokens, generator)
    return chosen.where(torch.rand(chosen.shape, generator=generator) > 0.3, -1)


def route_padded(case: Case, tokens: int, generator: torch.Generator) -> Tensor:
    """Three tokens in ten go nowhere, among tokens that do."""
    chosen = route_uniform(case, tokens, generator)
    return chosen.where(torch.rand((tokens, 1), generator=generator) > 0.3, -1)


def route_duplicates(case: Case, tokens: int, generator: torch.Generator) -> Tensor:
    """Few experts, drawn with replacement, and some holes."""
    among = min(3, case.num_experts)
    drawn = torch.randint(-1, among, (tokens, case.num_slots), generator=generator)
    return torch.where(drawn < 0, -1, drawn * (case.num_experts // among))


def route_odd_ranks_silent(case: Case, tokens: int, generator: torch.Generator) -> Tensor:
    """Only ranks 0, 2, ... get tokens."""
    chosen = route_uniform(case, tokens, generator)
    odd = (chosen // case.experts_per_rank) % 2 == 1
    return chosen.where(~odd, -1)


ROUTINGS = {
    name.removeprefix("route_"): function
    for name, function in globals().items()
    if name.startswith("route_")
}


# ---- the cases


CASES = [
    Case("plain"),
    Case("world_of_1", num_ranks=1),
    Case("3_ranks_12_experts", num_ranks=3, tokens=(17, 5, 30), topk=3),
    Case("4_ranks", num_ranks=4, tokens=(16, 7, 32, 1), topk=4, experts_per_rank=3),
    # token counts
    Case("DeepEP#604_ragged", tokens=(96, 64), topk=4),
    Case("DeepEP#744_pads_among_tokens", tokens=(64, 31, 50), num_ranks=3, routing="padded"),
    Case("DeepEP#561_odd_tokens", tokens=(4095, 2048), topk=3, hidden=8),
    Case("one_rank_without_tokens", num_ranks=3, tokens=(9, 0, 4)),
    Case("no_tokens_at_all", tokens=(0,), num_scales=1),
    Case("one_token_each", tokens=(1,)),
    Case("fewer_tokens_than_max", tokens=(5, 3), max_tokens=100),
    # routing
    Case("DeepEP#447_all_to_one_rank", num_ranks=3, routing="one_rank", num_scales=2),
    Case("DeepEP#673_all_minus_one", routing="nowhere", num_scales=2),
    Case("DeepEP#673_holes_int16", routing="holes", topk_dtype=torch.int16, topk=4),
    Case("DeepEP#673_holes_int32", routing="holes", topk_dtype=torch.int32, topk=4),
    Case("DeepEP#673_holes_int64", routing="holes", topk_dtype=torch.int64, topk=4),
    Case("Megatron#175_duplicates", routing="duplicates", topk=5),
    Case("Megatron#175_duplicates_3_ranks", num_ranks=3, routing="duplicates", topk=6, align=16),
    Case("ranks_without_rows", num_ranks=4, routing="odd_ranks_silent", topk=3),
    Case("skewed", num_ranks=4, tokens=(60, 61), routing="skewed", topk=4),
    # experts
    Case("HEP_is_valid_1_expert_a_rank", experts_per_rank=1, topk=1),
    Case("1_expert_a_rank_3_ranks", num_ranks=3, experts_per_rank=1, topk=2),
    Case("topk_is_all_experts", experts_per_rank=3, topk=None),
    Case("topk_1", num_ranks=3, topk=1),
    Case("more_slots_than_experts_of_a_rank", experts_per_rank=3, routing="duplicates", topk=6),
    Case("many_experts", num_ranks=2, experts_per_rank=50, topk=8),
    # payloads
    Case("fp16", dtype=torch.float16, topk=4),
    Case("fp32", dtype=torch.float32, topk=4),
    Case("HEP_is_valid_fp8_hidden_2880", dtype=FP8, hidden=2880, num_scales=23),
    Case("bytes_with_byte_scales", dtype=torch.uint8, num_scales=5, scale_dtype=torch.uint8),
    Case("int8_no_weights", dtype=torch.int8, weights=False),
    Case("odd_fp32_scales", dtype=FP8, num_scales=3, num_ranks=3),
    Case("one_byte_of_scales", num_scales=1, scale_dtype=torch.uint8),
    Case("hidden_2880", hidden=2880, tokens=(6, 3)),
    Case("hidden_8", hidden=8),
    Case("hidden_4_fp32", hidden=4, dtype=torch.float32),
    Case("hidden_7168", hidden=7168, tokens=(3, 2), topk=4),
    Case("no_weights", weights=False),
    # alignment
    Case("align_16", align=16, num_scales=2),
    Case("align_128", align=128, num_ranks=3),
    Case("align_7", align=7),
    Case("align_16_nothing_to_align", align=16, routing="nowhere"),
    # bounded rows
    Case("max_rows_enough", max_rows="enough"),
    Case("max_rows_enough_align_16", max_rows="enough", align=16, num_ranks=3),
    Case("max_rows_more", max_rows="more", num_scales=3, align=16),
    Case("HEP_scan_one_row_less", max_rows="block_less", topk=4),
    Case("HEP_scan_one_block_less", max_rows="block_less", align=16, topk=4, num_ranks=3),
    Case("torchtitan#2207_third", max_rows="third", routing="skewed", topk=4, num_scales=1),
    Case("torchtitan#2207_third_duplicates", max_rows="third", routing="duplicates", topk=5),
    Case("max_rows_0", max_rows="zero", num_scales=2),
    Case("max_rows_0_of_0", max_rows="zero", routing="nowhere"),
    # long sums
    Case("DeepEP#402_many_terms", num_ranks=4, experts_per_rank=8, topk=24),
    Case("DeepEP#402_many_fp16", num_ranks=4, experts_per_rank=8, topk=24, dtype=torch.float16),
    # nodes
    Case("2_nodes_of_2", num_ranks=4, ranks_per_node=2, topk=6),
    Case("4_nodes_of_1", num_ranks=4, ranks_per_node=1, topk=6, dtype=torch.float16),
    Case("3_nodes_of_1", num_ranks=3, ranks_per_node=1, topk=5, tokens=(20, 0, 7)),
    Case("2_nodes_of_2_holes", num_ranks=4, ranks_per_node=2, topk=4, routing="holes", align=16),
    Case("2_nodes_of_2_overflow", num_ranks=4, ranks_per_node=2, topk=4, max_rows="third"),
]  # fmt: skip


# where the number of ranks or nodes matters; one after the other they show what all would
OF_MANY_RANKS = (
    "plain",
    "DeepEP#744_pads_among_tokens",
    "one_rank_without_tokens",
    "DeepEP#447_all_to_one_rank",
    "Megatron#175_duplicates_3_ranks",
    "skewed",
    "fp32",
    "odd_fp32_scales",
    "HEP_scan_one_block_less",
    "torchtitan#2207_third",
    "DeepEP#402_many_terms",
)


def named(*names: str) -> Iterator[Case]:
    """The cases with these names."""
    by_name = {case.name: case for case in CASES}
    return (by_name[name] for name in names)


def params(cases: list[Case] | Iterator[Case]) -> pytest.MarkDecorator:
    """Parametrise a test by ``case``."""
    return pytest.mark.parametrize("case", list(cases), ids=str)
