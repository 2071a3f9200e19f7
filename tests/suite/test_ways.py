"""The three ways of hybrid_ep/ops/calls.py: who gets which, and that all give the same."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import hybrid_ep
from hybrid_ep import Dispatched
from hybrid_ep.ops import rules, verbs
from tests import oracle, targets
from tests.cases import FP8, Case, params
from tests.checks import same_bytes

pytestmark = pytest.mark.not_on("torch_gpu", why=targets.SAME_PYTHON)

CASE = Case("ways", num_ranks=1, topk=3, dtype=torch.float32)
CASES = [
    CASE,
    replace(CASE, name="bf16_overflow", dtype=torch.bfloat16, max_rows="third"),
    replace(CASE, name="holes_and_padding", routing="duplicates", align=4, max_rows="more"),
    replace(CASE, name="scales", num_scales=2),
    replace(CASE, name="no_tokens", tokens=(0,)),
]


def as_ops() -> contextlib.AbstractContextManager:
    return mock.patch.object(verbs, "watched", lambda *tensors: True)


class Layer:
    """Dispatch and a weighted combine of one rank, and what it takes."""

    def __init__(self, alone, case: Case) -> None:
        self.case, self.buffer = case, alone.buffer(**case.sizes())
        self.x, self.topk_idx, self.weights, self.scales = case.leaves(0, alone.device)
        self.grad_y = case.values(0, "grad y", len(self.x)).to(alone.device)
        self.sizing = {"max_rows": oracle.max_rows(case), "align": case.align}

    def __call__(self, x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        out = hybrid_ep.dispatch(
            self.buffer, x, self.topk_idx, weights, scales=self.scales, **self.sizing
        )
        y = hybrid_ep.combine(self.buffer, torch.tanh(out.rows), out.handle, weights=out.weights)
        plain = hybrid_ep.combine(self.buffer, out.rows, out.handle)
        replayed = hybrid_ep.dispatch(self.buffer, x * 2, None, weights, handle=out.handle)
        total = y + plain + hybrid_ep.combine(self.buffer, replayed.rows, replayed.handle)
        scales = () if out.scales is None else (out.scales,)
        return total, out.rows, out.weights, out.counts, *scales

    def with_gradients(self) -> list[Tensor]:
        outputs = self(self.x, self.weights)
        return [*outputs, *self.gradients(outputs)]

    def gradients(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs[0], (self.x, self.weights), self.grad_y)


@params(CASES)
def test_all_ways_give_the_same(alone, case):
    layer = Layer(alone, case)
    by_function = layer.with_gradients()
    with as_ops():
        by_op = layer.with_gradients()
    with torch.no_grad():
        at_once = layer(layer.x, layer.weights)
    for got, want in zip(by_function, by_op, strict=True):
        same_bytes(got.detach(), want.detach(), "Function and op")
    for got, want in zip(at_once, by_op, strict=False):
        same_bytes(got, want.detach(), "at once and op")


@pytest.mark.not_on("nvlink", "nodes", why="gradgradcheck takes float64, which no kernel moves")
@pytest.mark.parametrize("way", [contextlib.nullcontext, as_ops])
def test_second_derivatives(alone, way):
    case = replace(CASE, tokens=(3,), hidden=4)
    buffer, inputs = alone.buffer(**case.sizes()), case.inputs(0)
    x = case.values(0, "x", 3).to(alone.device, torch.float64).requires_grad_()
    weights = inputs.weights.to(alone.device, torch.float64).requires_grad_()
    topk_idx = inputs.topk_idx.to(alone.device)

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        out = hybrid_ep.dispatch(buffer, x, topk_idx, weights)
        return hybrid_ep.combine(buffer, torch.tanh(out.rows), out.handle, weights=out.weights)

    with way():
        assert torch.autograd.gradgradcheck(layer, (x, weights))


@pytest.mark.parametrize("way", [contextlib.nullcontext, as_ops])
def test_weights_get_their_gradient_beside_rows_of_fp8(alone, way):
    case = replace(CASE, dtype=torch.bfloat16)
    buffer, inputs, device = alone.buffer(**case.sizes()), case.inputs(0), alone.device
    narrow = torch.randn(inputs.x.shape).to(device)
    topk_idx, weights = inputs.topk_idx.to(device), inputs.weights.to(device)

    def gradient(x: Tensor) -> Tensor:
        leaf = weights.clone().requires_grad_()
        out = hybrid_ep.dispatch(buffer, x, topk_idx, leaf)
        loss = (out.rows.float().sum(dim=1) * out.weights).sum()
        return torch.autograd.grad(loss, leaf)[0]

    with way():
        got = gradient(narrow.to(FP8))
    same_bytes(got, gradient(narrow.to(FP8).bfloat16()), "gradient of the weights")


# ---- who gets which


class Names(TorchDispatchMode):
    """The ops of ours that a dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "hybrid_ep":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


FORWARD = ["route", "dispatch", "combine", "combine", "dispatch", "combine"]


