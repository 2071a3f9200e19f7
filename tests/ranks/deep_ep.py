"""HybridEPBuffer on ranks, beside what plain torch makes of the inputs of all ranks."""

from __future__ import annotations

import dataclasses
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.integrations.deep_ep import HybridEPBuffer, configure, indices_to_map, settings
from tests.launch import Rank
from tests.ranks.graphs import warmed_up_and_captured
from tests.ranks.raised import raised_by, what_it_raises

HIDDEN, LOCAL, TOPK = 32, 3, 2
TOKENS = (17, 0, 40, 5)  # of the ranks


@dataclasses.dataclass
class Inputs:
    """Of one rank. Each token has at most TOPK experts, some have fewer, some none."""

    x: Tensor
    topk_idx: Tensor
    weights: Tensor
    routing_map: Tensor
    probs: Tensor

    @classmethod
    def of(cls, rank: int, num_ranks: int, seed: int = 0, tokens: int | None = None) -> Inputs:
        generator = torch.Generator().manual_seed(100 * seed + rank)
        tokens = TOKENS[rank] if tokens is None else tokens
        experts = LOCAL * num_ranks
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        weights, topk_idx = torch.rand(tokens, experts, generator=generator).topk(TOPK)
        topk_idx[torch.rand(tokens, TOPK, generator=generator) < 0.2] = -1
        weights = torch.where(topk_idx >= 0, weights, 0.0)
        routing_map = torch.zeros(tokens, experts, dtype=torch.bool)
        probs = torch.zeros(tokens, experts)
        for t in range(tokens):
            for slot in range(TOPK):
                if topk_idx[t, slot] >= 0:
                    routing_map[t, topk_idx[t, slot]] = True
                    probs[t, topk_idx[t, slot]] = weights[t, slot]
        return cls(x, topk_idx, weights, routing_map, probs)

    def to(self, device: torch.device) -> Inputs:
        return Inputs(*(getattr(self, f.name).to(device) for f in dataclasses.fields(self)))


def everybody(me: Rank, seed: int = 0, tokens: int | None = None) -> list[Inputs]:
    return [Inputs.of(rank, me.num_ranks, seed, tokens) for rank in range(me.num_ranks)]


def rows_of(me: Rank, inputs: list[Inputs], pad: int) -> tuple[Tensor, Tensor, list[int]]:
    """The rows and probs of this rank, one expert after another, and the padded counts."""
    rows, probs, counts = [], [], []
    for expert in range(me.rank * LOCAL, (me.rank + 1) * LOCAL):
        mine = [
            (each.x[t], each.probs[t, expert])
            for each in inputs
            for t in range(len(each.x))
            if each.routing_map[t, expert]
        ]
        padding = -len(mine) % pad
        mine += [(torch.zeros(HIDDEN).bfloat16(), torch.tensor(0.0))] * padding
        counts.append(len(mine))
        rows += [row for row, _ in mine]
        probs += [prob for _, prob in mine]
    if not rows:
        return torch.zeros(0, HIDDEN).bfloat16(), torch.zeros(0), counts
    return torch.stack(rows), torch.stack(probs), counts


def made(me: Rank, max_tokens: int | None = None, **options: Any) -> HybridEPBuffer:
    max_tokens = max(1, TOKENS[me.rank]) if max_tokens is None else max_tokens
    return HybridEPBuffer(
        group=dist.group.WORLD,
        hidden_dim=HIDDEN,
        max_num_of_tokens_per_rank=max_tokens,
        num_local_experts=LOCAL,
        **options,
    )


def call(me: Rank, name: str, *args: Any) -> Any:
    """The function of this module of that name; settings last as long as the call."""
    settings.forget()
    try:
        return globals()[name](me, *args)
    finally:
        settings.forget()


# ---- each returns what differs from plain torch: nothing


def _same(found: dict[str, tuple[Any, Any]]) -> list[str]:
    faults = []
    for name, (got, wanted) in found.items():
        if isinstance(got, Tensor):
            wanted = torch.as_tensor(wanted)
            equal = got.dtype == wanted.dtype and torch.equal(got.cpu(), wanted.cpu())
        else:
            equal = got == wanted
        if not equal:
            faults.append(f"{name}: {got} is not {wanted}")
    return faults


