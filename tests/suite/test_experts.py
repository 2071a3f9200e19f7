"""Grouped experts against a plain loop in float64: results, gradients, rows of no group."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_ep.moe import GroupedExperts
from tests.launch import Rank

pytestmark = pytest.mark.not_on(
    "torch_gpu", "nodes", why="experts depend on the device alone: nvlink has GPUs"
)
NAMES = ("out", "rows", "w1", "w3", "w2", "weights")  # the result, and whose gradient it is


@dataclass(frozen=True)
class Case:
    """Experts and their rows.

    Attributes:
        name: the test's id.
        groups: rows of each expert.
        tail: rows beyond the last group; all of them NaN.
        dtype: of the rows and of the experts' weights.
    """

    name: str
    groups: tuple[int, ...] = (5, 0, 17, 3)
    tail: int = 6
    hidden: int = 32
    ffn_hidden: int = 40
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return self.name

    @property
    def num_rows(self) -> int:
        return sum(self.groups)

    def experts(self, device: torch.device, **options: bool) -> GroupedExperts:
        sizes = (len(self.groups), self.hidden, self.ffn_hidden)
        return GroupedExperts(*sizes, seed=1, dtype=self.dtype, device=device, **options)

    def offsets(self, device: torch.device) -> Tensor:
        return torch.tensor([0, *self.groups], device=device).cumsum(0).int()

    def values(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, their weights and the gradient of the result; NaN in the tail."""
        generator = torch.Generator().manual_seed(seed)
        rows, grad = torch.randn(2, self.num_rows + self.tail, self.hidden, generator=generator)
        weights = torch.rand(len(rows), generator=generator)
        for each in (rows, grad, weights):
            each[self.num_rows :] = float("nan")
        return rows.to(self.dtype), weights, grad.to(self.dtype)


CASES = [
    Case("fp32"),
    Case("bf16", dtype=torch.bfloat16),
    Case("fp16", dtype=torch.float16),
    Case("columns_no_multiple_of_8", hidden=20, ffn_hidden=37),
    Case("bf16_columns_no_multiple_of_8", ffn_hidden=37, dtype=torch.bfloat16),
    Case("bf16_more_columns_than_a_block", ffn_hidden=1080, dtype=torch.bfloat16),
    Case("bf16_no_tail", tail=0, dtype=torch.bfloat16),
    Case("bf16_all_rows_in_the_tail", groups=(0, 0, 0), dtype=torch.bfloat16),
    Case("bf16_no_rows", groups=(0, 0), tail=0, dtype=torch.bfloat16),
    Case("bf16_one_expert", groups=(300,), dtype=torch.bfloat16),
]
CASE = pytest.mark.parametrize("case", CASES, ids=str)
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def by_a_loop(case: Case, experts: GroupedExperts, weighted: bool) -> dict[str, Tensor]:
    """Float64 on the CPU, rows of groups alone."""
    rows, weights, grad = (each[: case.num_rows].double() for each in case.values(0))
    leaves = [rows, *(w.detach().cpu().double() for w in (experts.w1, experts.w3, experts.w2))]
    leaves = [leaf.requires_grad_() for leaf in (*leaves, weights)]
    rows, w1, w3, w2, weights = leaves
    parts = []
    for expert, (x, weight) in enumerate(
        zip(rows.split(case.groups), weights.split(case.groups), strict=True)
    ):
        act = F.silu(x @ w1[expert]) * (x @ w3[expert])
        parts.append((act * weight[:, None] if weighted else act) @ w2[expert])
    out = torch.cat(parts)
    grads = torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))


def by_the_module(
    case: Case, experts: GroupedExperts, device: torch.device, weighted: bool
) -> dict[str, Tensor]:
    rows, weights, grad = (each.to(device) for each in case.values(0))
    leaves = [rows.requires_grad_(), experts.w1, experts.w3, experts.w2, weights.requires_grad_()]
    out = experts(rows, case.offsets(device), weights if weighted else None)
    grads = torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)
    found = dict(zip(NAMES, (out.detach(), *grads), strict=True))
    assert not found["weights"][case.num_rows :].any(), "a row of no group has a gradient"
    for name in ("out", "rows", "weights"):
        found[name] = found[name][: case.num_rows]
    return found


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str) -> None:
    """Within a few roundings of the dtype, of the largest value."""
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    roundings = 16 if dtype == torch.float32 else 4  # sums are in float32: they count there alone
    torch.testing.assert_close(
        found.cpu().double(),
        wanted,
        rtol=0,
        atol=roundings * torch.finfo(dtype).eps * scale,
        msg=lambda text: f"{what}: {text}",
    )


@CASE
@WEIGHTED
def test_experts_are_those_of_a_plain_loop(alone: Rank, case: Case, weighted: bool) -> None:
    experts = case.experts(alone.device)
    wanted = by_a_loop(case, experts, weighted)
    found = by_the_module(case, experts, alone.device, weighted)
    assert case.num_rows == 0 or wanted["w1"].abs().max() > 0
    for name in NAMES:
        close(found[name], wanted[name], case.dtype, name)