def test_eager_calls_make_no_ops(alone):
    layer = Layer(alone, CASE)

    def refuse(*args):
        raise AssertionError("an op was made")

    with contextlib.ExitStack() as stack:
        for op in ("route_op", "dispatch_op", "combine_op", "combine_backward_op"):
            stack.enter_context(mock.patch.object(verbs, op, refuse))
        layer.with_gradients()


def test_a_dispatch_mode_sees_forward_and_backward(alone):
    layer = Layer(alone, CASE)
    with Names() as names, torch.no_grad():
        layer(layer.x, layer.weights)
    assert names.seen == FORWARD
    with Names() as names:
        layer.with_gradients()
    assert names.seen[: len(FORWARD)] == FORWARD
    backward = ["combine"] * 2 + ["combine_backward"] + ["dispatch"] * 2
    assert sorted(names.seen[len(FORWARD) :]) == backward


def test_a_profile_names_the_ops(alone):
    layer = Layer(alone, CASE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer.with_gradients()
    names = {event.key for event in profile.key_averages()}
    verbs = ("route", "dispatch", "combine", "combine_backward")
    assert {f"hybrid_ep::{verb}" for verb in verbs} <= names


def names_in(graph: torch.fx.Graph) -> list[str]:
    targets = (node.target for node in graph.nodes if node.op == "call_function")
    return [target._opname for target in targets if getattr(target, "namespace", "") == "hybrid_ep"]


@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_a_traced_graph_holds_the_ops(alone, tracing_mode):
    layer = Layer(alone, replace(CASE, max_rows="more"))

    def traceable(x: Tensor, weights: Tensor, topk_idx: Tensor) -> tuple[Tensor, ...]:
        layer.topk_idx = topk_idx
        return layer(x, weights)

    arguments = layer.x.detach(), layer.weights.detach(), layer.topk_idx
    traced = make_fx(traceable, tracing_mode=tracing_mode)(*arguments)
    assert names_in(traced.graph) == FORWARD


def test_a_compiled_graph_holds_the_ops(alone):
    layer = Layer(alone, replace(CASE, max_rows="more"))
    graphs = []

    def keep(module: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(module.graph)
        return module

    torch._dynamo.reset()
    compiled = torch.compile(layer.__call__, fullgraph=True, backend=keep)
    want = layer(layer.x, layer.weights)
    for got, wanted in zip(compiled(layer.x, layer.weights), want, strict=True):
        same_bytes(got.detach(), wanted.detach(), "compiled")
    (graph,) = graphs
    assert names_in(graph) == FORWARD


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_the_functional_ops(alone, strict):
    """It may not write a tensor of the process; unused ops stay nevertheless."""
    if strict and torch.__version__ < "2.7":
        pytest.skip("torch 2.6 does not say that Dynamo traces for export")
    layer = Layer(alone, replace(CASE, max_rows="more"))

    class Module(torch.nn.Module):
        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            hybrid_ep.dispatch(layer.buffer, x, layer.topk_idx, max_rows=64)
            return layer(x, weights)[0]

    arguments = layer.x.detach(), layer.weights.detach()
    program = torch.export.export(Module(), arguments, strict=strict)
    for exported in (program, program.run_decompositions()):
        assert names_in(exported.graph) == ["route", "dispatch", *FORWARD]
        targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
        assert not any(str(target).endswith(".ordered") for target in targets)
        same_bytes(exported.module()(*arguments), Module()(*arguments), "exported")


def test_functorch_gets_ops_which_refuse(alone):
    """Torch has no vmap and no torch.func.grad for ops like ours: an error, not wrong addresses."""
    layer = Layer(alone, CASE)
    weights = layer.weights.detach()
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: layer(x, weights)[0].sum())(layer.x.detach())


# ---- scales have no gradient


def scale_ways(alone, case: Case) -> dict[str, Callable[..., Dispatched]]:
    """Fresh and replayed dispatches with scales; each takes x, weights and scales."""
    buffer, topk_idx = alone.buffer(**case.sizes()), case.inputs(0).topk_idx.to(alone.device)
    zeros = torch.zeros(len(topk_idx), case.hidden, dtype=case.dtype, device=alone.device)
    handle = hybrid_ep.dispatch(buffer, zeros, topk_idx).handle

    def fresh(x: Tensor, weights: Tensor, scales: Tensor) -> Dispatched:
        return hybrid_ep.dispatch(buffer, x, topk_idx, weights, scales=scales, max_rows=128)

    def replayed(x: Tensor, weights: Tensor, scales: Tensor) -> Dispatched:
        return hybrid_ep.dispatch(buffer, x, None, weights, scales=scales, handle=handle)

    def watched(*inputs: Tensor) -> Dispatched:
        with as_ops():
            return fresh(*inputs)

    def compiled(*inputs: Tensor) -> Dispatched:
        torch._dynamo.reset()
        return torch.compile(fresh, backend="aot_eager", fullgraph=True)(*inputs)

    def direct(*inputs: Tensor) -> Dispatched:
        sizes = handle.num_tokens, handle.num_rows, 0, buffer.id
        sent = torch.ops.hybrid_ep.dispatch(*inputs, handle.layout, *sizes)
        return Dispatched(*sent, handle.counts, handle.offsets, handle)

    ways = (fresh, replayed, watched, compiled, direct)
    return {way.__name__: way for way in ways}


FLOATS = (torch.float32, torch.bfloat16, FP8)
SCALES = [
    *itertools.product(FLOATS, ("x", "weights", "scales", "x weights scales")),
    *itertools.product((torch.uint8,), ("x", "weights")),  # integers require no gradient
]


@pytest.mark.parametrize("dtype, leaves", SCALES, ids=str)
@pytest.mark.parametrize("way", ["fresh", "replayed", "watched", "compiled", "direct"])
def test_scales_come_back_without_a_gradient(alone, way, dtype, leaves):
    case = replace(CASE, num_scales=4, scale_dtype=dtype)
    inputs = case.inputs(0)
    generator = case.generator(0, "scales")
    given = {
        "x": case.values(0, "x", len(inputs.x)),
        "weights": inputs.weights,
        "scales": torch.randint(1, 8, (len(inputs.x), 4), generator=generator).to(dtype),
    }
    given = {name: value.to(alone.device) for name, value in given.items()}
    ways = scale_ways(alone, case)
    want = ways["fresh"](*given.values()).scales
    for name in leaves.split():
        given[name].requires_grad_()
    out = ways[way](*given.values())
    assert not out.scales.requires_grad
    same_bytes(out.scales[: len(want)], want[: len(out.scales)], "scales")
    if leaves == "scales":
        # the op itself cannot know that nothing else wants a gradient
        assert way == "direct" or not out.rows.requires_grad
        return
    # scales take part in the loss, as in a product with rows that they quantise
    loss = (out.rows * out.scales[:, :1].float()).sum() + out.weights.sum()
    loss.backward()
    for name, tensor in given.items():
        assert (tensor.grad is not None) == (name in leaves.split() and name != "scales"), name


# ---- what is saved, and what is checked


@pytest.mark.parametrize("way", [contextlib.nullcontext, as_ops])
def test_hooks_see_everything_that_is_saved(alone, way):
    layer = Layer(alone, CASE)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with way(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer(layer.x, layer.weights)
    layouts = [t for t in packed if t.shape == (layer.buffer.layout_size,)]
    assert len(layouts) == 5, "one a differentiable verb"
    want = layer.with_gradients()[-2:]
    for got, wanted in zip(layer.gradients(outputs), want, strict=True):
        same_bytes(got, wanted, "from clones of what was saved")


RULES = ("check_route", "check_experts", "check_dispatch", "check_handle", "check_combine")


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    counts = dict.fromkeys(RULES, 0)

    def counting(name: str, rule):
        def count(*args):
            counts[name] += 1
            return rule(*args)

        return count

    with contextlib.ExitStack() as stack:
        for name in RULES:
            rule = counting(name, getattr(rules, name))
            stack.enter_context(mock.patch.object(rules, name, rule))
        yield counts


def test_each_rule_is_checked_once(alone):
    layer = Layer(alone, CASE)
    once = {
        "check_route": 1,
        "check_experts": 1,
        "check_dispatch": 2,
        "check_handle": 4,
        "check_combine": 3,
    }
    with counted() as counts:
        layer.with_gradients()
    assert counts == once, "two dispatches, three combines; none in their backward"
    with as_ops(), counted() as counts:
        layer(layer.x, layer.weights)
    again = {"check_route": 2, "check_experts": 1, "check_dispatch": 4, "check_combine": 6}
    assert counts == {**once, **again}, "an op may be called by anybody"


def test_an_op_checks_what_it_is_given(alone):
    layer = Layer(alone, CASE)
    buffer, ops = layer.buffer, torch.ops.hybrid_ep
    sizes = buffer.num_local_experts, buffer.layout_size
    layout = hybrid_ep.dispatch(buffer, layer.x, layer.topk_idx).handle.layout
    with pytest.raises(ValueError, match="x must have as many tokens"):
        ops.dispatch(layer.x, None, None, layout, 1, None, 0, buffer.id)
    with pytest.raises(ValueError, match="topk_idx must be int16"):
        ops.route(layer.topk_idx.float(), None, 0, None, 1, *sizes, buffer.id)
    with pytest.raises(ValueError, match="experts must be that of the Buffer"):
        ops.route(layer.topk_idx, None, 0, None, 1, sizes[0] + 1, sizes[1], buffer.id)
    with pytest.raises(ValueError, match="combine sums"):
        ops.combine(layer.x.int(), None, None, layout, len(layer.x), 0, 0, buffer.id)
    with pytest.raises(ValueError, match="layout_size must be that of the Buffer"):
        ops.combine(layer.x, None, None, layout[1:], len(layer.x), 0, 0, buffer.id)
