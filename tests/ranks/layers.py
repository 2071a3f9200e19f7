"""A small MoE layer over the ranks, and the same layer on one process without any dispatch."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import hybrid_ep
from hybrid_ep.moe import MoELayer
from tests.cases import Case
from tests.launch import Rank
from tests.ranks.verbs import note_calls


def expert_weights(case: Case) -> Tensor:
    """``[E, H, H]`` in fp64, the same on all ranks."""
    shape = (case.num_experts, case.hidden, case.hidden)
    return torch.randn(shape, generator=case.generator(0, "experts"), dtype=torch.float64)


def token_values(case: Case, rank: int, purpose: str) -> Tensor:
    return case.values(rank, purpose, case.num_tokens(rank)).double()


def experts(rows: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """``tanh(rows @ weights[e])`` for each local expert's rows; NaN elsewhere."""
    y = [
        torch.tanh(rows[begin:end] @ weight)
        for begin, end, weight in zip(offsets[:-1], offsets[1:], weights, strict=True)
    ]
    rest = rows[int(offsets[-1]) :] * float("nan")
    return torch.cat([*y, rest])


def copied(me: Rank, case: Case) -> tuple[Tensor, Tensor]:
    """What a MoELayer and its deep copy return for the same tokens."""
    layer = MoELayer(me.buffer(**case.sizes()), ffn_hidden=8)
    x = case.values(me.rank, "x", case.num_tokens(me.rank)).to(me.device)
    results = tuple(each(x).y.detach() for each in (layer, copy.deepcopy(layer)))
    layer.buffer.destroy()
    return results


def moe(me: Rank, case: Case, max_rows: int | None, weighted_by: str) -> dict[str, Tensor]:
    """Gradients of the layer in the target's widest dtype; ``weighted_by``: who has the gate."""
    buffer = me.buffer(**case.sizes())
    inputs = case.inputs(me.rank)
    first = me.rank * case.experts_per_rank
    leaves = (
        token_values(case, me.rank, "x"),
        inputs.weights,
        expert_weights(case)[first : first + case.experts_per_rank],
    )
    x, gate, weights = (t.to(me.device, me.target.widest).requires_grad_() for t in leaves)
    topk_idx = inputs.topk_idx.to(me.device)
    out = hybrid_ep.dispatch(buffer, x, topk_idx, gate, max_rows=max_rows, align=case.align)
    rows = experts(out.rows, out.offsets, weights)
    if weighted_by == "combine":
        y = hybrid_ep.combine(buffer, rows, out.handle, weights=out.weights)
    else:
        y = hybrid_ep.combine(buffer, rows * out.weights.unsqueeze(1), out.handle)
    y.backward(token_values(case, me.rank, "grad y").to(y))
    buffer.destroy()
    return {"y": y, "x": x.grad, "gate": gate.grad, "experts": weights.grad}


def dense_moe(case: Case) -> dict[str, list[Tensor]]:
    """What ``moe`` must give on each rank, from one process that holds all tokens and experts."""
    ranks = range(case.num_ranks)
    x = torch.cat([token_values(case, rank, "x") for rank in ranks]).requires_grad_()
    inputs = case.all_inputs()
    topk_idx = torch.cat([i.topk_idx.long() for i in inputs])
    gate = torch.cat([i.weights.double() for i in inputs]).requires_grad_()
    weights = expert_weights(case).requires_grad_()
    by_expert = torch.tanh(torch.einsum("th,ehg->teg", x, weights))
    chosen = by_expert.gather(1, topk_idx.clamp(min=0)[:, :, None].expand(-1, -1, case.hidden))
    y = torch.where(topk_idx[:, :, None] >= 0, gate[:, :, None] * chosen, 0.0).sum(dim=1)
    y.backward(torch.cat([token_values(case, rank, "grad y") for rank in ranks]))
    tokens = [case.num_tokens(rank) for rank in ranks]
    return {
        "y": list(y.detach().split(tokens)),
        "x": list(x.grad.split(tokens)),
        "gate": list(gate.grad.split(tokens)),
        "experts": list(weights.grad.split(case.experts_per_rank)),
    }


@dataclass
class NoisyBlock:
    """Router, dispatch, experts, combine; every forward after the first routes otherwise."""

    me: Rank
    case: Case
    max_rows: int | None = None

    def __post_init__(self) -> None:
        generator = self.case.generator(0, "router")
        shape = (self.case.hidden, self.case.num_experts)
        self.router = torch.randn(shape, generator=generator).to(self.me.device).requires_grad_()
        self.forwards = 0
        self.buffer: hybrid_ep.Buffer | None = None
        self.calls: list[str] = []

    def make_buffer(self) -> None:
        self.buffer = self.me.buffer(**self.case.sizes())
        names = ("route", "dispatch", "dispatch_fresh", "combine", "combine_backward")
        note_calls(self.buffer, names, lambda verb, *_, **__: self.calls.append(verb))

    def __call__(self, x: Tensor) -> Tensor:
        if self.buffer is None:
            self.make_buffer()
        noise = torch.zeros(self.router.shape[1], device=x.device)
        noise[0] = 100.0 * self.forwards  # in the recomputation all tokens want expert 0
        self.forwards += 1
        return self.layer(x, noise)

    def layer(self, x: Tensor, noise: Tensor) -> Tensor:
        scores, topk_idx = torch.topk(x @ self.router + noise, self.case.num_slots)
        out = hybrid_ep.dispatch(
            self.buffer, x, topk_idx, scores.softmax(dim=1), max_rows=self.max_rows
        )
        rows = torch.tanh(out.rows)
        return hybrid_ep.combine(self.buffer, rows, out.handle, weights=out.weights)

    def gradients(self, run) -> dict[str, object]:
        """Of x and the router, and the calls that forward and backward made."""
        case, rank = self.case, self.me.rank
        x = case.values(rank, "x", case.num_tokens(rank)).to(self.me.device).requires_grad_()
        y = run(self, x)
        forward, self.calls = self.calls, []
        y.backward(case.values(rank, "grad y", len(y)).to(self.me.device))
        self.buffer.destroy()
        return {
            "y": y,
            "x": x.grad,
            "router": self.router.grad,
            "forward": forward,
            "backward": self.calls,
            "forwards": self.forwards,
        }


def _policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    saved = (*hybrid_ep.SAC_SAVE_OPS, torch.ops.aten.topk.default)
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(function, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


def _plain(function, x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


RUNS = {
    "stored": lambda block, x: block(x),
    "hybrid_ep.checkpoint": hybrid_ep.checkpoint,
    "SAC_SAVE_OPS": _selective,
    "plain checkpoint": _plain,
}


def recompute(
    me: Rank, case: Case, max_rows: int | None, run: str, build_inside: bool
) -> dict[str, object]:
    block = NoisyBlock(me, case, max_rows)
    if not build_inside:
        block.make_buffer()
    return block.gradients(RUNS[run])


def probability_path(me: Rank, case: Case) -> bool:
    """Whether a hook on the router's weight fires, as data-parallel training needs it to."""
    block = NoisyBlock(me, case)
    fired: list[Tensor] = []
    block.router.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad))
    block.gradients(RUNS["stored"])
    total = fired[0].detach().cpu().clone()
    if me.num_ranks > 1:
        dist.all_reduce(total)
    return len(fired) == 1 and bool(total.abs().sum() > 0)
