"""The backward of a weighted combine: rows are scaled and multiplied as their gradients arrive.

That every target gives the same bits as the oracle is in test_verbs.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hybrid_ep
from hybrid_ep.backends.row_dots import row_dots
from hybrid_ep.ops import verbs
from tests.cases import Case
from tests.checks import same_bytes

CASE = Case("weighted", num_ranks=1, topk=3, dtype=torch.bfloat16)


class Weighted:
    """A weighted combine of one rank; rows, weights and the gradient of its sums."""

    def __init__(self, alone, case: Case, max_rows: int | None = None) -> None:
        self.buffer = alone.buffer(**case.sizes())
        device = alone.device
        x, topk_idx, _, _ = case.leaves(0, device, needs_grad=False)
        out = hybrid_ep.dispatch(self.buffer, x, topk_idx, max_rows=max_rows, align=case.align)
        self.handle, num_rows = out.handle, out.rows.shape[0]
        self.rows = case.values(0, "rows", num_rows).to(device)
        self.weights = torch.rand(num_rows, generator=torch.Generator().manual_seed(0)).to(device)
        self.grad_y = case.values(0, "grad y", len(x)).to(device)
        self.is_padding = torch.ones(num_rows, dtype=torch.bool, device=device)
        for begin, count in zip(out.offsets.tolist()[:-1], out.counts.tolist(), strict=True):
            self.is_padding[begin : begin + count] = False

    def gradients(self, rows: Tensor, weights: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = (t.detach().requires_grad_() for t in (rows, weights))
        y = hybrid_ep.combine(self.buffer, rows, self.handle, weights=weights)
        return torch.autograd.grad(y, (rows, weights), grad_y)

    def expected(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """By a plain dispatch of the gradient."""
        sent = hybrid_ep.dispatch(self.buffer, self.grad_y, handle=self.handle).rows
        scaled = (sent.float() * self.weights.unsqueeze(1)).to(sent.dtype)
        dots = row_dots(rows, sent)
        return (
            scaled.masked_fill(self.is_padding.unsqueeze(1), 0),
            dots.masked_fill(self.is_padding, 0),
        )

    def check(self, rows: Tensor, weights: Tensor, grad_y: Tensor) -> None:
        found = self.gradients(rows, weights, grad_y)
        for got, want, what in zip(
            found, self.expected(self.rows), ("rows", "weights"), strict=True
        ):
            same_bytes(got, want, f"gradient of {what}")


CASES = [
    CASE,
    replace(CASE, name="fp16", dtype=torch.float16),
    replace(CASE, name="fp32", dtype=torch.float32),
    replace(CASE, name="padded", align=8),
    replace(CASE, name="no_tokens", tokens=(0,)),
    replace(CASE, name="rows_of_a_few_bytes", hidden=8),
    replace(CASE, name="rows_that_end_within_a_strip", hidden=2056),
    replace(CASE, name="rows_of_two_slices", hidden=10240),
    replace(CASE, name="the_widest_rows_that_the_kernel_scales", hidden=16384),
    replace(CASE, name="rows_too_wide_for_it", hidden=16392, align=4),
    replace(CASE, name="topk_32", hidden=64, topk=32, experts_per_rank=40),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("max_rows", [None, 64, 7], ids=["exact", "bounded", "dropped"])
def test_equals_a_dispatch_that_is_scaled(alone, case, max_rows):
    if max_rows is not None:
        max_rows = -(-max_rows // case.align) * case.align
    combine = Weighted(alone, case, max_rows)
    combine.check(combine.rows, combine.weights, combine.grad_y)


def test_padding_that_is_nan_reaches_no_gradient(alone):
    combine = Weighted(alone, replace(CASE, align=16), max_rows=256)
    assert combine.is_padding.any()
    rows = combine.rows.masked_fill(combine.is_padding.unsqueeze(1), float("nan"))
    weights = combine.weights.masked_fill(combine.is_padding, float("nan"))
    combine.check(rows, weights, combine.grad_y)


def test_strides_do_not_matter(alone):
    combine = Weighted(alone, CASE)
    apart = torch.stack([combine.rows, combine.rows], dim=1)[:, 0]
    every_other = torch.stack([combine.weights, combine.weights], dim=1)[:, 0]
    expanded = combine.grad_y[:1].expand_as(combine.grad_y)
    combine.grad_y = expanded.contiguous()
    combine.check(apart, every_other, expanded)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an op made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple) else (made,):
            if isinstance(tensor, Tensor) and not tensor._is_view():
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return made


@pytest.mark.not_on("torch_gpu", why="its parts are larger than these rows")
def test_no_tensor_is_larger_than_the_rows(alone, monkeypatch):
    combine = Weighted(alone, replace(CASE, tokens=(200,), max_tokens=200, hidden=4096))
    monkeypatch.setattr(verbs, "watched", lambda *tensors: False)  # by Largest, that is
    with Largest() as largest:
        combine.gradients(combine.rows, combine.weights, combine.grad_y)
    assert largest.num_bytes == combine.rows.numel() * 2


@pytest.mark.not_on("nvlink", "nodes", why="gradcheck takes float64, which no kernel moves")
def test_gradcheck(alone):
    case = replace(CASE, tokens=(3,), hidden=4, dtype=torch.float32)
    combine = Weighted(alone, case)
    rows, weights = (t.double().requires_grad_() for t in (combine.rows, combine.weights))

    def sums(rows: Tensor, weights: Tensor) -> Tensor:
        return hybrid_ep.combine(combine.buffer, rows, combine.handle, weights=weights)

    assert torch.autograd.gradcheck(sums, (rows, weights))


def test_an_op_that_is_called_directly_checks_the_rules(alone):
    combine = Weighted(alone, CASE)
    layout, buffer_id = combine.handle.layout, combine.buffer.id
    op = torch.ops.hybrid_ep.combine_backward
    with pytest.raises(ValueError, match="grad_y must have shape"):
        op(combine.grad_y.float(), combine.rows, combine.weights, layout, 0, buffer_id)
    with pytest.raises(ValueError, match="weights must have shape"):
        op(combine.grad_y, combine.rows, combine.weights[1:], layout, 0, buffer_id)
    with pytest.raises(ValueError, match="layout_size must be that of the Buffer"):
        op(combine.grad_y, combine.rows, combine.weights, layout[1:], 0, buffer_id)
