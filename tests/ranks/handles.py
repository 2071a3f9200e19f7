"""Several dispatches whose handles are alive together, and several Buffers."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from tests import oracle
from tests.cases import Case
from tests.launch import Rank
from tests.ranks.verbs import send


class Layer:
    """A dispatch, its combine and their backward, one step at a time."""

    def __init__(self, me: Rank, buffer: hybrid_ep.Buffer, case: Case) -> None:
        self.me, self.buffer, self.case = me, buffer, case
        self.max_rows = oracle.max_rows(case)
        self.x, self.topk_idx, self.topk_weights, _ = case.leaves(me.rank, me.device)

    def dispatch(self) -> None:
        self.out = hybrid_ep.dispatch(
            self.buffer,
            self.x,
            self.topk_idx,
            self.topk_weights,
            max_rows=self.max_rows,
            align=self.case.align,
        )
        self.layout = self.out.handle.layout.clone()

    def replay(self) -> None:
        """Dispatch again into the same layout, as recomputation does."""
        self.out = hybrid_ep.dispatch(
            self.buffer, self.x, topk_weights=self.topk_weights, handle=self.out.handle
        )

    def combine(self) -> None:
        rows = torch.tanh(self.out.rows)
        self.y = hybrid_ep.combine(self.buffer, rows, self.out.handle, weights=self.out.weights)

    def backward(self) -> None:
        self.y.backward(self.case.values(self.me.rank, "grad y", len(self.y)).to(self.me.device))

    def results(self) -> dict[str, Tensor]:
        assert torch.equal(self.out.handle.layout, self.layout), "the layout changed"
        return {
            "rows": self.out.rows,
            "y": self.y,
            "x": self.x.grad,
            "topk_weights": self.topk_weights.grad,
        }


STEPS = {"D": Layer.dispatch, "R": Layer.replay, "C": Layer.combine, "B": Layer.backward}


def interleave(me: Rank, cases: list[Case], order: str) -> list[dict[str, Tensor]]:
    """``order``: words of a step (see STEPS) and the number of a layer, such as "D0 D1 C1 C0"."""
    buffer = me.buffer(**cases[0].sizes())
    layers = [Layer(me, buffer, case) for case in cases]
    for word in order.split():
        STEPS[word[0]](layers[int(word[1:])])
    buffer.destroy()
    return [layer.results() for layer in layers]


def replay(me: Rank, case: Case, max_rows: int | None) -> dict[str, Tensor]:
    """New tokens, weights and scales through the layout of an earlier dispatch."""
    buffer = me.buffer(**case.sizes())
    inputs = case.inputs(me.rank)
    first = send(me, buffer, replace(inputs, scales=None), max_rows=max_rows, align=case.align)
    send(me, buffer, replace(case, seed=case.seed + 1, routing="uniform").inputs(me.rank))
    new = replace(case, seed=case.seed + 2).inputs(me.rank)
    out = hybrid_ep.dispatch(
        buffer,
        new.x.to(me.device),
        topk_weights=new.weights.to(me.device),
        scales=None if new.scales is None else new.scales.to(me.device),
        handle=first.handle,
    )
    rows = case.values(me.rank, "rows", len(out.rows)).to(me.device)
    results = {
        "rows": out.rows,
        "weights": out.weights,
        "scales": out.scales,
        "overflow": bool(out.handle.overflow),
        "y": hybrid_ep.combine(buffer, rows, out.handle),
        "y of the first": hybrid_ep.combine(buffer, rows, first.handle),
    }
    buffer.destroy()
    return results


def one_way_replays(me: Rank, tokens: int, how_many: int) -> list[Tensor]:
    """Rank 0's tokens go to rank 1, which sends nothing, not to itself either, and is late.

    Nothing but the library itself keeps rank 0 from being several calls ahead.
    """
    buffer = me.buffer(hidden=64, num_experts=2, max_tokens=tokens, topk=1)
    x = torch.arange(tokens * 64, device=me.device).reshape(tokens, 64).bfloat16()
    topk_idx = torch.ones(tokens, 1, dtype=torch.int64, device=me.device)
    mine = tokens if me.rank == 0 else 0
    handle = hybrid_ep.dispatch(buffer, x[:mine], topk_idx[:mine]).handle
    if me.rank == 1:
        time.sleep(0.05)
    sent = [hybrid_ep.dispatch(buffer, x[:mine] + i, handle=handle) for i in range(how_many)]
    buffer.destroy()
    return [out.rows for out in sent]


def subgroups(me: Rank, pair_case: Case, world_case: Case) -> dict[str, Any]:
    """Two groups of two and the world, each with its Buffer, used in turn."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[me.rank // 2]
    pair_rank = dist.get_rank(mine)
    pair = me.buffer(mine, **pair_case.sizes())
    world = me.buffer(**world_case.sizes())
    sent = {
        "pair": send(me, pair, pair_case.inputs(pair_rank)),
        "world": send(me, world, world_case.inputs(me.rank)),
        "pair again": send(me, pair, pair_case.inputs(pair_rank)),
    }
    results = {name: out.rows for name, out in sent.items()}
    rows = world_case.values(me.rank, "rows", len(sent["world"].rows)).to(me.device)
    results["world y"] = hybrid_ep.combine(world, rows, sent["world"].handle)
    rows = pair_case.values(pair_rank, "rows", len(sent["pair"].rows)).to(me.device)
    results["pair y"] = hybrid_ep.combine(pair, rows, sent["pair"].handle)
    pair.destroy()
    world.destroy()
    return results


