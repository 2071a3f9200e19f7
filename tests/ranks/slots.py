"""Routing with fewer slots than the Buffer has, and values that return to slots."""

from __future__ import annotations

from typing import Any

import torch

import hybrid_ep
from tests.cases import Case
from tests.launch import Rank


def narrow_and_padded(me: Rank, case: Case, topk: int) -> list[list[Any]]:
    """Rows, sums and gradients on a Buffer of more slots: of narrow routing, and of padded."""
    buffer = me.buffer(**{**case.sizes(), "topk": topk})
    results = []
    for pads in (False, True):
        x, topk_idx, weights, _ = case.leaves(me.rank, me.device)
        slot_weights = weights
        if pads:
            behind = (0, topk - topk_idx.shape[1])
            topk_idx = torch.nn.functional.pad(topk_idx, behind, value=-1)
            slot_weights = torch.nn.functional.pad(weights, behind)
        out = buffer.dispatch(x, topk_idx, slot_weights, align=case.align)
        y = buffer.combine(torch.tanh(out.rows), out.handle, weights=out.weights)
        grads = torch.autograd.grad(y, (x, weights), torch.ones_like(y))
        again = buffer.dispatch(x, None, slot_weights, handle=out.handle)
        results.append([out.rows, out.weights, y, *grads, again.weights])
    buffer.destroy()
    return results


def values_beside_rows(me: Rank, case: Case) -> dict[str, Any]:
    """combine_values beside combine, and beside the gradient of a dispatch."""
    buffer = me.buffer(**case.sizes())
    x, topk_idx, weights, _ = case.leaves(me.rank, me.device)
    out = buffer.dispatch(x, topk_idx, weights, align=case.align)
    generator = torch.Generator().manual_seed(me.rank)
    rows = torch.randn(out.rows.shape, generator=generator).to(me.device, case.dtype)
    values = torch.randn(out.weights.shape, generator=generator).to(me.device)
    y, home = hybrid_ep.combine_values(buffer, rows, values, out.handle)
    grads = torch.autograd.grad((out.rows, out.weights), (x, weights), (rows, values))
    plain = buffer.combine(rows, out.handle)

    rows, values = rows.requires_grad_(), values.requires_grad_()
    sums = buffer.combine_values(rows, values, out.handle)
    with torch.no_grad():
        sent = buffer.dispatch(x, None, weights, handle=out.handle)
    back = torch.autograd.grad(sums, (rows, values), (x.detach(), weights.detach()))
    offsets = out.handle.offsets.tolist()
    on_host = out.handle.host_offsets
    buffer.destroy()
    return {
        "forward": ((y, home), grads),
        "without values": ((y,), (plain,)),
        "backward": (back, (sent.rows, sent.weights)),
        "offsets": (on_host, tuple(offsets)),
    }