def _dispatch(buffer: HybridEPBuffer, mine: Inputs, routing: str, **options: Any) -> tuple:
    experts = mine.probs.shape[1]
    ways = {
        "map": {"routing_map": mine.routing_map, "probs": mine.probs},
        "indices": {
            "topk_idx": mine.topk_idx,
            "topk_weights": mine.weights,
            "num_of_experts": experts,
        },
        "indices and probs": {
            "topk_idx": mine.topk_idx,
            "probs": mine.probs,
            "num_of_experts": experts,
        },
    }
    return buffer.dispatch_with_permute(hidden=mine.x, **ways[routing], **options)


def round_trip(me: Rank, routing: str, pad: int) -> list[str]:
    """A dispatch and its combine, blocking, with ragged T."""
    inputs = everybody(me)
    mine, experts = inputs[me.rank].to(me.device), LOCAL * me.num_ranks
    buffer = made(me)
    rows, probs, scales, counts, handle = _dispatch(buffer, mine, routing, pad_multiple=pad)
    expected = rows_of(me, inputs, pad)
    y, home = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
    alone, nothing = buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=pad)
    # bf16 sums of at most TOPK equal rows are exact
    copies = mine.routing_map.sum(dim=1, keepdim=True)
    return _same(
        {
            "rows": (rows, expected[0]),
            "probs": (probs, expected[1]),
            "scales": (scales, None),
            "counts": (counts, torch.tensor(expected[2])),
            "counts are on": (counts.device.type, "cpu"),
            "overflow": (handle[-1], torch.zeros(1, dtype=torch.int32)),
            "counts without padding": (handle[7].shape, torch.Size([LOCAL])),
            "tokens": (handle[8], len(mine.x)),
            "items": (len(tuple(handle)), len(handle)),
            "y": (y, mine.x * copies),
            "y without probs": (alone, y),
            "no probs": (nothing, None),
            "home": (home, mine.probs),
            "shape of home": (home.shape, torch.Size([len(mine.x), experts])),
        }
    )


def budget(me: Rank, room: str, pad: int) -> list[str]:
    """Non-blocking mode: a number of rows that suffices, or drops the last ones."""
    inputs = everybody(me)
    mine = inputs[me.rank].to(me.device)
    needed = [
        len(rows_of(dataclasses.replace(me, rank=r), inputs, pad)[0]) for r in range(me.num_ranks)
    ]
    most = max(needed)
    num_rows = {"enough": most, "more": most + 2 * pad, "less": most // 2 // pad * pad}[room]
    buffer = made(me)
    options = {"pad_multiple": pad, "non_blocking": True, "num_permuted_tokens": num_rows}
    rows, probs, _, counts, handle = _dispatch(buffer, mine, "map", **options)
    whole, whole_probs, padded = rows_of(me, inputs, pad)
    kept = min(num_rows, len(whole))
    expected = torch.zeros(num_rows, HIDDEN).bfloat16()
    expected[:kept] = whole[:kept]
    expected_probs = torch.zeros(num_rows)
    expected_probs[:kept] = whole_probs[:kept]
    clipped, begin = [], 0
    for count in padded:
        clipped.append(max(0, min(count, num_rows - begin)))
        begin += count
    grad = mine.x * 2  # the backward of combine: another call with the handle
    replay = {"hidden": grad, "handle": handle, "pad_multiple": pad}
    back, *_ = buffer.dispatch_with_permute(num_permuted_tokens=torch.tensor(num_rows), **replay)
    again, *_ = buffer.dispatch_with_permute(num_permuted_tokens=num_rows, **replay)
    y, home = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
    dropped = len(whole) > num_rows
    found = {
        "rows": (rows, expected),
        "probs": (probs, expected_probs),
        "counts": (counts, torch.tensor(clipped)),
        "counts are on": (counts.device.type, me.device.type),
        "overflow": (handle[-1], torch.tensor([int(dropped)], dtype=torch.int32)),
        "replayed": (back, expected * 2),
        "replayed again": (again, back),
        "shape of y": (y.shape, mine.x.shape),
    }
    if room != "less":
        found["home"] = (home, mine.probs)
    return _same(found)


def handles(me: Rank) -> list[str]:
    """Two micro-batches in flight, each with its backward calls, on a Buffer that grows."""
    buffer = made(me, max_tokens=20)
    batches = [everybody(me, seed, tokens) for seed, tokens in ((1, 12), (2, 70))]
    mine = [inputs[me.rank].to(me.device) for inputs in batches]
    sent = [_dispatch(buffer, each, "map", pad_multiple=4) for each in mine]
    found = {}
    for which in (0, 1, 0):  # the first one after the Buffer has grown
        rows, probs, _, _, handle = sent[which]
        each, (whole, whole_probs, padded) = mine[which], rows_of(me, batches[which], 4)
        y, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=4)
        copies = each.routing_map.sum(dim=1, keepdim=True)
        again = buffer.dispatch_with_permute(hidden=each.x, probs=each.probs * 2, handle=handle)
        found |= {
            f"rows {which}": (rows, whole),
            f"probs {which}": (probs, whole_probs),
            f"y {which}": (y, each.x * copies),
            f"replayed rows {which}": (again[0], whole),
            f"replayed probs {which}": (again[1], whole_probs * 2),
            f"replayed counts {which}": (again[3], torch.tensor(padded)),
            f"handle {which}": (again[4] is handle, True),
        }
    found["capacity"] = (buffer.configurer.buffer_config.max_num_of_tokens_per_rank, 128)
    return _same(found)


