"""A case on ranks against the oracle; a failure names the rank and the tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests import oracle
from tests.cases import Case, Inputs
from tests.launch import Pool
from tests.ranks import verbs

Verb = Callable[..., Any]  # what a rank does with a case, of tests/ranks/verbs.py


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


def check_dispatch(pool: Pool, case: Case, dispatch: Verb = verbs.dispatch) -> None:
    expected = oracle.dispatch(case)
    results = pool.run(dispatch, case, oracle.max_rows(case))
    for rank, (got, want) in enumerate(zip(results, expected, strict=True)):
        assert got["required_rows"] == want.required_rows, f"rank {rank}"
        assert got["overflow"] == want.overflow, f"rank {rank}"
        assert got["num_tokens"] == case.num_tokens(rank)
        same_bytes(got["counts"], want.counts, f"counts of rank {rank}")
        same_bytes(got["offsets"], want.offsets, f"offsets of rank {rank}")
        same_bytes(got["rows"], want.rows, f"rows of rank {rank}")
        for name in ("weights", "scales"):
            wanted = getattr(want, name)
            assert (got[name] is None) == (wanted is None), name
            if wanted is not None:
                same_bytes(got[name], wanted, f"{name} of rank {rank}")


def check_combine(pool: Pool, case: Case, combine: Verb = verbs.combine) -> None:
    expected = oracle.dispatch(case)
    results = pool.run(combine, case, oracle.max_rows(case))
    sizes = [len(want.sources) for want in expected]
    rows = [case.values(rank, "rows", size) for rank, size in enumerate(sizes)]
    row_weights = [verbs.row_weights(case, rank, size) for rank, size in enumerate(sizes)]
    for name, weights in (("plain", None), ("weighted", row_weights)):
        ordered = oracle.combine(case, expected, rows, weights)
        exact, size = oracle.combine_fp64(case, expected, rows, weights)
        for rank, got in enumerate(results):
            y = got[name]
            same_bytes(y, ordered[rank], f"{name} y of rank {rank}")
            bound = oracle.error_bound(case, y.dtype, size[rank])
            error = (y.double() - exact[rank]).abs()
            assert bool((error <= bound).all()), f"{name} y of rank {rank}: {error.max()}"


def check_gradients(pool: Pool, case: Case, gradients: Verb = verbs.gradients) -> None:
    results = pool.run(gradients, case, oracle.max_rows(case))
    expected = oracle.dispatch(case)
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
        rows = case.values(rank, "rows", sizes[rank]).double()
        dots = (rows * want.rows.double()).sum(dim=1).float()
        torch.testing.assert_close(got["row weights"], dots, rtol=1e-5, atol=1e-4)
