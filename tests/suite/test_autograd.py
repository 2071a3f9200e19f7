"""Gradients, torch.compile, the ops' registrations, recomputation."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import hybrid_ep
from tests import oracle
from tests.cases import Case, named, params
from tests.checks import same_bytes
from tests.launch import Pool, Rank
from tests.ranks import compiled, layers

TINY = Case("tiny", num_ranks=1, tokens=(5,), hidden=4, topk=3)
TINY_CASES = [
    TINY,
    replace(TINY, name="duplicates_and_holes", routing="duplicates", align=4),
    replace(TINY, name="all_minus_one", routing="nowhere"),
    replace(TINY, name="overflow", max_rows="third"),
    replace(TINY, name="more_than_enough", max_rows="more", align=4),
]


def doubles(alone: Rank, case: Case) -> tuple[Tensor, Tensor]:
    x, weights = layers.token_values(case, 0, "x"), case.inputs(0).weights
    return tuple(t.to(alone.device, torch.float64).requires_grad_() for t in (x, weights))


@pytest.mark.not_on("nvlink", "nodes", why="gradcheck takes float64, which no kernel moves")
@params(TINY_CASES)
def test_gradcheck(alone, case):
    buffer = alone.buffer(**case.sizes())
    topk_idx = case.inputs(0).topk_idx.to(alone.device)
    bound = oracle.max_rows(case)

    def dispatch(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        out = hybrid_ep.dispatch(buffer, x, topk_idx, weights, max_rows=bound, align=case.align)
        return out.rows, out.weights

    x, topk_weights = doubles(alone, case)
    out = hybrid_ep.dispatch(buffer, x, topk_idx, max_rows=bound, align=case.align)

    def combine(rows: Tensor, weights: Tensor) -> Tensor:
        return hybrid_ep.combine(buffer, rows, out.handle, weights=weights)

    def plain_combine(rows: Tensor) -> Tensor:
        return hybrid_ep.combine(buffer, rows, out.handle)

    # like an expert's output, the rows of no token are not looked at: their gradient is zero
    rows = torch.randn_like(out.rows).requires_grad_()
    weights = torch.rand_like(rows[:, 0]).requires_grad_()
    assert torch.autograd.gradcheck(dispatch, (x, topk_weights))
    assert torch.autograd.gradcheck(combine, (rows, weights))
    assert torch.autograd.gradcheck(plain_combine, (rows,))


MOE = [
    *named("3_ranks_12_experts", "one_rank_without_tokens", "DeepEP#447_all_to_one_rank"),
    *named("Megatron#175_duplicates_3_ranks", "DeepEP#673_holes_int16", "DeepEP#673_all_minus_one"),
    *named("max_rows_more", "2_nodes_of_2", "DeepEP#744_pads_among_tokens", "world_of_1"),
]


@params(MOE)
def test_layer_weighted_in_combine_equals_dense_layer(world, case):
    check_layer(world(case.num_ranks), case, "combine")


@params(case for case in MOE if case.max_rows is None)  # NaN beyond the last offset, times 0
def test_layer_weighted_in_the_experts_equals_dense_layer(world, case):
    check_layer(world(case.num_ranks), case, "experts")


def check_layer(pool: Pool, case: Case, weighted_by: str) -> None:
    case = pool.target.divided(replace(case, num_scales=0, dtype=torch.float32))
    dense = layers.dense_moe(case)
    results = pool.run(layers.moe, case, oracle.max_rows(case), weighted_by)
    tolerance = 1e-4 if pool.target.has_kernels else 1e-10  # of sums in float32, in float64
    for rank, got in enumerate(results):
        for name, tensor in got.items():
            torch.testing.assert_close(
                tensor.double(),
                dense[name][rank],
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, name=name, rank=rank: f"{name} of rank {rank}: {text}",
            )


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_Megatron_4500_gradient_reaches_the_router(world, num_ranks):
    case = Case("probabilities", num_ranks=num_ranks, dtype=torch.float32)
    assert world(num_ranks).run(layers.probability_path, case) == [True] * num_ranks


# ---- what torch.library and torch.compile see


@pytest.mark.parametrize("bound", [None, "more"])
@pytest.mark.parametrize("op", ["route", "rows", "dispatch", "combine", "combine_backward"])
def test_opcheck(alone, op, bound):
    case = replace(TINY, dtype=torch.float32, max_rows=bound)
    buffer = alone.buffer(**case.sizes())
    bound = oracle.max_rows(case)
    x, topk_idx, weights, _ = case.leaves(0, alone.device)
    out = hybrid_ep.dispatch(buffer, x.detach(), topk_idx, weights, max_rows=bound)
    layout = out.handle.layout
    rows = out.rows.detach().requires_grad_()
    row_weights = out.weights.detach().requires_grad_()
    order = torch.zeros(1, dtype=torch.int64, device=alone.device)
    sizes = buffer.num_local_experts, buffer.layout_size
    most = torch.tensor([0, buffer.topk], dtype=torch.int32, device=alone.device)
    arguments = {
        "route": [
            (topk_idx, None, 0, bound, 1, *sizes, buffer.id),
            (topk_idx, most, buffer.topk, bound, 1, *sizes, buffer.id),
        ],
        "dispatch": [
            (x, weights, None, layout, len(x), bound, 0, buffer.id),
            (x, None, None, layout, len(x), bound, 4, buffer.id),
        ],
        "combine": [
            (rows, row_weights, None, layout, len(x), 0, 0, buffer.id),
            (rows, None, row_weights, layout, len(x), buffer.topk, 0, buffer.id),
            (rows, None, None, layout, len(x), 0, 0, buffer.id),
        ],
        "combine_backward": [
            (x.detach(), rows.detach(), row_weights.detach(), layout, 0, buffer.id)
        ],
        "rows": [(out.handle.required_rows.clone(), buffer.id)],
    }
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    # that one compares results, and the kernels' layouts differ: in the number of the call, and in
    # words that no call reads
    if op != "route" or not alone.target.has_kernels:
        tests.append("test_aot_dispatch_dynamic")
    for args in arguments[op]:
        opcheck(getattr(torch.ops.hybrid_ep, op).default, args, test_utils=tests)
        if op != "rows":
            ordered = getattr(torch.ops.hybrid_ep, op).ordered
            opcheck(ordered, (*args, order), test_utils=tests)


def compiled_layer(buffer, bound, align=1):
    def layer(x, topk_idx, weights):  # bare: torch 2.6 cannot compile the making of tuple[...]
        out = hybrid_ep.dispatch(buffer, x, topk_idx, weights, max_rows=bound, align=align)
        rows = torch.tanh(out.rows)
        y = hybrid_ep.combine(buffer, rows, out.handle, weights=out.weights)
        return y, out.handle.overflow

    return layer


def sizes_left_to_the_op(bound):
    """Without a bound the op decides M; fullgraph allows that by itself from torch 2.10 on."""
    asked_for = bound is None and torch.__version__ < "2.10"  # compares as versions, not as text
    return torch._dynamo.config.patch(capture_dynamic_output_shape_ops=asked_for)


@pytest.mark.parametrize(
    "compiler, bound",
    [("aot_eager", None), ("aot_eager", "enough"), ("aot_eager", "third"), ("inductor", "third")],
)
def test_torchtitan_3007_compiled_equals_eager(alone, inductor_cache, compiler, bound):
    case = Case("compiled", num_ranks=1, topk=3, max_rows=bound, dtype=torch.float32)
    buffer = alone.buffer(**case.sizes())
    eager = compiled_layer(buffer, oracle.max_rows(case))
    torch._dynamo.reset()
    in_a_graph = torch.compile(eager, fullgraph=True, backend=compiler)
    results = []
    for layer in (eager, in_a_graph):
        x, topk_idx, weights, _ = case.leaves(0, alone.device)
        with compiled.cheap_inductor(inductor_cache), sizes_left_to_the_op(bound):
            y, overflow = layer(x, topk_idx, weights)
            y.sum().backward()
        results.append((y.detach(), overflow, x.grad, weights.grad))
    for got, want in zip(*reversed(results), strict=True):
        if compiler == "inductor":  # its own tanh
            torch.testing.assert_close(got, want)
        else:
            same_bytes(got, want, "compiled")
    assert bool(results[0][1]) == (bound == "third")


def test_compiled_once_for_all_token_counts(alone):
    case = Case("dynamic", num_ranks=1, topk=3, max_tokens=64)
    buffer = alone.buffer(**case.sizes())
    eager = compiled_layer(buffer, 256, align=16)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    in_a_graph = torch.compile(eager, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (7, 33, 64):
        ragged = replace(case, tokens=(tokens,))
        *arguments, _ = ragged.leaves(0, alone.device, needs_grad=False)
        for got, want in zip(in_a_graph(*arguments), eager(*arguments), strict=True):
            same_bytes(got, want, f"{tokens} tokens")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_one_compiled_layer_serves_several_buffers(alone):
    """The second Buffer's id makes the compiler take ids for sizes that vary."""
    case = Case("buffers", num_ranks=1, topk=3)
    *arguments, _ = case.leaves(0, alone.device, needs_grad=False)

    def layer(buffer: hybrid_ep.Buffer) -> Tensor:
        return compiled_layer(buffer, 64)(*arguments)[0]

    torch._dynamo.reset()
    in_a_graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for buffer in [alone.buffer(**case.sizes()) for _ in range(3)]:
        same_bytes(in_a_graph(buffer), layer(buffer), "compiled")


