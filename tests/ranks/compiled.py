"""Programs of several micro-batches, eager and compiled: results, and the order of the verbs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import hybrid_ep
from tests.cases import Case
from tests.launch import Rank
from tests.ranks import layers
from tests.ranks.verbs import note_calls


@dataclass(frozen=True)
class Program:
    """Micro-batches whose verbs share a compiled graph.

    Attributes:
        name: the condition that is tested.
        steps: words of a step and the number of a micro-batch, in program order. ``D``: dispatch,
            ``R``: dispatch into the layout of an earlier one, ``C``: combine, ``L``: dispatch and
            combine in a checkpointed region. With a ``-`` behind it, the result is not used.
        tokens: T of each micro-batch on rank 0; odd ranks have them in the opposite order.
        exact: without ``max_rows``.
        dynamic: of torch.compile.
        training: the backward runs as well.
        buffers: micro-batch i uses Buffer ``i % buffers``.
        checkpoint: of ``layers.RUNS``, for ``L``.
    """

    name: str
    steps: str
    tokens: tuple[int, ...] = (16, 512)
    exact: bool = False
    dynamic: bool = False
    training: bool = False
    buffers: int = 1
    checkpoint: str = "stored"

    def __str__(self) -> str:
        return self.name

    @property
    def order(self) -> list[str]:
        """The verbs that every rank must make; those after ``|`` in the backward."""
        verbs = {"D": ["route", "dispatch"], "R": ["dispatch"], "C": ["combine"]}
        verbs["L"] = [*verbs["D"], *verbs["C"]]
        words = [(word[0], word[1]) for word in self.steps.split()]
        forward = [f"{verb} {batch}" for step, batch in words for verb in verbs[step]]
        if not self.training:
            return forward
        transposed = {"dispatch": "combine", "combine": "combine_backward"}
        calls = [call.split() for call in reversed(forward)]
        return [
            *forward,
            "|",
            *(f"{transposed[verb]} {batch}" for verb, batch in calls if verb != "route"),
        ]

    def tokens_of(self, rank: int) -> tuple[int, ...]:
        return self.tokens[::-1] if rank % 2 else self.tokens

    def case(self, num_ranks: int) -> Case:
        return Case(
            self.name, num_ranks, max_tokens=max(self.tokens), hidden=64, dtype=torch.float32
        )


class MicroBatches:
    """A program with its Buffers and inputs on one rank."""

    def __init__(self, me: Rank, program: Program) -> None:
        self.program, case = program, program.case(me.num_ranks)
        self.tokens = program.tokens_of(me.rank)
        self.buffers = [me.buffer(**case.sizes()) for _ in range(program.buffers)]
        self.max_rows = None if program.exact else me.num_ranks * max(self.tokens) * case.topk
        self.weight = case.values(0, "experts", case.hidden).to(me.device) / 8
        self.x, self.topk_idx, self.topk_weights, self.handles = [], [], [], []
        for batch, tokens in enumerate(self.tokens):
            ragged = Case(**{**vars(case), "tokens": (tokens,), "seed": batch})
            x, topk_idx, weights, _ = ragged.leaves(me.rank, me.device, program.training)
            self.x.append(x)
            self.topk_idx.append(topk_idx)
            self.topk_weights.append(weights)
            if "R" in program.steps:
                self.handles.append(hybrid_ep.dispatch(self.buffers[0], x, topk_idx).handle)
        self.calls: list[str] = []
        for buffer in self.buffers:
            note_calls(buffer, ("route", "dispatch", "combine", "combine_backward"), self._note)

    def _note(self, verb: str, *args: Any, **sizes: Any) -> None:
        tokens = sizes["num_tokens"] if verb == "combine" else args[0].shape[0]
        self.calls.append(f"{verb} {self.tokens.index(tokens)}")

    def forward(self, xs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        sent, used = {}, []
        for word in self.program.steps.split():
            batch, unused = int(word[1]), word.endswith("-")
            buffer = self.buffers[batch % len(self.buffers)]
            x, topk_idx, w = xs[batch], self.topk_idx[batch], weights[batch]
            if word[0] == "D":
                made = hybrid_ep.dispatch(buffer, x, topk_idx, w, max_rows=self.max_rows)
                sent[batch] = made
            elif word[0] == "R":
                made = hybrid_ep.dispatch(buffer, x, None, w, handle=self.handles[batch])
                sent[batch] = made
            elif word[0] == "C":
                made = sent[batch]
                rows = made.rows @ self.weight
                made = hybrid_ep.combine(buffer, rows, made.handle, weights=made.weights)
                if not unused:
                    used.append(made)
            else:
                run = layers.RUNS[self.program.checkpoint]
                used.append(run(self.layer(buffer, topk_idx, w), x))
        return used

    def layer(self, buffer: hybrid_ep.Buffer, topk_idx: Tensor, weights: Tensor) -> Any:
        def layer(x: Tensor) -> Tensor:
            out = hybrid_ep.dispatch(buffer, x, topk_idx, weights, max_rows=self.max_rows)
            rows = torch.tanh(out.rows @ self.weight) @ self.weight
            return hybrid_ep.combine(buffer, rows, out.handle, weights=out.weights)

        return layer

    def run(self, forward: Any) -> dict[str, Any]:
        """Outputs and gradients, and the verbs that made them."""
        self.calls.clear()
        leaves = [*self.x, *self.topk_weights]
        ys = forward(self.x, self.topk_weights)
        gradients: tuple[Tensor, ...] = ()
        if self.program.training:
            self.calls.append("|")
            gradients = torch.autograd.grad(ys, leaves, [torch.cos(y.detach()) for y in ys])
        return {"values": [*ys, *gradients], "calls": list(self.calls)}


def run(me: Rank, program: Program, cache: str) -> dict[str, Any]:
    """What the program gives in eager mode and compiled."""
    batches = MicroBatches(me, program)
    eager = batches.run(batches.forward)
    with inductor(cache):
        compiled = torch.compile(batches.forward, fullgraph=True, dynamic=program.dynamic)
        found = batches.run(compiled)
    for buffer in batches.buffers:
        buffer.destroy()
    return {"eager": eager, "compiled": found}


def in_flight(me: Rank, program: Program, cache: str) -> dict[str, Any]:
    """One compiled layer for each micro-batch in turn; the backwards run after all forwards."""
    batches = MicroBatches(me, program)

    def layer(x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        return batches.layer(batches.buffers[0], topk_idx, weights)(x)

    def forward(layer: Any) -> Any:
        return lambda xs, weights: [
            layer(*inputs) for inputs in zip(xs, batches.topk_idx, weights, strict=True)
        ]

    eager = batches.run(forward(layer))
    with inductor(cache):
        compiled = torch.compile(layer, fullgraph=True, dynamic=program.dynamic)
        found = batches.run(forward(compiled))
    batches.buffers[0].destroy()
    return {"eager": eager, "compiled": found}


def from_disk(me: Rank, case: Case, cache: str) -> dict[str, Any]:
    """Outputs of a compiled layer, and how often the cache on disk had its code the second time."""
    buffer = me.buffer(**case.sizes())
    x, topk_idx, _, _ = case.leaves(0, me.device, needs_grad=False)

    def layer(x: Tensor, topk_idx: Tensor) -> tuple[Tensor, Tensor]:
        out = hybrid_ep.dispatch(buffer, x, topk_idx, max_rows=64)
        return hybrid_ep.combine(buffer, torch.tanh(out.rows), out.handle), out.counts + 0

    want = layer(x, topk_idx)
    with inductor(cache):
        torch.compile(layer, fullgraph=True)(x, topk_idx)
    torch._dynamo.utils.counters.clear()
    with inductor(cache):
        found = torch.compile(layer, fullgraph=True)(x, topk_idx)
    counters = torch._dynamo.utils.counters
    hits = (
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )
    buffer.destroy()
    return {"eager": want, "compiled": found, "hits": hits}


@contextlib.contextmanager
def cheap_inductor(cache: str) -> Iterator[None]:
    """Torch's compile caches, which do not notice changes of our code, in a folder of the test's.

    Compiled in this process, and scalar on the CPU: the first graph then costs 7 s instead of 15.
    """
    cheap = {"compile_threads": 1, "cpp.vec_isa_ok": False}
    with (
        mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": cache}),
        torch._inductor.config.patch(cheap),
    ):
        yield


@contextlib.contextmanager
def inductor(cache: str) -> Iterator[None]:
    """That, and sizes that an op decides are captured; nothing compiled earlier is known."""
    torch._dynamo.reset()
    with cheap_inductor(cache), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