def many_buffers(me: Rank, case: Case, how_many: int) -> list[Tensor]:
    buffers = [me.buffer(**case.sizes()) for _ in range(how_many)]
    sent = [send(me, buffer, case.inputs(me.rank)) for buffer in buffers]
    for buffer in buffers[::2]:
        buffer.destroy()
    again = [send(me, buffer, case.inputs(me.rank)) for buffer in buffers[1::2]]
    for buffer in buffers:
        buffer.destroy()
    return [out.rows for out in sent + again]


def beside_collectives(me: Rank, case: Case) -> Tensor:
    """A collective in flight on the same group, started by the ranks at other moments."""
    buffer = me.buffer(**case.sizes())
    ones = torch.ones(1 << 16)
    if me.rank == 0:
        reduction = dist.all_reduce(ones, async_op=True)
        out = send(me, buffer, case.inputs(me.rank))
    else:
        out = send(me, buffer, case.inputs(me.rank))
        reduction = dist.all_reduce(ones, async_op=True)
    reduction.wait()
    assert bool((ones == me.num_ranks).all())
    buffer.destroy()
    return out.rows


def train_and_evaluate(me: Rank, case: Case, steps: int) -> list[int]:
    """Live tensors after each step; half of the steps end without a combine or a backward."""
    buffer = me.buffer(**case.sizes())
    x, topk_idx, topk_weights, _ = case.leaves(me.rank, me.device, needs_grad=False)
    x.requires_grad_()

    def forward() -> tuple[hybrid_ep.Dispatched, Tensor]:
        out = hybrid_ep.dispatch(buffer, x, topk_idx, topk_weights)
        return out, hybrid_ep.combine(buffer, out.rows * 2, out.handle, weights=out.weights)

    gc.collect()  # what earlier tests left in cycles
    layouts = []
    live = []
    for step in range(steps):
        if step % 4 == 0:  # evaluation
            with torch.no_grad():
                out, _ = forward()
        elif step % 4 == 1:  # evaluation that forgot no_grad
            out, _ = forward()
        elif step % 4 == 2:  # a dispatch whose result nobody used
            out = hybrid_ep.dispatch(buffer, x, topk_idx)
        else:
            out, y = forward()
            y.sum().backward()
            del y
        layouts.append(weakref.ref(out.handle.layout))
        del out, _
        _ = None
        assert not any(layout() is not None for layout in layouts), "a handle outlived its step"
        live.append(sum(isinstance(o, Tensor) for o in gc.get_objects()))
    buffer.destroy()
    return live


def strided(me: Rank, case: Case) -> list[dict[str, Tensor]]:
    """The same values, contiguous and in every layout that users come up with."""
    buffer = me.buffer(**case.sizes())
    inputs = case.inputs(me.rank)
    x = case.values(me.rank, "x", len(inputs.x)).to(me.device)
    x[:] = x[:1]  # so that it can be expanded
    grad_y = case.values(me.rank, "grad y", len(x)).to(me.device)
    grad_y[:] = grad_y[:, :1]
    tensors = [t.to(me.device) for t in (x, inputs.topk_idx, inputs.weights, inputs.scales)]

    def gapped(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor.clone()], dim=2)[:, :, 0]

    def turned(tensor: Tensor) -> Tensor:
        return tensor.t().contiguous().t()

    def offset(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:1], tensor])[1:]

    def forward_backward(change, x: Tensor, grad_y: Tensor) -> dict[str, Tensor]:
        x = x.detach().requires_grad_()
        _, topk_idx, topk_weights, scales = (change(t) for t in tensors)
        topk_weights = topk_weights.detach().requires_grad_()
        out = hybrid_ep.dispatch(buffer, x, topk_idx, topk_weights, scales=scales)
        rows = change(torch.tanh(out.rows))
        weights = change(out.weights.unsqueeze(1)).squeeze(1)
        y = hybrid_ep.combine(buffer, rows, out.handle, weights=weights)
        grads = torch.autograd.grad(y, (x, topk_weights), grad_y)
        return dict(zip(("rows", "y", "x", "weights"), (out.rows, y, *grads), strict=True))

    results = [forward_backward(lambda tensor: tensor, x, grad_y)]
    results += [forward_backward(f, f(x), f(grad_y)) for f in (gapped, turned, offset)]
    expanded = x[:1].expand(x.shape), grad_y[:, :1].expand(grad_y.shape)
    results.append(forward_backward(lambda tensor: tensor, *expanded))
    buffer.destroy()
    return results


def other_group(me: Rank) -> str:
    """What a Buffer of a pair says in a process whose NVSHMEM job is of four ranks."""
    case = Case("world", num_ranks=4, ranks_per_node=2)
    world = me.buffer(**case.sizes())
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    try:
        me.buffer(pairs[me.rank // 2], **Case("pair").sizes())
    except RuntimeError as error:
        return str(error).removeprefix("the nvshmem backend cannot run: ")
    finally:
        world.destroy()
    return ""
