"""The choice of experts in a checkpointed region: topk that is kept, or replayed.

Compiled code has the op ``hybrid_ep::topk``, other code an autograd Function. Both save the indices
alone, as torch's own topk does: a checkpoint compares what the two runs of a region save.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hybrid_ep.ops import replay


class Chosen(NamedTuple):
    """In compiled code what ``torch.return_types.topk`` is elsewhere: Dynamo cannot make it."""

    values: Tensor
    indices: Tensor


def topk(*args: Any, **kwargs: Any) -> Any:
    """``torch.topk`` that asks the region it is called in."""
    return _topk(*args, **{_OTHER_NAMES.get(name, name): each for name, each in kwargs.items()})


_OTHER_NAMES = {"x": "input", "self": "input", "axis": "dim"}  # that torch takes as well


def _topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if is_compiling():
        return Chosen(*torch.ops.hybrid_ep.topk(input, k, dim, largest, sorted))
    return torch.return_types.topk(_Topk.apply(input, k, dim, largest, sorted))


def _run(*inputs: Any) -> tuple[Tensor, ...]:
    with torch._C.DisableTorchFunction():  # else the region would catch the call below
        return replay.copied("topk", lambda: torch.topk(*inputs))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.sizes, ctx.dim = inputs[0].shape, inputs[2]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    return grad.new_zeros(ctx.sizes).scatter(ctx.dim, indices, grad), *(None,) * 4


class _Topk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _run(*inputs)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


_op = torch.library.custom_op(
    "hybrid_ep::topk",
    _run,
    mutates_args=(),
    schema="(Tensor input, SymInt k, int dim, bool largest, bool sorted) -> (Tensor, Tensor)",
)
_op.register_fake(lambda *inputs: tuple(torch.topk(*inputs)))
_op.register_autograd(_backward, setup_context=_save)

CAUGHT = (torch.topk, Tensor.topk, torch.ops.aten.topk, torch.ops.aten.topk.default)
"""What a region replays by ``topk``."""

OPS = (torch.ops.aten.topk.default, torch.ops.hybrid_ep.topk.default)
"""What chooses experts in a graph."""