# ---- recomputation: the router says something else the second time, the layout must not


@pytest.mark.parametrize("build_inside", [False, True], ids=["", "torchtitan#2505_lazy_buffer"])
@pytest.mark.parametrize("bound", [None, 48], ids=["exact", "bounded"])
@pytest.mark.parametrize("run", ["hybrid_ep.checkpoint", "SAC_SAVE_OPS"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_Automodel_3156_recompute_replays_the_layout(world, num_ranks, run, bound, build_inside):
    case = Case("recompute", num_ranks=num_ranks, topk=3)
    case = replace(case, dtype=torch.float32)
    pool = world(num_ranks)
    stored = pool.run(layers.recompute, case, bound, "stored", False)
    for got, want in zip(
        pool.run(layers.recompute, case, bound, run, build_inside), stored, strict=True
    ):
        for name in ("y", "x", "router"):
            same_bytes(got[name], want[name], name)
        assert got["forwards"] == 2
        begins = ["route", "dispatch"] if run == "SAC_SAVE_OPS" else ["dispatch_fresh"]
        assert got["forward"] == [*begins, "combine"]
        backward = ["combine", "combine", "combine_backward", "dispatch"]
        assert sorted(got["backward"]) == backward, "routed again"


def test_plain_checkpoint_notices_that_the_router_changed(alone):
    """The premise of the tests above: this router does give other rows in the recomputation."""
    case = Case("recompute", num_ranks=1, topk=3, routing="uniform", dtype=torch.float32)
    stored = layers.recompute(alone, case, 48, "stored", False)
    plain = layers.recompute(alone, case, 48, "plain checkpoint", False)
    assert not torch.equal(stored["x"], plain["x"])