def gradients(me: Rank) -> list[str]:
    """The backward by hand, as frameworks write it, beside that of plain torch and of autograd."""
    inputs = everybody(me, seed=3)
    mine = inputs[me.rank].to(me.device)
    buffer = made(me)

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, routing_map, probs):
            rows, row_probs, _, _, ctx.handle = buffer.dispatch_with_permute(
                hidden=x, routing_map=routing_map, probs=probs, pad_multiple=8
            )
            return rows, row_probs, ctx.handle

        @staticmethod
        def backward(ctx, grad_rows, grad_probs, _):
            grads = buffer.combine_with_unpermute(
                hidden=grad_rows, probs=grad_probs, handle=ctx.handle
            )
            return grads[0], None, grads[1]

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, handle):
            ctx.handle = handle
            return buffer.combine_with_unpermute(hidden=rows, handle=handle)[0]

        @staticmethod
        def backward(ctx, grad):
            return buffer.dispatch_with_permute(hidden=grad, handle=ctx.handle)[0], None

    results = []
    for by_hand in (True, False):
        x, probs = (each.clone().requires_grad_() for each in (mine.x, mine.probs))
        if by_hand:
            rows, row_probs, handle = Dispatch.apply(x, mine.routing_map, probs)
        else:
            rows, row_probs, _, _, handle = buffer.dispatch_with_permute(
                hidden=x, routing_map=mine.routing_map, probs=probs, pad_multiple=8
            )
        rows = torch.tanh(rows.float() * row_probs.unsqueeze(1)).bfloat16()
        if by_hand:
            y = Combine.apply(rows, handle)
        else:
            y = buffer.combine_with_unpermute(hidden=rows, handle=handle)[0]
        (y.float() ** 2).sum().backward()  # expands no gradient, and strides none
        results.append((y, x.grad, probs.grad))

    x, probs = (each.clone().requires_grad_() for each in (mine.x, mine.probs))
    terms = torch.tanh(x.float().unsqueeze(1) * probs.unsqueeze(2)) * mine.routing_map.unsqueeze(2)
    y = terms.sum(dim=1)
    (y**2).sum().backward()
    plain = y, x.grad, probs.grad * mine.routing_map
    close = [
        torch.allclose(got.float(), wanted.float(), rtol=3e-2, atol=3e-2)
        for got, wanted in zip(results[0], plain, strict=True)
    ]
    same = [torch.equal(*pair) for pair in zip(*results, strict=True)]
    return _same(
        {"close to plain": (close, [True] * 3), "by hand and autograd": (same, [True] * 3)}
    )


