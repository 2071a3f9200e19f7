"""torch.compile with inductor: the verbs of all ranks run in program order, in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrid_ep
from tests.cases import Case
from tests.checks import same_bytes
from tests.ranks import compiled
from tests.ranks.compiled import Program
from tests.targets import SAME_OPS

pytestmark = pytest.mark.not_on(
    "torch_gpu", why="what torch compiles for a GPU is compared on the kernels' targets"
)
of_one_node = pytest.mark.not_on("nodes", why=SAME_OPS)
PROGRAMS = [
    Program("exact", "D0 D1 C0 C1", training=True, exact=True),
    Program("max_rows_crossed_dynamic", "D0 D1 C1 C0", training=True, dynamic=True),
]
MORE_PROGRAMS = [
    Program("exact_dynamic", "D0 D1 C0 C1", training=True, exact=True, dynamic=True),
    Program("max_rows_crossed", "D0 D1 C1 C0", training=True),
    Program("three_in_flight_crossed", "D0 D1 D2 C1 C2 C0", (16, 512, 48), training=True),
    Program("unused_results", "D0- D1 C1 C1-"),
    Program("equal_dispatches_and_combines", "D0 D0 D1 C0 C0 C1"),
    Program("replayed_layouts", "R0 R1 C0 C1", training=True),
    Program("two_buffers", "D0 D1 C0 C1", buffers=2),
    *(
        Program(f"checkpoint_{run.replace(' ', '_')}", "L0 L1", training=True, checkpoint=run)
        for run in ("plain checkpoint", "hybrid_ep.checkpoint", "SAC_SAVE_OPS")
    ),
]


@pytest.mark.parametrize(
    "program",
    [*PROGRAMS, *(pytest.param(program, marks=of_one_node) for program in MORE_PROGRAMS)],
    ids=str,
)
def test_verbs_keep_program_order(world, inductor_cache, program):
    if program.exact and program.dynamic and torch.__version__ < "2.7":
        pytest.skip(
            "inductor of torch 2.6 compares an unbacked size with a symbolic one and raises "
            "GuardOnDataDependentSymNode, whatever the op"
        )
    check(world(2).run(compiled.run, program, inductor_cache), program.order)


def test_three_forwards_of_one_graph_are_in_flight(world, inductor_cache):
    """The order of the forward is not saved for the backward, where it would be stale."""
    program = Program("in_flight", "L0 L1 L2", (16, 512, 48), training=True, dynamic=True)
    check(world(2).run(compiled.in_flight, program, inductor_cache), program.order)


def check(results: list[dict[str, Any]], order: list[str]) -> None:
    for rank, result in enumerate(results):
        assert result["compiled"]["calls"] == order, f"rank {rank}"
        for got, want in zip(result["compiled"]["values"], result["eager"]["values"], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@of_one_node
def test_a_process_with_another_buffer_does_not_get_the_code_of_the_first(
    fresh_world, inductor_cache
):
    """The sizes of a Buffer are part of the key of torch's compile cache on disk."""
    first = Case("cached", num_ranks=1, hidden=64, max_tokens=32, dtype=torch.float32)
    for case in (first, replace(first, max_tokens=64, experts_per_rank=8)):
        (result,) = fresh_world(1).run(compiled.from_disk, case, inductor_cache)
        torch.testing.assert_close(result["compiled"], result["eager"])
        if torch.__version__ >= "2.11":  # 2.6 caches no graph with an op that writes
            assert result["hits"] > 0, "the cache is not in use"


@pytest.mark.parametrize("captured", [False, True])
def test_exact_sizes_without_fullgraph(alone, captured):
    """Where torch does not capture sizes that an op decides, the graph breaks and goes on."""
    case = Case("broken", num_ranks=1, dtype=torch.float32)
    buffer, inputs = alone.buffer(**case.sizes()), case.inputs(0)
    topk_idx = inputs.topk_idx.to(alone.device)

    def layer(x: Tensor) -> Tensor:
        out = hybrid_ep.dispatch(buffer, x * 2, topk_idx)
        return hybrid_ep.combine(buffer, torch.tanh(out.rows), out.handle)

    torch._dynamo.reset()
    gradients = []
    for run in (layer, torch.compile(layer, backend="aot_eager")):
        x = case.values(0, "x", len(inputs.x)).to(alone.device).requires_grad_()
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=captured):
            y = run(x)
        gradients.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
    for got, want in zip(*gradients, strict=True):
        same_bytes(got, want, "compiled")


def test_cuda_graphs_may_hold_a_graph_with_verbs(alone):
    """Inductor makes none of a graph that writes an input whose address may change."""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    case = Case("static", num_ranks=1, dtype=torch.float32)
    buffer = alone.buffer(**case.sizes())
    x, topk_idx, weights, _ = case.leaves(0, alone.device, needs_grad=False)
    written: list[tuple[list[int], list[int]]] = []

    def layer(x: Tensor) -> Tensor:
        out = hybrid_ep.dispatch(buffer, x, topk_idx, weights, max_rows=64)
        return hybrid_ep.combine(buffer, torch.tanh(out.rows), out.handle, weights=out.weights)

    def keep(module: torch.fx.GraphModule, fakes: list[Tensor], **facts: Any) -> Any:
        if not facts.get("is_backward"):
            orders = [at for at, fake in enumerate(fakes) if fake.shape == (1,)]
            written.append((orders, [at for at in facts["static_input_idxs"] if at in orders]))
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    compiled = torch.compile(
        layer, fullgraph=True, backend=lambda *graph: compile_fx(*graph, inner_compile=keep)
    )
    compiled(x.requires_grad_()).sum().backward()
    ((orders, static),) = written
    assert len(orders) == 1
    assert static == orders
