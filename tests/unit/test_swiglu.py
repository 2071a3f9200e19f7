"""The activation of the experts: its gradient, and its kernels under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hybrid_ep.moe import GroupedExperts
from hybrid_ep.moe.swiglu import swiglu, swiglu_backward

ENDS = torch.tensor([3, 3, 5, 7], dtype=torch.int32)


@pytest.mark.parametrize("num_rows", [7, 9], ids=["no tail", "tail"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_gradients_of_experts(num_rows: int, weighted: bool) -> None:
    experts = GroupedExperts(4, 5, 6, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(num_rows, generator=generator, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in experts.named_parameters()]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), ENDS])

    def apply(rows: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        inputs = (rows, offsets, weights if weighted else None)
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(experts, named, inputs)[:7]

    assert torch.autograd.gradcheck(apply, (rows, weights, *experts.parameters()))


def test_a_second_derivative_is_refused() -> None:
    experts = GroupedExperts(4, 5, 6)
    rows = torch.randn(7, 5, requires_grad=True)
    out = experts(rows, torch.cat([torch.zeros(1, dtype=torch.int32), ENDS]))
    (first,) = torch.autograd.grad(out.square().sum(), rows, create_graph=True)
    with pytest.raises(NotImplementedError, match="must be differentiated once"):
        first.sum().backward()


# ---- the kernels, interpreted: without a GPU, and exactly as they are written


@dataclass(frozen=True)
class Case:
    """Sizes of an activation; ``tail`` rows of NaN belong to no group."""

    name: str
    rows: int = 9
    columns: int = 300
    tail: int = 2
    weighted: bool = True
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return self.name

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Grad, gate, up, weights and ends."""
        generator = torch.Generator().manual_seed(0)
        grad, gate, up = torch.randn(3, self.rows, self.columns, generator=generator)
        weights = torch.rand(self.rows, generator=generator)
        inside = self.rows - self.tail
        for each in (grad, gate, up, weights):
            each[inside:] = float("nan")
        ends = torch.tensor([inside // 2, inside // 2, inside], dtype=torch.int32)
        wide = (each.to(self.dtype) for each in (grad, gate, up))
        return *wide, weights if self.weighted else None, ends


CASES = [
    Case("weighted"),
    Case("plain", weighted=False),
    Case("fewer_columns_than_a_warp", columns=7),
    Case("more_columns_than_a_block", columns=1500),
    Case("fp16", dtype=torch.float16),
    Case("bf16", dtype=torch.bfloat16),
    Case("all_rows_in_the_tail", rows=3, tail=3),
    Case("no_rows", rows=0, tail=0),
]


def interpreted(case: Case) -> tuple[Tensor | None, ...]:
    """In a process of its own, as Triton decides when it is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from hybrid_ep.moe import swiglu_triton

    grad, *others = case.tensors()
    return swiglu_triton.swiglu(*others), *swiglu_triton.swiglu_backward(grad, *others)


@pytest.fixture(scope="module")
def interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed; it is optional")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_are_the_torch_ops(interpreter: ProcessPoolExecutor, case: Case) -> None:
    found = interpreter.submit(interpreted, case).result()
    grad, *others = case.tensors()
    wanted = swiglu(*others), *swiglu_backward(grad, *others)
    inside = slice(case.rows - case.tail)
    names = ("act", "grad of gate", "grad of up", "grad of weights", "act of the backward")
    for name, got, want in zip(names, found, wanted, strict=True):
        assert (got is None) == (want is None) == (name == "grad of weights" and not case.weighted)
        if got is not None:
            # a rounding apart: the interpreter's bf16 rounds towards zero
            torch.testing.assert_close(
                got[inside], want[inside], msg=lambda text, name=name: f"{name}: {text}"
            )
    if case.weighted:
        assert not found[3][case.rows - case.tail :].any(), "a row of no group has a gradient"
