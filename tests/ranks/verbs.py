"""One dispatch, one combine, their gradients: what the ranks do with a case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import hybrid_ep
from tests.cases import Case, Inputs
from tests.launch import Rank


def send(
    me: Rank, buffer: hybrid_ep.Buffer, inputs: Inputs, **arguments: Any
) -> hybrid_ep.Dispatched:
    """``hybrid_ep.dispatch`` of inputs that were made on the CPU."""

    def here(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(me.device)

    return hybrid_ep.dispatch(
        buffer,
        here(inputs.x),
        here(inputs.topk_idx),
        here(inputs.weights),
        scales=here(inputs.scales),
        **arguments,
    )


def note_calls(buffer: hybrid_ep.Buffer, names: Iterable[str], note: Callable[..., None]) -> None:
    """From now on each of these verbs of a Buffer begins with ``note(name, *its arguments)``."""
    verbs = buffer.communicator.verbs

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **sizes: Any) -> Any:
            note(name, *args, **sizes)
            return call(*args, **sizes)

        return noted

    for name in names:
        setattr(verbs, name, noting(name, getattr(verbs, name)))


def poison_padding(rows: Tensor, out: hybrid_ep.Dispatched) -> Tensor:
    """NaN in the rows that belong to no token: nothing may look at them."""
    padding = torch.ones(rows.shape[0], dtype=torch.bool)
    for begin, count in zip(out.offsets[:-1].tolist(), out.counts.tolist(), strict=True):
        padding[begin : begin + count] = False
    rows[padding] = float("nan")
    return rows


def all_verbs(me: Rank, case: Case, max_rows: int | None) -> dict[str, dict[str, Any]]:
    """What each of them gives, on one Buffer; gradients where the case has any."""
    buffer = me.buffer(**case.sizes())
    out = send(me, buffer, case.inputs(me.rank), max_rows=max_rows, align=case.align)
    results = {"dispatch": of_dispatch(out), "combine": combine(me, buffer, case, out)}
    if case.has_gradients:
        results["gradients"] = gradients(me, buffer, case, max_rows)
    buffer.destroy()
    return results


def of_dispatch(out: hybrid_ep.Dispatched) -> dict[str, Any]:
    return {
        "rows": out.rows,
        "weights": out.weights,
        "scales": out.scales,
        "counts": out.counts,
        "offsets": out.offsets,
        "required_rows": int(out.handle.required_rows),
        "overflow": bool(out.handle.overflow),
        "overflow_word": out.handle.overflow_word,
        "padded_counts": out.handle.padded_counts.clone(),  # torch.save wants memory of one dtype
        "host_offsets": out.handle.host_offsets,
        "num_tokens": out.handle.num_tokens,
    }


def combine(
    me: Rank, buffer: hybrid_ep.Buffer, case: Case, out: hybrid_ep.Dispatched
) -> dict[str, Tensor]:
    num_rows = out.rows.shape[0]
    rows = poison_padding(case.values(me.rank, "rows", num_rows), out).to(me.device)
    weights = row_weights(case, me.rank, num_rows).to(me.device)
    return {
        "plain": hybrid_ep.combine(buffer, rows, out.handle),
        "weighted": hybrid_ep.combine(buffer, rows, out.handle, weights=weights),
    }


def gradients(
    me: Rank, buffer: hybrid_ep.Buffer, case: Case, max_rows: int | None
) -> dict[str, Tensor]:
    x, topk_idx, topk_weights, _ = case.leaves(me.rank, me.device)
    out = hybrid_ep.dispatch(buffer, x, topk_idx, topk_weights, max_rows=max_rows, align=case.align)
    num_rows = out.rows.shape[0]
    grad_rows = poison_padding(case.values(me.rank, "grad rows", num_rows), out).to(me.device)
    grad_weights = poison_padding(row_weights(case, me.rank, num_rows), out).to(me.device)
    torch.autograd.backward([out.rows, out.weights], [grad_rows, grad_weights])

    rows = poison_padding(case.values(me.rank, "rows", num_rows), out).to(me.device)
    rows.requires_grad_()
    weights = out.weights.detach().requires_grad_()
    plain = hybrid_ep.combine(buffer, rows, out.handle)
    weighted = hybrid_ep.combine(buffer, rows, out.handle, weights=weights)
    grad_y = case.values(me.rank, "grad y", len(x)).to(me.device)
    (grad_plain,) = torch.autograd.grad(plain, rows, grad_y)
    grad_weighted, grad_row_weights = torch.autograd.grad(weighted, (rows, weights), grad_y)
    return {
        "x": x.grad,
        "topk_weights": topk_weights.grad,
        "rows": grad_plain,
        "weighted rows": grad_weighted,
        "row weights": grad_row_weights,
    }


def row_weights(case: Case, rank: int, num_rows: int) -> Tensor:
    return torch.rand(num_rows, generator=case.generator(rank, "row weights"))
