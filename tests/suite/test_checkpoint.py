"""hybrid_ep.checkpoint: its arguments are those of torch's, and it chooses as the forward did."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
    set_checkpoint_early_stop,
)

import hybrid_ep
from hybrid_ep import maps
from hybrid_ep.ops import replay, verbs
from tests.cases import Case
from tests.checks import same_bytes
from tests.ranks import layers

CASE = Case("checkpoint", num_ranks=1, topk=3, dtype=torch.float32)
TAKEN = [
    {},
    {"use_reentrant": False},
    {"use_reentrant": None},  # the default of torch's
    {"preserve_rng_state": False},
    {"determinism_check": "none"},
    {"debug": False},
    {"context_fn": None},
]


class Block:
    """Dispatch, a product and combine."""

    def __init__(self, alone: Any) -> None:
        self.buffer, inputs = alone.buffer(**CASE.sizes()), CASE.inputs(0)
        self.topk_idx = inputs.topk_idx.to(alone.device)
        self.x = CASE.values(0, "x", len(inputs.x)).to(alone.device).requires_grad_()

    def __call__(self, x: Tensor, factor: float = 2.0) -> Tensor:
        out = hybrid_ep.dispatch(self.buffer, x, self.topk_idx, max_rows=128)
        return hybrid_ep.combine(self.buffer, torch.tanh(out.rows * factor), out.handle)

    def gradient(self, y: Tensor) -> Tensor:
        return torch.autograd.grad(y.sum(), self.x)[0]


@pytest.mark.parametrize("settings", TAKEN, ids=str)
def test_settings_of_torchs_checkpoint_are_taken(alone, settings):
    block = Block(alone)
    want = block.gradient(block(block.x, factor=3.0))
    y = hybrid_ep.checkpoint(block, block.x, factor=3.0, **settings)
    same_bytes(block.gradient(y), want, "gradient of x")


def test_use_reentrant_is_taken_in_a_compiled_graph(alone):
    block = Block(alone)

    def checkpointed(x: Tensor) -> Tensor:
        return hybrid_ep.checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)

    torch._dynamo.reset()
    y = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)(block.x)
    same_bytes(block.gradient(y), block.gradient(block(block.x)), "gradient of x")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"use_reentrant": True}, "use_reentrant must be False, got True: .* routing must be"),
        ({"context_fn": noop_context_fn}, "context_fn must be left out, got .*SAC_SAVE_OPS"),
    ],
    ids=["use_reentrant", "context_fn"],
)
def test_settings_that_would_lose_the_routing_are_refused(alone, settings, text):
    block = Block(alone)
    with pytest.raises(ValueError, match=text):
        hybrid_ep.checkpoint(block, block.x, **settings)


# ---- what is replayed; a router that says something else each time is in the region


class Noisy(layers.NoisyBlock):
    """On one rank, with the tokens whose gradient is wanted."""

    def __init__(self, alone: Any, max_rows: int | None = None) -> None:
        super().__init__(alone, CASE, max_rows)
        self.make_buffer()
        self.x = CASE.values(0, "x", CASE.num_tokens(0)).to(alone.device).requires_grad_()

    def gradient(self, y: Tensor, **settings: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y.sin().sum(), (self.x, self.router), **settings)


def same_gradients(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for actual, expected, name in zip(got, want, ("x", "router"), strict=True):
        same_bytes(actual, expected, name)


@pytest.fixture
def stored(alone) -> tuple[Tensor, ...]:
    """The gradients of a noisy block that is not checkpointed."""
    block = Noisy(alone)
    return block.gradient(block(block.x))


RIGHT = [
    "hybrid_ep.checkpoint",
    "hybrid_ep.checkpoint in hybrid_ep.checkpoint",
    "hybrid_ep.checkpoint in plain checkpoint",
    "hybrid_ep.checkpoint in SAC_SAVE_OPS",
    "SAC_SAVE_OPS in hybrid_ep.checkpoint",
    "hybrid_ep.checkpoint in plain checkpoint in hybrid_ep.checkpoint",
    "hybrid_ep.checkpoint in hybrid_ep.checkpoint in hybrid_ep.checkpoint",
]


def run_in(names: str, block: Any, x: Tensor) -> Tensor:
    """``block(x)`` in checkpoints, named from the inside out."""
    for name in names.split(" in "):
        block = functools.partial(layers.RUNS[name], block)
    return block(x)


@pytest.mark.parametrize("early_stop", [True, False], ids=["early_stop", ""])
@pytest.mark.parametrize("names", RIGHT)
def test_nested_checkpoints_choose_as_the_forward_did(alone, stored, names, early_stop):
    block = Noisy(alone)
    with set_checkpoint_early_stop(early_stop):
        y = run_in(names, block, block.x)
        same_gradients(block.gradient(y), stored)
    assert block.forwards >= 2


@pytest.mark.parametrize("bound", [None, 128], ids=["exact", "bounded"])
def test_a_region_is_recomputed_any_number_of_times(alone, stored, bound):
    block = Noisy(alone, bound)
    y = hybrid_ep.checkpoint(block, block.x)
    for _ in range(3):
        same_gradients(block.gradient(y, retain_graph=True), stored)
    assert block.calls.count("dispatch_fresh") == 1 and "route" not in block.calls
    assert block.forwards == 4


def test_nobody_watches_ops_in_a_region(alone):
    """A dispatch mode would send each op through Python, and dispatch the slow way."""
    block, seen = Block(alone), []

    def looking(x: Tensor) -> Tensor:
        seen.append(verbs.watched(x))
        return block(x)

    block.gradient(hybrid_ep.checkpoint(looking, block.x))
    assert seen == [False, False]


@pytest.mark.parametrize("bound", [None, 128], ids=["exact", "bounded"])
@pytest.mark.parametrize("watched", ["forward", "recomputation"])
def test_one_run_of_a_region_may_be_profiled(alone, stored, watched, bound):
    """Then dispatch is two ops in one run, and one call of the backend in the other."""

    def profiled(run: str) -> Any:
        activities = [torch.profiler.ProfilerActivity.CPU]
        is_on = run == watched
        return torch.profiler.profile(activities=activities) if is_on else contextlib.nullcontext()

    block = Noisy(alone, bound)
    with profiled("forward"):
        y = hybrid_ep.checkpoint(block, block.x)
    with profiled("recomputation"):
        same_gradients(block.gradient(y), stored)
    assert block.calls.count("route") + block.calls.count("dispatch_fresh") == 1


def test_a_second_derivative(alone):
    def second(run: Any) -> tuple[Tensor, ...]:
        block = Noisy(alone, 128)
        gradient, _ = block.gradient(run(block, block.x), create_graph=True)
        return block.gradient(gradient)

    for got, want in zip(second(hybrid_ep.checkpoint), second(layers.RUNS["stored"]), strict=True):
        torch.testing.assert_close(got, want)


def test_a_backward_within_a_region(alone, stored):
    """The inner region is recomputed in the forward of the outer one, and in its recomputation."""
    outer, inner = Noisy(alone), Noisy(alone)

    def block(x: Tensor) -> Tensor:
        same_gradients(inner.gradient(hybrid_ep.checkpoint(inner, inner.x)), stored)
        inner.forwards = 0
        return outer(x)

    same_gradients(outer.gradient(hybrid_ep.checkpoint(block, outer.x)), stored)


def test_another_thread_recomputes_while_a_region_runs(alone, stored):
    """As autograd does on a GPU: its threads have regions of their own."""
    first, second, found = Noisy(alone), Noisy(alone), []
    y = hybrid_ep.checkpoint(first, first.x)

    def block(x: Tensor) -> Tensor:
        if not found:
            thread = threading.Thread(target=lambda: found.append(first.gradient(y)))
            thread.start()
            thread.join()
        return second(x)

    same_gradients(second.gradient(hybrid_ep.checkpoint(block, second.x)), stored)
    same_gradients(found[0], stored)


@pytest.mark.parametrize("fails_in", [1, 2], ids=["forward", "recomputation"])
def test_after_an_exception_nothing_is_kept_or_replayed(alone, stored, fails_in):
    block = Noisy(alone)

    def failing(x: Tensor) -> Tensor:
        y = block(x)
        if block.forwards == fails_in:
            raise KeyError("in the region")
        return y

    with pytest.raises(KeyError, match="in the region"), set_checkpoint_early_stop(False):
        block.gradient(hybrid_ep.checkpoint(failing, block.x))
    assert not replay.in_region()
    block.forwards, scores = 0, torch.arange(4.0)
    assert [int(each.topk(1).indices) for each in (scores, -scores)] == [3, 0]
    same_gradients(block.gradient(block(block.x)), stored)
    block.forwards = 0
    same_gradients(block.gradient(hybrid_ep.checkpoint(block, block.x)), stored)


def test_other_calls_in_the_recomputation_are_refused(alone):
    block, scores = Block(alone), torch.rand(4)
    times = iter(range(1, 3))

    def growing(x: Tensor) -> Tensor:
        for _ in range(next(times)):
            scores.topk(2)
        return block(x)

    with pytest.raises(RuntimeError, match="that made topk 1 times, got one more"):
        block.gradient(hybrid_ep.checkpoint(growing, block.x))


@pytest.mark.parametrize("written", ["counts", "offsets", "layout"])
def test_of_what_dispatch_returned_the_counts_may_be_written_to(alone, written):
    block, seen = Block(alone), []

    def writing(x: Tensor) -> Tensor:
        out = hybrid_ep.dispatch(block.buffer, x, block.topk_idx)
        y = hybrid_ep.combine(block.buffer, torch.tanh(out.rows), out.handle)
        seen.append(out.counts.tolist())
        if written == "counts":  # as dist.all_reduce does
            out.counts.zero_()
        else:
            getattr(out.handle, written).add_(0)
        return y.cos()

    y = hybrid_ep.checkpoint(writing, block.x)
    if written != "counts":
        with pytest.raises(RuntimeError, match=r"route returned .* must not be written to"):
            block.gradient(y)
        return
    for _ in range(2):
        torch.autograd.grad(y.sum(), block.x, retain_graph=True)
    assert seen == [seen[0]] * 3 and sum(seen[0]) > 0


# ---- topk


TOPKS = {
    "Tensor.topk": lambda x: x.topk(2),
    "torch.topk": lambda x: torch.topk(x, 2),
    "by_name": lambda x: torch.topk(input=x, k=2, dim=0, largest=False, sorted=True),
    "of_the_smallest": lambda x: x.topk(3, 0, False),
    "aten.topk": lambda x: torch.ops.aten.topk(x, 2),
    "aten.topk.default": lambda x: torch.ops.aten.topk.default(x, 2, 0),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", TOPKS)
def test_topk_gives_the_values_of_the_forward_whoever_writes_to_them(alone, way, compiled):
    """In compiled code the sigmoid may be in the place of the values."""
    scores = torch.randn(8, 5, device=alone.device)
    leaf = scores.clone().requires_grad_()

    def scored(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = TOPKS[way](x)
        return values.sigmoid_(), indices

    torch._dynamo.reset()
    score = torch.compile(scored, backend="aot_eager", fullgraph=True) if compiled else scored
    seen, signs = [], iter((1, -1, -1))

    def block(x: Tensor) -> Tensor:
        y, indices = score(x * next(signs))
        seen.append((y.detach().clone(), indices))
        return y.cos()

    y = hybrid_ep.checkpoint(block, leaf)
    (want,) = torch.autograd.grad(TOPKS[way](leaf)[0].sigmoid().cos().sum(), leaf)
    for _ in range(2):
        (got,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
        same_bytes(got, want, "gradient of the scores")
    for again in seen[1:]:
        for got, want in zip(again, seen[0], strict=True):
            same_bytes(got, want, "values, then indices")


def test_topk_in_a_region_is_that_of_torch(alone):
    scores = torch.randn(3, 4, device=alone.device, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        found = x.topk(2)
        assert found[0] is found.values and found[1] is found.indices
        assert found.values.requires_grad and not found.indices.requires_grad
        into = torch.empty_like(found.values), torch.empty_like(found.indices)
        torch.topk(x.detach(), 2, out=into)
        assert torch.equal(into[0], found.values) and torch.equal(into[1], found.indices)
        assert torch.tensor(2.0, device=x.device).topk(1).values.item() == 2
        return found.values.square()

    assert torch.autograd.gradgradcheck(
        lambda x: hybrid_ep.checkpoint(block, x), scores.double().detach().requires_grad_()
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.topk(input=x, k=2, axis=0).values,
        lambda x: x.topk(2, axis=1, largest=False)[0],
        lambda x: torch.ops.aten.topk.default(self=x, k=2)[0],
        lambda x: torch.func.vmap(lambda row: row.topk(2).values)(x),
    ],
    ids=["input_axis", "axis", "self", "vmap"],
)
def test_however_topk_is_called_in_a_region(alone, call):
    x = torch.randn(4, 6, device=alone.device, requires_grad=True)
    same_bytes(hybrid_ep.checkpoint(call, x), call(x), "values")


def test_a_region_hides_its_copies_from_a_policy_that_saves_clones(alone):
    saved = {torch.ops.aten.topk.default, torch.ops.aten.clone.default}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(x: Tensor) -> Tensor:
        chosen = x.topk(6).values
        return (x * 3).clone().sin() * chosen.cos()

    def within(x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

    x = torch.randn(4, 6, device=alone.device, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    (found,) = torch.autograd.grad(hybrid_ep.checkpoint(within, x).sum(), x)
    same_bytes(found, expected, "gradient of x")


def test_what_a_kernel_found_in_a_map_is_replayed(alone, monkeypatch):
    found = [torch.tensor([[1, 2]]), torch.tensor([[0, 3]])]  # of the forward; of another map
    monkeypatch.setattr(maps.kernels, "serve", lambda device: True)
    monkeypatch.setattr(maps.kernels, "map_to_topk", lambda *inputs: (found.pop(0), None, None))
    seen = []

    def region(x: Tensor) -> Tensor:
        topk_idx, _, _ = hybrid_ep.map_to_topk(x > 0, None, 2)
        seen.append(topk_idx.tolist())
        return x.sin()

    x = torch.ones((1, 4), requires_grad=True)
    hybrid_ep.checkpoint(region, x).sum().backward()
    assert seen == [[[1, 2]], [[1, 2]]]
