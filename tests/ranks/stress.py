"""Many calls with everything changing, each checked on the spot against what all ranks know.

All ranks draw the same numbers, so each knows every rank's tokens and routing. Payloads are small
integers, of which sums are exact in bf16: any lost, doubled, swapped or stale row shows.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor

import hybrid_ep
from tests.launch import Rank

HIDDEN, MAX_TOKENS, TOPK, EXPERTS_PER_RANK = 512, 3072, 4, 6
MAX_IN_FLIGHT = 3


@dataclass
class Call:
    """One dispatch under way, with what must come of it."""

    out: hybrid_ep.Dispatched
    sources: Tensor  # [M] index of each row's token among all ranks' tokens
    x: Tensor  # all ranks' tokens
    y: Tensor  # my tokens times the number of their experts
    mine: slice


def run(me: Rank, num_calls: int, seed: int, longest_delay_s: float) -> int:
    """Dispatch and combine in any legal order; returns the number of rows that were compared."""
    buffer = me.buffer(
        hidden=HIDDEN,
        num_experts=EXPERTS_PER_RANK * me.num_ranks,
        max_tokens=MAX_TOKENS,
        topk=TOPK,
    )
    plan = random.Random(seed)  # the same on all ranks: what to call
    delays = random.Random(seed * 1000 + me.rank)
    compared = 0
    flying: list[Call] = []
    for number in range(num_calls):
        if delays.random() < 0.1:
            time.sleep(delays.random() * longest_delay_s)
        if delays.random() < 0.1 and me.device.type == "cuda":
            torch.cuda._sleep(int(delays.random() * longest_delay_s * 1e9))
        action = plan.choice(("send", "replay", "return", "return"))
        if not flying or (action == "send" and len(flying) < MAX_IN_FLIGHT):
            flying.append(send(me, buffer, seed * 100_003 + number, bounded=plan.random() < 0.5))
            compared += check_rows(buffer, flying[-1].out, flying[-1])
        elif action == "replay":
            call = plan.choice(flying)
            again = hybrid_ep.dispatch(buffer, call.x[call.mine], handle=call.out.handle)
            compared += check_rows(buffer, again, call)
        else:
            call = flying.pop(plan.randrange(len(flying)))
            y = hybrid_ep.combine(buffer, call.out.rows, call.out.handle)
            if me.device.type == "cuda":
                torch.cuda.synchronize()
            buffer.check()  # sums of a call that failed mean nothing
            assert torch.equal(y.float(), call.y), f"call {number}: the sums are wrong"
            compared += len(y)
    buffer.check()
    buffer.destroy()
    return compared


def send(me: Rank, buffer: hybrid_ep.Buffer, seed: int, bounded: bool) -> Call:
    draw = torch.Generator().manual_seed(seed)
    most = MAX_TOKENS if seed % 4 == 0 else MAX_TOKENS // 8  # now and then for the copy engine
    tokens = torch.randint(0, most + 1, (me.num_ranks,), generator=draw)
    ends = tokens.cumsum(0).tolist()
    mine = slice(ends[me.rank] - int(tokens[me.rank]), ends[me.rank])
    x = torch.randint(-8, 9, (ends[-1], HIDDEN), generator=draw).bfloat16()
    scores = torch.rand((ends[-1], buffer.num_experts), generator=draw)
    topk_idx = scores.argsort(dim=1)[:, :TOPK]
    topk_idx[torch.rand(topk_idx.shape, generator=draw) < 0.2] = -1

    first = me.rank * EXPERTS_PER_RANK
    local = [
        (topk_idx == first + e).any(dim=1).nonzero().squeeze(1) for e in range(EXPERTS_PER_RANK)
    ]
    num_experts = (topk_idx >= 0).sum(dim=1, keepdim=True)
    x, topk_idx, y = (t.to(me.device) for t in (x, topk_idx, x.float() * num_experts))
    out = hybrid_ep.dispatch(
        buffer,
        x[mine],
        topk_idx[mine],
        max_rows=me.num_ranks * MAX_TOKENS * TOPK if bounded else None,
    )
    return Call(out, torch.cat(local).to(me.device), x, y[mine], mine)


def check_rows(buffer: hybrid_ep.Buffer, out: hybrid_ep.Dispatched, call: Call) -> int:
    num_rows = len(call.sources)
    if out.rows.is_cuda:
        torch.cuda.synchronize()
    buffer.check()  # rows of a call that failed mean nothing
    assert torch.equal(out.rows[:num_rows], call.x[call.sources]), "the rows are wrong"
    assert not out.rows[num_rows:].any(), "the tail is not zero"
    return num_rows
