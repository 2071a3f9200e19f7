"""A layer whose calls take another number of SMs than the Config says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hybrid_ep
from tests.cases import Case
from tests.launch import Rank
from tests.ranks.verbs import note_calls


def layer(me: Rank, case: Case, max_rows: int | None, num_sms: int | None, way: str) -> Any:
    """Outputs and gradients of dispatch, a weighted combine, and a replay; and who asked for what.

    Args:
        me: the rank.
        case: what it dispatches.
        max_rows: of the dispatch.
        num_sms: of each call.
        way: ``"eager"`` or ``"compiled"``.
    """
    buffer = me.buffer(**case.sizes())
    x, topk_idx, weights, _ = case.leaves(me.rank, me.device)
    grad_y = case.values(me.rank, "grad y", len(x)).to(me.device)
    asked: list[tuple[str, int]] = []
    note_calls(
        buffer,
        ("dispatch", "dispatch_fresh", "combine", "combine_backward"),
        lambda verb, *_, num_sms=0, **__: asked.append((verb, num_sms)),
    )

    def forward(x: Tensor, weights: Tensor) -> Tensor:
        sizing = {"max_rows": max_rows, "num_sms": num_sms}
        out = hybrid_ep.dispatch(buffer, x, topk_idx, weights, **sizing)
        y = hybrid_ep.combine(
            buffer, torch.tanh(out.rows), out.handle, weights=out.weights, num_sms=num_sms
        )
        again = hybrid_ep.dispatch(buffer, x, handle=out.handle, num_sms=num_sms)
        return y + hybrid_ep.combine(buffer, again.rows, out.handle, num_sms=num_sms)

    run = torch.compile(forward, backend="aot_eager") if way == "compiled" else forward
    y = run(x, weights)
    grads = torch.autograd.grad(y, (x, weights), grad_y)
    if me.device.type == "cuda":
        torch.cuda.synchronize()
    buffer.check()
    buffer.destroy()
    return {"y": y.detach(), "x": grads[0], "weights": grads[1], "asked": sorted(asked)}


def bounds(me: Rank) -> tuple[int, int | None]:
    """The least and the most that a call may ask for."""
    buffer = me.buffer(**Case("bounds").on(me.num_ranks).sizes())
    found = buffer.communicator.backend.sms_of_a_call
    buffer.destroy()
    return found
