"""What follows from the sizes of a problem, and how a step of a group ends on all ranks."""

import inspect

import pytest
import torch

import hybrid_ep
from hybrid_ep.group import Group
from hybrid_ep.shape import Shape
from tests.launch import Rank
from tests.ranks.raised import raised_by

SIZES = {"num_ranks": 4, "num_experts": 8, "max_tokens": 10, "hidden": 20, "topk": 3}


def test_bytes_counted_by_hand():
    shape = Shape(**SIZES, ranks_per_node=2, dtype=torch.float8_e4m3fn, scale_bytes=5)
    assert (shape.num_nodes, shape.num_local_experts) == (2, 2)
    assert (shape.row_bytes, shape.sum_bytes) == (20, 40)  # sums have two bytes per value
    assert shape.row_capacity == 32 + 16  # of a row and its scales
    assert shape.record_bytes == 32 + 16 + 16  # and 3 weights
    assert shape.inbox_row_bytes == 48


def test_rows_that_go_both_ways():
    bf16, fp32 = torch.bfloat16, torch.float32
    wide = Shape(**{**SIZES, "hidden": 8}, dtype=fp32)
    assert wide.two_way_dtypes(aligned=True) == (bf16, torch.float16, fp32)
    assert Shape(**SIZES).two_way_dtypes(aligned=False) == (bf16, torch.float16)
    assert Shape(**SIZES).two_way_dtypes(aligned=True) == ()  # 40 bytes are no multiple of 16


def test_a_dtype_of_another_type_is_refused():
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype .* got 'bf16'"):
        Shape(**SIZES, dtype="bf16")


def fail_alike(me: Rank, kinds: dict[int, type[Exception]]) -> tuple[str, str]:
    group = Group()

    def step() -> None:
        with group.together(), group.alike():
            if me.rank in kinds:
                raise kinds[me.rank](f"no memory on {me.rank}")

    return raised_by(step)


def test_a_step_ends_alike_on_all_ranks(world):
    """All raise the same text; what the step is not about is raised on the rank as it is."""
    told = ("SetupError", "rank 1: no memory on 1")
    assert world(3).run(fail_alike, {1: RuntimeError, 2: RuntimeError}) == [told] * 3
    told = ("ValueError", "rank 1: no memory on 1")
    others = world(3).run(fail_alike, {1: ValueError})
    assert others == [told, ("ValueError", "no memory on 1"), told]


def test_the_calls_of_a_buffer_are_the_functions():
    for name in ("dispatch", "combine"):
        assert getattr(hybrid_ep, name) is getattr(hybrid_ep.Buffer, name)
        assert next(iter(inspect.signature(getattr(hybrid_ep, name)).parameters)) == "buffer"


@pytest.mark.parametrize("is_compiled", [False, True])
def test_methods_give_what_the_functions_give(alone, is_compiled):
    sizes = {name: SIZES[name] for name in ("num_experts", "max_tokens", "hidden", "topk")}
    buffer = alone.buffer(**sizes)
    x = torch.arange(10 * 20.0).view(10, 20).bfloat16()
    topk_idx = torch.arange(30).view(10, 3) % 8

    def through_methods(x: torch.Tensor) -> torch.Tensor:
        out = buffer.dispatch(x, topk_idx, max_rows=32)
        return buffer.combine(out.rows, out.handle)

    if is_compiled:
        through_methods = torch.compile(through_methods, fullgraph=True, backend="aot_eager")
    out = hybrid_ep.dispatch(buffer, x, topk_idx, max_rows=32)
    assert torch.equal(through_methods(x), hybrid_ep.combine(buffer, out.rows, out.handle))
    buffer.destroy()
