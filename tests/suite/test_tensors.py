"""Results are torch's own tensors at every size, and no default of torch reaches the calls."""

import pytest
import torch

import hybrid_ep
from tests.cases import Case
from tests.checks import same_bytes, same_results
from tests.ranks import tensors

# rows and y of a few kB; of several MB, where large memory is treated apart
SMALL = Case("small", tokens=(20, 13), topk=3, num_scales=3)
LARGE = Case("large", tokens=(600, 512), topk=3, hidden=4096, num_scales=512)
SIZES = pytest.mark.parametrize("case", [SMALL, LARGE], ids=lambda case: case.name)
GRADIENTS = pytest.mark.parametrize("needs_grad", [False, True], ids=["no_grad", "grad"])


@SIZES
@GRADIENTS
@pytest.mark.parametrize("change", tensors.CHANGES)
def test_results_are_changed_in_place(world, case, change, needs_grad):
    for rank, pairs in enumerate(world(2).run(tensors.change_in_place, case, change, needs_grad)):
        for number, (in_place, in_copies) in enumerate(pairs):
            same_bytes(in_place, in_copies, f"result {number} on rank {rank}")


@SIZES
@GRADIENTS
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_results_own_memory_that_can_be_freed_early(world, case, needs_grad, num_ranks):
    for told in world(num_ranks).run(tensors.describe_results, case.on(num_ranks), needs_grad):
        assert len(told) == (7 if needs_grad else 4)
        for name, seen in told.items():
            assert seen == {
                "is a view": False,
                "bytes beyond it": 0,
                "resizable": True,
                "is contiguous": True,
                "bytes after it was freed": 0,
            }, name


@SIZES
def test_rows_are_freed_between_forward_and_backward(world, case):
    for rank, pairs in enumerate(world(2).run(tensors.free_rows_before_the_backward, case)):
        for name, (kept, freed) in zip(("y", "gradient of x"), pairs, strict=True):
            same_bytes(freed, kept, f"{name} on rank {rank}")


PADDED = Case("padded", tokens=(20, 13), topk=3, num_scales=3, align=4)
TWO_NODES = Case("two_nodes", num_ranks=4, tokens=(20, 13), topk=3, num_scales=3, ranks_per_node=2)


def check_same(results, wanted):
    for rank, (got, want) in enumerate(zip(results, wanted, strict=True)):
        same_results(got, want, f"rank {rank}")


@pytest.mark.parametrize("max_rows", [None, 64], ids=["exact", "bounded"])
@pytest.mark.parametrize("case", [PADDED, TWO_NODES], ids=lambda case: case.name)
@pytest.mark.parametrize("default", tensors.DEFAULTS)
def test_verbs_under_another_default_device_or_dtype(world, case, default, max_rows):
    pool = world(case.num_ranks)
    case = pool.target.divided(case)
    wanted = pool.run(tensors.verbs_under, case, None, max_rows)
    check_same(pool.run(tensors.verbs_under, case, default, max_rows), wanted)


@pytest.mark.only_on("torch_cpu", why="elsewhere no memory of the host is shared")
@pytest.mark.parametrize("default", tensors.DEFAULTS)
def test_ranks_by_messages_under_another_default(world, default):
    case = Case("messages", num_ranks=2, tokens=(20, 13), topk=3, num_scales=3)
    pool = world(2)
    wanted = pool.run(tensors.verbs_under, case, None, None)
    check_same(pool.run(tensors.without_shared_memory, case, default), wanted)


@pytest.mark.parametrize("default", tensors.DEFAULTS)
def test_layer_under_another_default_device_or_dtype(world, default):
    case = Case("layer", tokens=(20, 13), topk=2, dtype=torch.float32)
    pool = world(2)
    wanted = pool.run(tensors.layer_under, case, None)
    check_same(pool.run(tensors.layer_under, case, default), wanted)


@pytest.mark.parametrize("max_rows", [None, 64], ids=["exact", "bounded"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("mode", tensors.MODES)
def test_a_handle_of_inference_is_replayed_in_training(world, mode, num_ranks, max_rows):
    case = Case("inference", tokens=(20, 13), topk=3).on(num_ranks)
    pool = world(num_ranks)
    wanted = pool.run(tensors.replay_in_training, case, None, max_rows)
    check_same(pool.run(tensors.replay_in_training, case, mode, max_rows), wanted)


def test_a_handle_of_compiled_inference_is_replayed_in_training(alone):
    case = Case("compiled", tokens=(20,), topk=3).on(1)
    buffer = alone.buffer(**case.sizes())
    x, topk_idx, gate, _ = case.leaves(0, alone.device, needs_grad=False)
    x.requires_grad_()

    def rollout(x: torch.Tensor) -> hybrid_ep.Dispatched:
        return hybrid_ep.dispatch(buffer, x, topk_idx, gate, max_rows=64)

    torch._dynamo.reset()
    with torch.inference_mode():
        first = torch.compile(rollout, fullgraph=True, backend="aot_eager")(x)
    replayed = hybrid_ep.dispatch(buffer, x, topk_weights=gate, handle=first.handle)
    y = hybrid_ep.combine(buffer, replayed.rows, first.handle, weights=replayed.weights)
    scale = torch.ones(1, device=alone.device, requires_grad=True)
    ((scale * replayed.offsets).sum() + y.sum()).backward()

    want = x.detach().clone().requires_grad_()
    out = rollout(want)
    hybrid_ep.combine(buffer, out.rows, out.handle, weights=out.weights).sum().backward()
    same_bytes(x.grad, want.grad, "gradient of x")
    buffer.destroy()


@SIZES
@GRADIENTS
@pytest.mark.parametrize("change", tensors.CHANGES)
def test_results_of_the_ops_are_changed_in_place(alone, case, change, needs_grad):
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu]):  # it watches ops, so the verbs are made as ops
        pairs = tensors.change_in_place(alone, case.on(1), change, needs_grad)
    for number, (in_place, in_copies) in enumerate(pairs):
        same_bytes(in_place, in_copies, f"result {number}")
