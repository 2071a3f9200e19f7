"""Calls that must raise, and what a Buffer is good for afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import hybrid_ep
from tests.cases import Case
from tests.launch import Rank
from tests.ranks.raised import raised_by, what_it_raises
from tests.ranks.verbs import send

# 12 experts, for 2 or 3 ranks
CASE = Case("mistakes", tokens=(6, 4), topk=3, num_scales=2, experts_per_rank=6)


class Call:
    """Good arguments of every call, for a mistake to change."""

    def __init__(self, me: Rank) -> None:
        self.me = me
        self.buffer = me.buffer(**CASE.sizes())
        inputs = CASE.inputs(me.rank)
        self.x = inputs.x.to(me.device)
        self.topk_idx = inputs.topk_idx.to(me.device)
        self.weights = inputs.weights.to(me.device)
        self.scales = inputs.scales.to(me.device)
        self.sent = send(me, self.buffer, inputs)
        self.handle = self.sent.handle
        self.rows = torch.zeros_like(self.sent.rows)

    def dispatch(self, x=None, topk_idx=None, weights=None, **others: Any) -> Any:
        x = self.x if x is None else x
        topk_idx = self.topk_idx if topk_idx is None else topk_idx
        return hybrid_ep.dispatch(self.buffer, x, topk_idx, weights, **others)

    def combine(self, rows=None, handle=None, **others: Any) -> Any:
        rows = self.rows if rows is None else rows
        return hybrid_ep.combine(self.buffer, rows, handle or self.handle, **others)

    def replay(self, x=None, **others: Any) -> Any:
        x = self.x if x is None else x
        return hybrid_ep.dispatch(self.buffer, x, **{"handle": self.handle, **others})

    def other_handle(self) -> hybrid_ep.Handle:
        """A handle of a Buffer of other sizes."""
        layout = self.handle.layout.new_zeros(self.handle.layout.numel() + 1)
        return replace(self.handle, layout=layout)


def mistake(me: Rank, bad_call: Callable[[Call], Any]) -> str:
    """Rank 0 alone makes a bad call; then all go on. What it raised, and its text."""
    call = Call(me)
    text = ": ".join(raised_by(lambda: bad_call(call))) if me.rank == 0 else ""
    call.combine()  # nothing was sent, so the ranks are still in step
    call.dispatch()
    call.buffer.destroy()
    return text


def disagree(me: Rank, by_rank: list[dict[str, Any]]) -> str:
    """What building a Buffer with these arguments raises, if a ValueError."""
    sizes = {**CASE.sizes(), **by_rank[me.rank]}
    return what_it_raises(lambda: me.buffer(**sizes), ValueError)


# ---- faults


def route(call: Call) -> None:
    call.dispatch()


def dispatch(call: Call) -> None:
    call.replay()


def combine(call: Call) -> None:
    call.combine()


def dispatch_of_wider_rows(call: Call) -> None:
    wider = torch.zeros((len(call.x), CASE.hidden), dtype=torch.float32, device=call.me.device)
    call.replay(wider)


def dispatch_with_weights(call: Call) -> None:
    call.replay(topk_weights=call.weights)


def dispatch_of_fp16(call: Call) -> None:
    call.replay(call.x.half())


def combine_of_fp16(call: Call) -> None:
    call.combine(call.rows.half())


def dispatch_of_another_route(call: Call) -> None:
    call.replay(handle=call.first.handle)


def combine_of_another_route(call: Call) -> None:
    call.combine(torch.zeros_like(call.first.rows), call.first.handle)


def stay_away(call: Call) -> None:
    pass


def die(call: Call) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def come_late(call: Call) -> None:
    time.sleep(0.5)
    call.combine()


def too_many_tokens(call: Call) -> None:
    """Of T above max_tokens on one rank the ValueError goes to its caller."""
    many = call.x.new_zeros((CASE.sizes()["max_tokens"] + 1, CASE.hidden))
    topk_idx = torch.zeros((len(many), CASE.num_slots), dtype=torch.int64, device=many.device)
    try:
        call.dispatch(many, topk_idx)
    except ValueError as error:
        assert "max_tokens" in str(error)
    else:
        raise AssertionError("accepted")


def fault(
    me: Rank,
    theirs: Callable[[Call], None],
    last: Callable[[Call], None],
    sizes: dict[str, Any],
    victim: int = -1,
) -> dict[str, Any]:
    """Rank ``victim`` calls ``last``, the others ``theirs``; how that ended here."""
    call = Call(me)
    call.buffer.destroy()
    call.buffer = me.buffer(**{**CASE.sizes(), **sizes})
    call.first = send(me, call.buffer, CASE.inputs(me.rank))
    call.sent = send(me, call.buffer, CASE.inputs(me.rank))
    call.handle = call.sent.handle
    if me.device.type == "cuda":  # or a rank that is killed owes its peers what came before
        torch.cuda.synchronize()
    function = last if me.rank == victim % me.num_ranks else theirs
    try:
        function(call)
        if me.device.type == "cuda":  # there the host need not have waited for the call
            torch.cuda.synchronize()
        call.buffer.check()
    except hybrid_ep.PeerError as error:
        seen = {"error": str(error), "rank": error.rank, "peer": error.peer}
        seen |= {"phase": error.phase, "call": error.call}
        later = (call.combine, call.dispatch, call.buffer.check)
        seen["again"] = [what_it_raises(each) for each in later]
    else:
        seen = {"error": None}
    call.buffer.destroy()
    call.buffer.destroy()
    seen["destroyed"] = what_it_raises(call.dispatch)
    return seen


def build_on_two_gpus(me: Rank) -> str:
    """What building a Buffer raises whose ranks are on the first two GPUs in turn."""
    sizes = CASE.on(me.num_ranks).sizes()
    device = torch.device("cuda", me.rank % 2)
    return what_it_raises(lambda: me.buffer(**sizes, device=device))


def expert_out_of_range(me: Rank) -> str:
    """What a dispatch raises whose topk_idx, on the GPU, names an expert that does not exist."""
    call = Call(me)
    topk_idx = CASE.inputs(me.rank).topk_idx.to(me.device)
    topk_idx[3, 1] = CASE.num_experts
    text = what_it_raises(
        lambda: (call.dispatch(call.x, topk_idx), call.buffer.check()), ValueError
    )
    call.buffer.destroy()
    return text


LONG_S = 40


def unknown_expert_on_rank_1(me: Rank, max_rows: int | None) -> tuple[str, float]:
    """What a dispatch raises on each rank when the topk_idx of rank 1 is wrong, after how long."""
    buffer = me.buffer(**CASE.sizes(), config=hybrid_ep.Config(timeout_s=LONG_S))
    inputs = CASE.inputs(me.rank)
    topk_idx = inputs.topk_idx.to(me.device)
    if me.rank == 1:
        topk_idx[3, 1] = CASE.num_experts
    begin, text = time.monotonic(), ""
    try:
        hybrid_ep.dispatch(buffer, inputs.x.to(me.device), topk_idx, max_rows=max_rows)
        if me.rank == 1:
            while time.monotonic() - begin < LONG_S / 2:  # as its next call will
                buffer.check()
        torch.cuda.synchronize()
        buffer.check()
    except (ValueError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    buffer.destroy()
    return text, time.monotonic() - begin
