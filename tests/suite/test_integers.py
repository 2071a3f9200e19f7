"""Sizes of any integer type are taken and kept as ints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hybrid_ep
from hybrid_ep.moe import MoELayer
from tests import targets
from tests.cases import Case
from tests.checks import same_bytes
from tests.ranks import mistakes

pytestmark = pytest.mark.not_on("torch_gpu", why=targets.SAME_PYTHON)

CASE = Case("integers", num_ranks=1, topk=3, num_scales=2, dtype=torch.float32, ranks_per_node=1)
KINDS = [np.int64, np.int32, np.uint16]


class Indexed:
    """An integer by ``__index__`` alone."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def as_kind(kind: type, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: kind(v) if type(v) is int else v for name, v in arguments.items()}


@pytest.mark.parametrize("kind", [*KINDS, Indexed])
def test_sizes_of_a_Buffer(alone, kind):
    buffer = alone.buffer(**as_kind(kind, CASE.sizes()))
    for name, value in CASE.sizes().items():
        kept = getattr(buffer.topology if name == "ranks_per_node" else buffer, name)
        assert type(kept) is type(value) and kept == value, name
    assert type(buffer.num_local_experts) is int


@pytest.mark.parametrize("kind", [*KINDS, Indexed])
def test_max_rows_and_align(alone, kind):
    buffer, inputs = alone.buffer(**CASE.sizes()), CASE.inputs(0)
    arguments = [t.to(alone.device) for t in (inputs.x, inputs.topk_idx)]
    want = hybrid_ep.dispatch(buffer, *arguments, max_rows=128, align=8)
    got = hybrid_ep.dispatch(buffer, *arguments, max_rows=kind(128), align=kind(8))
    same_bytes(got.rows, want.rows, "rows")
    assert type(got.handle.max_rows) is int
    for bad in ({"max_rows": kind(12), "align": 8}, {"align": kind(0)}):
        with pytest.raises(ValueError, match="must be a"):
            hybrid_ep.dispatch(buffer, *arguments, **bad)


@pytest.mark.parametrize("kind", KINDS)
def test_max_rows_of_a_compiled_layer(alone, kind):
    layer = MoELayer(alone.buffer(**CASE.sizes()), ffn_hidden=8, max_rows=kind(64))
    x = CASE.values(0, "x", CASE.num_tokens(0)).to(alone.device)
    torch._dynamo.reset()
    got = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    same_bytes(got.y, layer(x).y, "y")


def test_a_symbol_for_max_rows_in_a_compiled_graph(alone):
    """Under dynamic shapes a size that comes from a tensor's shape is a torch.SymInt."""
    buffer = alone.buffer(**CASE.sizes())
    x, topk_idx, _, _ = CASE.leaves(0, alone.device, needs_grad=False)

    def layer(x: Tensor, like: Tensor) -> Tensor:
        out = hybrid_ep.dispatch(buffer, x, topk_idx, max_rows=like.shape[0] * 8, align=8)
        return hybrid_ep.combine(buffer, out.rows, out.handle)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (9, 17):
        like = x.new_zeros(rows, 1)
        same_bytes(compiled(x, like), layer(x, like), f"y for {rows * 8} rows")


def test_equal_sizes_of_other_types_are_no_disagreement(world):
    sizes = {"hidden": 32, "topk": 3, "config": hybrid_ep.Config(num_sms_publish=8)}
    other = {**as_kind(np.int64, sizes), "config": hybrid_ep.Config(num_sms_publish=np.int64(8))}
    assert world(2).run(mistakes.disagree, [sizes, other]) == ["", ""]