def fp8(me: Rank) -> list[str]:
    """Rows of one byte with their scales; other rows leave scaling_factor unread."""
    inputs = everybody(me)
    mine = inputs[me.rank].to(me.device)
    buffer = made(me)
    quantised = mine.x.to(torch.float8_e4m3fn)
    scales = mine.x.float().abs().amax(dim=1, keepdim=True)
    routed = {"routing_map": mine.routing_map, "probs": mine.probs, "scaling_factor": scales}
    rows, _, row_scales, _, handle = buffer.dispatch_with_permute(hidden=quantised, **routed)
    expected = rows_of(me, inputs, 1)[0]
    y, _ = buffer.combine_with_unpermute(hidden=rows.to(torch.bfloat16), handle=handle)
    plain = buffer.dispatch_with_permute(hidden=mine.x, **routed)
    return _same(
        {
            "rows": (rows.view(torch.uint8), expected.to(torch.float8_e4m3fn).view(torch.uint8)),
            "scales": (row_scales, expected.float().abs().amax(dim=1, keepdim=True)),
            "y": (y, quantised.bfloat16() * mine.routing_map.sum(dim=1, keepdim=True)),
            "unread": (plain[2], None),
        }
    )


def without_permute(me: Rank, routing: str) -> list[str]:
    """One row for each token and rank, and probs in the columns of the node's experts."""
    inputs = everybody(me)
    mine, experts = inputs[me.rank].to(me.device), LOCAL * me.num_ranks
    buffer = made(me, num_of_hybrid_ep_ranks_per_nvlink_domain=me.num_ranks // 2)
    options = {"routing_map": mine.routing_map, "probs": mine.probs}
    if routing == "indices":
        options = {"topk_idx": mine.topk_idx, "topk_weights": mine.weights}
        options["num_of_experts"] = experts
    rows, probs, scales, handle = buffer.dispatch(mine.x, **options)
    local = slice(me.rank * LOCAL, (me.rank + 1) * LOCAL)
    node = slice(me.rank // (me.num_ranks // 2) * experts // 2, None)
    node = slice(node.start, node.start + experts // 2)
    came = [
        (each, t) for each in inputs for t in range(len(each.x)) if each.routing_map[t, local].any()
    ]
    y, home = buffer.combine(rows, probs, handle)
    again = buffer.dispatch(mine.x, probs=mine.probs, handle=handle)
    of_ranks = mine.routing_map.unflatten(1, (me.num_ranks, LOCAL)).any(dim=2)
    return _same(
        {
            "rows": (rows, torch.stack([each.x[t] for each, t in came])),
            "probs": (probs, torch.stack([each.probs[t, node] for each, t in came])),
            "scales": (scales, None),
            "count": (handle[3].tolist(), [len(came)]),
            "map": (handle[4], torch.stack([each.routing_map[t, local] for each, t in came])),
            "tokens": (handle[5], len(mine.x)),
            "y": (y, mine.x * of_ranks.sum(dim=1, keepdim=True)),
            "home": (home, mine.probs),
            "without probs": (buffer.combine(rows, handle=handle)[1], None),
            "replayed rows": (again[0], rows),
            "replayed probs": (again[1], probs),
            "nodes": (buffer.num_of_nodes, 2),
        }
    )


# ---- K, sizes


def _most_experts(me: Rank, counts: list[int], experts: int) -> tuple[Tensor, Tensor]:
    """A map whose tokens have so many experts."""
    routing_map = torch.zeros(len(counts), experts, dtype=torch.bool)
    for token, count in enumerate(counts):
        routing_map[token, :count] = True
    x = torch.ones(len(counts), HIDDEN, dtype=torch.bfloat16)
    return x.to(me.device), routing_map.to(me.device)


def topk_of_maps(me: Rank, maps: list[list[list[int]]], topk: int | None) -> list[Any]:
    """For each call, ``maps[call][rank]``: the topk of its Buffer, or what it raises."""
    configure(topk=topk)
    buffer, told = made(me), []
    for counts in maps:
        x, routing_map = _most_experts(me, counts[me.rank], LOCAL * me.num_ranks)
        try:
            *_, handle = buffer.dispatch_with_permute(hidden=x, routing_map=routing_map)
            told.append(handle.buffer.topk)
        except ValueError as error:
            told.append(str(error))
    return told


def more_indices(me: Rank) -> list[Any]:
    """topk of the Buffers of calls with indices of 1, 3 and 2 columns."""
    buffer, told = made(me), []
    x = torch.ones(4, HIDDEN, dtype=torch.bfloat16, device=me.device)
    for columns in (1, 3, 2):
        topk_idx = torch.arange(columns, device=me.device).expand(4, columns)
        *_, handle = buffer.dispatch_with_permute(
            hidden=x, topk_idx=topk_idx, num_of_experts=LOCAL * me.num_ranks
        )
        told.append(handle.buffer.topk)
    return told


def repeated_indices(me: Rank) -> list[str]:
    """An expert named twice counts once; its weights add, or its dense prob counts once."""
    buffer = made(me)
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16, device=me.device)
    topk_idx = torch.zeros(1, 2, dtype=torch.int64, device=me.device)
    weights = torch.tensor([[0.25, 0.5]], device=me.device)
    experts = LOCAL * me.num_ranks
    routed = {"hidden": x, "topk_idx": topk_idx, "num_of_experts": experts}
    dense = torch.full((1, experts), 0.25, device=me.device)
    _, added, _, _, handle = buffer.dispatch_with_permute(topk_weights=weights, **routed)
    _, once, *_ = buffer.dispatch_with_permute(probs=dense, **routed)
    rows = torch.ones(handle.inner.num_rows, HIDDEN, dtype=torch.bfloat16, device=me.device)
    _, home = buffer.combine_with_unpermute(hidden=rows, probs=added, handle=handle)
    _, mapped = indices_to_map(topk_idx, weights, 1, experts)
    mine = me.num_ranks if me.rank == 0 else 0
    return _same(
        {
            "added": (added.tolist(), [0.75] * mine),
            "once": (once.tolist(), [0.25] * mine),
            "home": (home.tolist(), [[0.75] + [0.0] * (experts - 1)]),
            "mapped": (mapped.tolist(), home.tolist()),
        }
    )


def sizes(me: Rank, max_tokens: int | None) -> dict[str, Any]:
    """What a HybridEPBuffer says of itself, and of a call with 70 tokens."""
    configure(max_tokens=max_tokens)
    buffer = made(me, max_tokens=10 + me.rank)
    told = {"at first": buffer.configurer.buffer_config.max_num_of_tokens_per_rank}
    x, routing_map = _most_experts(me, [1] * 70, LOCAL * me.num_ranks)
    try:
        *_, handle = buffer.dispatch_with_permute(hidden=x, routing_map=routing_map)
        told["then"] = handle.buffer.max_tokens
    except ValueError as error:
        told["then"] = str(error)
    told["place"] = buffer.rank, buffer.local_rank, buffer.node_rank, buffer.num_of_nodes
    return told


def domain(me: Rank, variable: str, argument: int | None) -> dict[str, Any]:
    """The nodes of a HybridEPBuffer and of its Buffer, by the variable and the argument."""
    with mock.patch.dict(os.environ, {"NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": variable}):
        buffer = made(me, num_of_hybrid_ep_ranks_per_nvlink_domain=argument)
    x, routing_map = _most_experts(me, [1], LOCAL * me.num_ranks)
    *_, handle = buffer.dispatch_with_permute(hidden=x, routing_map=routing_map)
    return {
        "nodes": (buffer.num_of_nodes, handle.buffer.topology.num_nodes),
        "node": (buffer.node_rank, handle.buffer.topology.node),
        "local": (buffer.local_rank, handle.buffer.topology.local_rank),
        "ranks": buffer.num_of_hybrid_ep_ranks_per_nvlink_domain,
    }


def mistakes(me: Rank) -> list[str]:
    """What wrong calls raise, on every rank alike; the right one after them works."""
    buffer = made(me)
    mine = Inputs.of(me.rank, me.num_ranks, tokens=5).to(me.device)
    right = {"hidden": mine.x, "routing_map": mine.routing_map, "probs": mine.probs}
    rows, *_, handle = buffer.dispatch_with_permute(**right)
    wrong = (
        lambda: buffer.dispatch_with_permute(**right, non_blocking=True),
        lambda: buffer.dispatch_with_permute(hidden=mine.x),
        lambda: buffer.dispatch_with_permute(hidden=mine.x, topk_idx=mine.topk_idx),
        lambda: buffer.dispatch_with_permute(
            hidden=mine.x, handle=handle, num_permuted_tokens=10**6
        ),
        lambda: buffer.dispatch_with_permute(hidden=mine.x, handle=(1, 2)),
        lambda: buffer.combine_with_unpermute(hidden=rows),
        lambda: buffer.dispatch(mine.x),
        lambda: buffer.combine(mine.x),
    )
    told = [": ".join(raised_by(each)) for each in wrong]
    again, *_ = buffer.dispatch_with_permute(**right)
    told.append(str(torch.equal(again, rows)))
    return told


# ---- what only GPUs do


def captured(me: Rank) -> list[str]:
    """A CUDA graph of a round trip, replayed with other routing after its Buffer was replaced."""
    configure(topk=TOPK)
    buffer, tokens, pad = made(me, max_tokens=30), 30, 16
    mine = Inputs.of(me.rank, me.num_ranks, tokens=tokens).to(me.device)
    num_rows = -(-me.num_ranks * tokens * TOPK // pad) * pad + LOCAL * pad

    def step() -> dict[str, Tensor]:
        options = {"pad_multiple": pad, "num_permuted_tokens": num_rows, "non_blocking": True}
        rows, probs, _, counts, handle = _dispatch(buffer, mine, "map", **options)
        y, home = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
        parts = {"rows": rows, "probs": probs, "counts": counts, "overflow": handle[-1]}
        return {**parts, "y": y, "home": home}

    graph, results = warmed_up_and_captured(step)
    larger = Inputs.of(me.rank, me.num_ranks, tokens=200).to(me.device)
    _dispatch(buffer, larger, "map")  # a larger Buffer takes the place of the graph's

    faults = []
    for seed in (7, 8):
        inputs = everybody(me, seed, tokens)
        fresh = inputs[me.rank].to(me.device)
        for field in dataclasses.fields(Inputs):
            getattr(mine, field.name).copy_(getattr(fresh, field.name))
        graph.replay()
        torch.cuda.synchronize()
        whole, probs, counts = rows_of(me, inputs, pad)
        behind = num_rows - len(whole)
        wanted = {
            "rows": torch.nn.functional.pad(whole, (0, 0, 0, behind)),
            "probs": torch.nn.functional.pad(probs, (0, behind)),
            "counts": torch.tensor(counts),
            "overflow": torch.zeros(1, dtype=torch.int32),
            "y": fresh.x * fresh.routing_map.sum(dim=1, keepdim=True),
            "home": fresh.probs,
        }
        faults += _same({name: (results[name], wanted[name]) for name in wanted})
    return faults


def more_experts_than_topk(me: Rank, non_blocking: bool) -> list[str]:
    """What two calls say whose tokens have 5 experts, with a topk of 2."""
    configure(topk=2)
    buffer, told = made(me), []
    x, routing_map = _most_experts(me, [5, 1], LOCAL * me.num_ranks)
    options = {"non_blocking": True, "num_permuted_tokens": 100} if non_blocking else {}
    options |= {"hidden": x, "routing_map": routing_map}
    for _ in range(2):
        told.append(what_it_raises(lambda: buffer.dispatch_with_permute(**options), ValueError))
        torch.cuda.synchronize()
    return told
