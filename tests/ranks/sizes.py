"""Calls of the sizes that models have, and what they leave behind."""

from __future__ import annotations

import torch
import torch.distributed as dist

import hybrid_ep
from tests.checks import same_bytes
from tests.launch import Rank

HIDDEN, TOPK, EXPERTS_OF_RANK = 7168, 8, 8


def compare_with_torch(
    me: Rank,
    tokens: list[int],
    align: int,
    config: hybrid_ep.Config | None,
    ranks_per_node: int | None = None,
) -> int:
    """Each number of tokens on both backends, bit by bit; how many rows were compared."""
    sizes = {
        "hidden": HIDDEN,
        "num_experts": EXPERTS_OF_RANK * me.num_ranks,
        "max_tokens": max(tokens),
        "topk": TOPK,
        "ranks_per_node": ranks_per_node,
    }
    config = config or hybrid_ep.Config(timeout_s=20)
    ours = me.buffer(**sizes, config=config)
    theirs = me.buffer(**sizes, config=config, backend="torch")
    draw = torch.Generator(device=me.device).manual_seed(me.rank)
    compared = 0
    for num_tokens in tokens:
        x = torch.randn((num_tokens, HIDDEN), device=me.device, generator=draw).bfloat16()
        scores = torch.rand((num_tokens, sizes["num_experts"]), device=me.device, generator=draw)
        topk_weights, topk_idx = scores.topk(TOPK)
        exact = hybrid_ep.dispatch(ours, x, topk_idx, topk_weights, align=align)
        ways = {
            "exact": exact,
            "replayed": hybrid_ep.dispatch(ours, x, None, topk_weights, handle=exact.handle),
            "bounded": hybrid_ep.dispatch(
                ours, x, topk_idx, topk_weights, align=align, max_rows=len(exact.rows)
            ),
        }
        right = hybrid_ep.dispatch(theirs, x, topk_idx, topk_weights, align=align)
        want = results_of(theirs, right)
        for way, out in ways.items():
            for name, value in results_of(ours, out).items():
                same_bytes(value, want[name], f"{name} of {num_tokens} tokens, {way}")
        compared += len(exact.rows)
    torch.cuda.synchronize()
    ours.destroy()
    theirs.destroy()
    return compared


def results_of(buffer: hybrid_ep.Buffer, out: hybrid_ep.Dispatched) -> dict[str, torch.Tensor]:
    y = hybrid_ep.combine(buffer, out.rows, out.handle, weights=out.weights)
    return {"counts": out.counts, "rows": out.rows, "weights": out.weights, "y": y}


def overlap_streams(me: Rank, steps: int) -> list[int]:
    """Memory that PyTorch holds after each step, when calls run on a stream of their own.

    Two micro-batches are under way at any time, as in 1F1B, and the main stream uses the rows.
    """
    buffer = me.buffer(
        hidden=1024, num_experts=EXPERTS_OF_RANK * me.num_ranks, max_tokens=2048, topk=TOPK
    )
    draw = torch.Generator(device=me.device).manual_seed(me.rank)
    main, comm = torch.cuda.current_stream(), torch.cuda.Stream()
    held, before = [], None
    for step in range(steps):
        num_tokens = 2048 - 64 * (step % 3)
        x = torch.randn((num_tokens, 1024), device=me.device, generator=draw).bfloat16()
        scores = torch.rand((num_tokens, buffer.num_experts), device=me.device, generator=draw)
        topk_idx = scores.topk(TOPK).indices
        comm.wait_stream(main)
        with torch.cuda.stream(comm):
            out = hybrid_ep.dispatch(buffer, x, topk_idx, max_rows=2 * 2048 * TOPK)
        if before is not None:
            rows, handle = before
            main.wait_stream(comm)
            done = rows * 2
            comm.wait_stream(main)
            with torch.cuda.stream(comm):
                y = hybrid_ep.combine(buffer, done, handle)
            main.wait_stream(comm)
            assert y.shape[1] == 1024
        before = out.rows, out.handle
        main.wait_stream(comm)
        if step % 8 == 7:
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_reserved())
    buffer.check()
    dist.barrier()
    buffer.destroy()
    return held
