"""Replays of one CUDA graph for as long as wanted, to find what fails seldom. On GPUs:

    python -m tests.ranks.replays SECONDS [plain|poison|again]

plain: two ranks replay a dispatch and a combine of the drop-in with changing routing, beside a
larger Buffer, and each replay must give what the first one with its routing gave. poison: the same,
and before each replay the layout is overwritten with numbers that are no rows, so that a kernel
which reads it too early fails. again: the test ``captured`` of deep_ep.py as a whole. Several of
these at once on one GPU change the timing. CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 names the kernel of
an illegal access (cuda-gdb, ``target cudacore``).
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import targets
from tests.launch import Pool, Rank
from tests.ranks import deep_ep
from tests.ranks.graphs import warmed_up_and_captured

NO_ROW = 0x3FFFFFFF
TOKENS, LARGER, PAD, BETWEEN_LOOKS = 30, 200, 16, 50


def replay(me: Rank, seconds: float, poisons: bool) -> tuple[int, list[int]]:
    """How many replays there were, and which of them differed from the first of their routing."""
    deep_ep.configure(topk=deep_ep.TOPK)
    buffer = deep_ep.made(me, max_tokens=TOKENS)
    mine = _inputs(me, 0)
    most = me.num_ranks * TOKENS * deep_ep.TOPK
    num_rows = -(-most // PAD) * PAD + deep_ep.LOCAL * PAD

    def step() -> tuple[list[Tensor], Tensor]:
        sizes = {"pad_multiple": PAD, "num_permuted_tokens": num_rows, "non_blocking": True}
        rows, probs, _, counts, handle = deep_ep._dispatch(buffer, mine, "map", **sizes)
        y, home = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
        return [rows, probs, counts, handle[-1], y, home], handle.inner.layout

    graph, (results, layout) = warmed_up_and_captured(step)
    deep_ep._dispatch(buffer, _inputs(me, 0, LARGER), "map")  # a larger Buffer beside the graph's
    inputs = [_inputs(me, seed) for seed in (7, 8)]
    wanted: dict[int, list[Tensor]] = {}
    wrong, made, began, goes_on = [], 0, time.monotonic(), True
    while goes_on:
        for _ in range(BETWEEN_LOOKS):
            which = made % len(inputs)
            for field in dataclasses.fields(deep_ep.Inputs):
                getattr(mine, field.name).copy_(getattr(inputs[which], field.name))
            if poisons:
                layout.fill_(NO_ROW)
            graph.replay()
            torch.cuda.synchronize()
            got = [each.clone() for each in results]
            pairs = zip(got, wanted.setdefault(which, got), strict=True)
            if not all(torch.equal(a, b) for a, b in pairs):
                wrong.append(made)
            made += 1
        looked = torch.tensor([int(time.monotonic() - began < seconds)])
        dist.broadcast(looked, 0)
        goes_on = bool(looked)
    return made, wrong[:10]


def _inputs(me: Rank, seed: int, tokens: int = TOKENS) -> Any:
    return deep_ep.Inputs.of(me.rank, me.num_ranks, seed, tokens).to(me.device)


def main() -> None:
    seconds, way = float(sys.argv[1]), (sys.argv[2:] or ["plain"])[0]
    pool = Pool(2, next(target for target in targets.ALL if target.name == "nvlink"))
    if way == "again":
        end, times = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            assert pool.run(deep_ep.call, "captured") == [[]] * 2
            times += 1
        print("again:", times)
    else:
        print(f"{way}:", pool.run(replay, seconds, way == "poison", deadline_s=seconds + 60))
    pool.close()


if __name__ == "__main__":
    main()
