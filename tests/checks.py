"""A case on ranks against the oracle; a failure names the rank and the tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.backends.row_dots import row_dots
from tests import oracle
from tests.cases import Case, Inputs
from tests.launch import Pool
from tests.oracle import Expected
from tests.ranks import verbs

Results = list[dict[str, Any]]  # of each rank


def same_bytes(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal to the last bit: NaN equals itself, -0.0 is not 0.0."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, not {expected.shape}"
    if actual.numel() == 0:
        return
    got, wanted = (
        tensor.contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (actual, expected)
    )
    differ = (got != wanted).any(dim=1).view(actual.shape)
    if differ.any():
        where = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} values differ, the first at {where}: "
            f"{actual[where]!r}, not {expected[where]!r}"
        )


def same_results(got: dict[str, Tensor], want: dict[str, Tensor], where: str) -> None:
    """The same tensors under the same names."""
    assert got.keys() == want.keys(), where
    for name in want:
        same_bytes(got[name], want[name], f"{name}, {where}")


def check_verbs(pool: Pool, case: Case, run: Callable[..., Any] = verbs.all_verbs) -> None:
    """Dispatch, combine and their gradients on one Buffer; a failure says which of them."""
    case = pool.target.divided(case)
    results = pool.run(run, case, oracle.max_rows(case))
    expected = oracle.dispatch(case)
    check_dispatch(case, expected, [got["dispatch"] for got in results])
    check_combine(case, expected, [got["combine"] for got in results])
    if case.has_gradients:
        check_gradients(case, expected, [got["gradients"] for got in results])


def check_dispatch(case: Case, expected: list[Expected], results: Results) -> None:
    for rank, (got, want) in enumerate(zip(results, expected, strict=True)):
        assert got["required_rows"] == want.required_rows, f"dispatch, rank {rank}"
        assert got["overflow"] == want.overflow, f"dispatch, rank {rank}"
        assert got["num_tokens"] == case.num_tokens(rank), f"dispatch, rank {rank}"
        same_bytes(got["counts"], want.counts, f"dispatch, counts of rank {rank}")
        same_bytes(got["offsets"], want.offsets, f"dispatch, offsets of rank {rank}")
        assert got["overflow_word"].tolist() == [int(want.overflow)], f"dispatch, rank {rank}"
        padded = want.offsets.diff().long()
        same_bytes(got["padded_counts"], padded, f"dispatch, padded counts of rank {rank}")
        if got["host_offsets"] is not None:
            assert list(got["host_offsets"]) == want.offsets.tolist(), f"dispatch, rank {rank}"
        same_bytes(got["rows"], want.rows, f"dispatch, rows of rank {rank}")
        for name in ("weights", "scales"):
            wanted = getattr(want, name)
            assert (got[name] is None) == (wanted is None), f"dispatch, {name}"
            if wanted is not None:
                same_bytes(got[name], wanted, f"dispatch, {name} of rank {rank}")


def check_combine(case: Case, expected: list[Expected], results: Results) -> None:
    sizes = [len(want.sources) for want in expected]
    rows = [case.values(rank, "rows", size) for rank, size in enumerate(sizes)]
    row_weights = [verbs.row_weights(case, rank, size) for rank, size in enumerate(sizes)]
    for name, weights in (("plain", None), ("weighted", row_weights)):
        ordered = oracle.combine(case, expected, rows, weights)
        exact, size = oracle.combine_fp64(case, expected, rows, weights)
        for rank, got in enumerate(results):
            y, what = got[name], f"combine, {name} y of rank {rank}"
            same_bytes(y, ordered[rank], what)
            bound = oracle.error_bound(case, y.dtype, size[rank])
            error = (y.double() - exact[rank]).abs()
            assert bool((error <= bound).all()), f"{what}: {error.max()}"


def check_gradients(case: Case, expected: list[Expected], results: Results) -> None:
    sizes = [len(want.sources) for want in expected]
    grad_rows = [case.values(rank, "grad rows", size) for rank, size in enumerate(sizes)]
    grad_weights = [verbs.row_weights(case, rank, size) for rank, size in enumerate(sizes)]
    x_grads = oracle.combine(case, expected, grad_rows)
    topk_grads = oracle.slot_values(case, expected, grad_weights)

    backwards: list[Inputs] = [
        replace(inputs, x=case.values(rank, "grad y", case.num_tokens(rank)), scales=None)
        for rank, inputs in enumerate(case.all_inputs())
    ]
    for rank, (got, want) in enumerate(zip(results, oracle.dispatch(case, backwards), strict=True)):
        same_bytes(got["x"], x_grads[rank], f"gradient of x on rank {rank}")
        same_bytes(got["topk_weights"], topk_grads[rank], f"gradient of weights on rank {rank}")
        same_bytes(got["rows"], want.rows, f"gradient of rows on rank {rank}")
        weighted = (want.rows.float() * want.weights[:, None]).to(want.rows.dtype)
        same_bytes(got["weighted rows"], weighted, f"gradient of weighted rows on rank {rank}")
        rows = case.values(rank, "rows", sizes[rank])
        dots = row_dots(rows, want.rows)
        same_bytes(got["row weights"], dots, f"gradient of the rows' weights on rank {rank}")
        exact = (rows.double() * want.rows.double()).sum(dim=1).float()
        torch.testing.assert_close(dots, exact, rtol=1e-5, atol=1e-4)