@WEIGHTED
def test_compiled_they_are_eager(alone: Rank, weighted: bool) -> None:
    case = Case("compiled")
    experts = case.experts(alone.device)
    wanted = by_the_module(case, experts, alone.device, weighted)
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    rows, weights, grad = (each.to(alone.device) for each in case.values(0))
    out = compiled(
        rows.requires_grad_(),
        case.offsets(alone.device),
        weights.requires_grad_() if weighted else None,
    )
    out.backward(grad)
    inside = slice(case.num_rows)
    found = {"out": out.detach()[inside], "rows": rows.grad[inside]}
    found |= {name: weight.grad for name, weight in experts.named_parameters()}
    if weighted:
        found["weights"] = weights.grad[inside]
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


@WEIGHTED
def test_opcheck(alone: Rank, weighted: bool) -> None:
    case = Case("tiny", groups=(2, 1), tail=0, hidden=8, ffn_hidden=8)
    experts = case.experts(alone.device)
    rows, weights, _ = (each.to(alone.device).requires_grad_() for each in case.values(0))
    ends = case.offsets(alone.device)[1:]
    arguments = (rows, *experts.parameters(), weights if weighted else None, ends)
    torch.library.opcheck(torch.ops.hybrid_ep.swiglu_experts.default, arguments)


def test_only_wanted_gradients_are_made(alone: Rank) -> None:
    case = Case("frozen")
    experts = case.experts(alone.device)
    rows, _, grad = (each.to(alone.device) for each in case.values(0))
    offsets = case.offsets(alone.device)
    experts(rows, offsets).backward(grad)
    whole = {name: weight.grad for name, weight in experts.named_parameters()}
    assert all(gradient is not None for gradient in whole.values()) and rows.grad is None

    experts.zero_grad()
    experts.requires_grad_(False)
    experts(rows.requires_grad_(), offsets).backward(grad)
    assert rows.grad[: case.num_rows].abs().max() > 0
    assert all(weight.grad is None for weight in experts.parameters())
    with torch.no_grad():
        assert not experts(rows, offsets).requires_grad


# ---- gradients that are summed in float32


def passes(case: Case, experts: GroupedExperts, device: torch.device, number: int) -> None:
    for seed in range(number):
        rows, _, grad = (each.to(device) for each in case.values(seed))
        experts(rows, case.offsets(device)).backward(grad)


def sums(case: Case, device: torch.device, number: int) -> list[Tensor]:
    """Gradients of single passes, added in float32."""
    experts = case.experts(device)
    totals = [torch.zeros_like(w, dtype=torch.float32) for w in experts.parameters()]
    for seed in range(number):
        rows, _, grad = (each.to(device) for each in case.values(seed))
        out = experts(rows, case.offsets(device))
        grads = torch.autograd.grad(out, list(experts.parameters()), grad)
        for total, each in zip(totals, grads, strict=True):
            total += each
    return totals


BF16 = Case("summed", dtype=torch.bfloat16)


@pytest.mark.parametrize("whose", ["made here", "of a framework"])
def test_main_grad_is_the_sum_in_float32(alone: Rank, whose: str) -> None:
    experts = BF16.experts(alone.device, main_grad=True)
    buffers = []
    if whose == "of a framework":
        for weight in experts.parameters():
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            buffers.append(weight.main_grad)
    passes(BF16, experts, alone.device, 3)
    for weight, total in zip(experts.parameters(), sums(BF16, alone.device, 3), strict=True):
        assert weight.main_grad.dtype == torch.float32 and weight.grad is None
        assert torch.equal(weight.main_grad, total) and total.abs().max() > 0
    for weight, buffer in zip(experts.parameters(), buffers, strict=bool(buffers)):
        assert weight.main_grad is buffer


def on_meta_first(experts: GroupedExperts, device: torch.device) -> GroupedExperts:
    experts = experts.to("meta").to_empty(device=device)
    experts.reset_parameters()
    return experts


CHANGES = {
    "deep copy": lambda experts, device: copy.deepcopy(experts),
    "from the meta device": on_meta_first,
    "to another dtype and back": lambda experts, device: experts.float().bfloat16(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_main_grad_outlives_what_modules_go_through(alone: Rank, change: str) -> None:
    experts = CHANGES[change](BF16.experts(alone.device, main_grad=True), alone.device)
    passes(BF16, experts, alone.device, 2)
    for weight, total in zip(experts.parameters(), sums(BF16, alone.device, 2), strict=True):
        assert torch.equal(weight.main_grad, total) and weight.grad is None


def test_main_grad_of_compiled_experts(alone: Rank) -> None:
    experts = BF16.experts(alone.device, main_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    passes(BF16, compiled, alone.device, 2)
    for weight, total in zip(experts.parameters(), sums(BF16, alone.device, 2), strict=True):
        assert torch.equal(weight.main_grad, total) and weight.grad is None
