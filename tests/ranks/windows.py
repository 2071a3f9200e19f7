"""Calls that follow each other without a pause, through windows of a few slots."""

from __future__ import annotations

import torch
from torch import Tensor

import hybrid_ep
from tests.checks import same_bytes
from tests.launch import Rank
from tests.ranks.networks import NETWORKS

HIDDEN, TOPK, EXPERTS_OF_RANK = 64, 3, 2


def padded_in_stretches(me: Rank, tokens: int, stretch: int, draw: torch.Generator) -> Tensor:
    """Top-k of which two stretches in three are -1: whole chunks of tokens go nowhere."""
    scores = torch.rand((tokens, EXPERTS_OF_RANK * me.num_ranks), device=me.device, generator=draw)
    stretches = torch.rand(-(-tokens // stretch), device=me.device, generator=draw) < 1 / 3
    is_real = stretches.repeat_interleave(stretch)[:tokens]
    return scores.topk(TOPK).indices.where(is_real[:, None], -1)


def back_to_back(
    me: Rank,
    network: str,
    ranks_per_node: int,
    config: hybrid_ep.Config,
    tokens: int,
    stretch: int,
    steps: int,
) -> int:
    """Steps of a dispatch and three combines, queued without waiting; how many rows were compared.

    The combines alternate between two widths of rows. Every result is compared with the torch
    backend's, bit by bit.
    """
    sizes = {
        "hidden": HIDDEN,
        "num_experts": EXPERTS_OF_RANK * me.num_ranks,
        "max_tokens": tokens,
        "topk": TOPK,
        "dtype": torch.float32,
        "ranks_per_node": ranks_per_node,
        "config": config,
    }
    theirs = me.buffer(**sizes, backend="torch")
    draw = torch.Generator(device=me.device).manual_seed(me.rank)
    max_rows = tokens * me.num_ranks * min(TOPK, EXPERTS_OF_RANK)
    inputs = [
        (
            torch.randn((tokens - step, HIDDEN), device=me.device, generator=draw).bfloat16(),
            padded_in_stretches(me, tokens - step, stretch, draw),
        )
        for step in range(steps)
    ]

    def run(buffer: hybrid_ep.Buffer) -> list[list[Tensor]]:
        results = []
        for x, topk_idx in inputs:
            out = hybrid_ep.dispatch(buffer, x, topk_idx, max_rows=max_rows)
            rows = (out.rows.float(), out.rows * 2, out.rows.float() * 3)
            home = [hybrid_ep.combine(buffer, each, out.handle) for each in rows]
            results.append([out.counts, out.rows, *home])
        return results

    want_all = run(theirs)
    with NETWORKS[network]():
        ours = me.buffer(**sizes)
    got = run(ours)
    ours.check()
    torch.cuda.synchronize()
    ours.destroy()
    theirs.destroy()
    compared = 0
    for step, (mine, right) in enumerate(zip(got, want_all, strict=True)):
        for name, value, want in zip(("counts", "rows", "y", "y2", "y3"), mine, right, strict=True):
            same_bytes(value, want, f"{name} of step {step}")
        compared += int(mine[0].sum())
    return compared


def restore_between_routes(me: Rank, network: str, ranks_per_node: int, routes: int) -> None:
    """Dispatches, release and restore, more dispatches: each as on the torch backend."""
    tokens = 300  # several tiles of the routing
    sizes = {
        "hidden": HIDDEN,
        "num_experts": EXPERTS_OF_RANK * me.num_ranks,
        "max_tokens": tokens,
        "topk": TOPK,
        "ranks_per_node": ranks_per_node,
    }
    theirs = me.buffer(**sizes, backend="torch")
    draw = torch.Generator(device=me.device).manual_seed(me.rank)

    def compare(times: int) -> None:
        for _ in range(times):
            x = torch.randn((tokens, HIDDEN), device=me.device, generator=draw).bfloat16()
            topk_idx = padded_in_stretches(me, tokens, 5, draw)
            got, want = (hybrid_ep.dispatch(each, x, topk_idx) for each in (ours, theirs))
            same_bytes(got.rows, want.rows, f"rows after {routes} routes")

    with NETWORKS[network]():
        ours = me.buffer(**sizes)
        compare(routes)
        ours.release()
        ours.restore()
        compare(3)
        ours.destroy()
    theirs.destroy()
