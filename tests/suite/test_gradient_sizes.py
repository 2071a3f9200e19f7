"""A gradient that the Buffer cannot carry is refused in the forward, however a verb is reached."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import hybrid_ep
from hybrid_ep.ops import rules, verbs
from tests import targets
from tests.cases import FP8, Case
from tests.checks import same_bytes
from tests.launch import Rank
from tests.ranks.raised import what_it_raises
from tests.ranks.verbs import note_calls

pytestmark = pytest.mark.not_on("torch_gpu", why=targets.SAME_PYTHON)


@dataclass(frozen=True)
class Wanted:
    """A verb and the gradient that is wanted of it.

    Attributes:
        name: the condition that is tested.
        buffer: dtype of the Buffer and its ``scale_bytes``.
        verb: ``"dispatch"`` or ``"combine"``.
        payload: dtype of ``x`` or of the rows.
        leaf: ``"payload"`` or ``"weights"``: what requires the gradient.
        text: of the error.
    """

    name: str
    buffer: tuple[torch.dtype, int]
    verb: str
    payload: torch.dtype
    leaf: str
    text: str

    def __str__(self) -> str:
        return self.name


WIDE_ROWS = (
    "the backward of this combine dispatches rows of torch.bfloat16, which need 64 bytes, more "
    "than the 32 that dtype=torch.float8_e4m3fn of the Buffer reserves: make the Buffer with "
    "dtype=torch.bfloat16, or combine under torch.no_grad()"
)
WIDE_X = (
    "the backward of this dispatch combines rows of torch.float32, which need 128 bytes, more than "
    "the 64 that dtype=torch.bfloat16 of the Buffer reserves: make the Buffer with "
    "dtype=torch.float32, or dispatch under torch.no_grad()"
)
NO_SUMS = (
    "the gradient of x is a sum, so x must be bfloat16, float16 or float32 to require one, got "
    "torch.float8_e4m3fn: detach x, or dispatch under torch.no_grad()"
)
BF16 = torch.bfloat16
WANTED = [
    Wanted("bf16_rows_in_an_fp8_buffer", (FP8, 0), "combine", BF16, "payload", WIDE_ROWS),
    Wanted("weights_of_such_rows", (FP8, 0), "combine", BF16, "weights", WIDE_ROWS),
    Wanted("fp32_x_in_place_of_scales", (BF16, 64), "dispatch", torch.float32, "payload", WIDE_X),
    Wanted("fp8_x", (BF16, 0), "dispatch", FP8, "payload", NO_SUMS),
]


class Verb:
    """The verb of a case, as a function of its payload and weights."""

    def __init__(self, alone: Rank, wanted: Wanted) -> None:
        dtype, scale_bytes = wanted.buffer
        case = Case("sizes", num_ranks=1, dtype=dtype)
        sizes = {**case.sizes(), "scale_bytes": scale_bytes}
        self.buffer = alone.buffer(**sizes)
        self.topk_idx = case.inputs(0).topk_idx.to(alone.device)
        x = torch.ones(len(self.topk_idx), case.hidden, device=alone.device)
        self.handle = hybrid_ep.dispatch(self.buffer, x.to(dtype), self.topk_idx).handle
        self.name, slots = wanted.verb, case.num_slots
        rows = len(x) if self.name == "dispatch" else self.handle.num_rows
        shape = (rows, slots) if self.name == "dispatch" else (rows,)
        generator = torch.Generator().manual_seed(0)
        payload = torch.randn(rows, case.hidden, generator=generator)
        self.payload = payload.to(alone.device, wanted.payload)
        self.weights = torch.rand(shape, generator=generator).to(alone.device)
        getattr(self, wanted.leaf).requires_grad_()
        self.sent: list[str] = []
        names = ("route", "dispatch", "dispatch_fresh", "combine", "combine_backward")
        note_calls(self.buffer, names, lambda verb, *_, **__: self.sent.append(verb))

    def __call__(self, payload: Tensor, weights: Tensor) -> Tensor:
        if self.name == "combine":
            return hybrid_ep.combine(self.buffer, payload, self.handle, weights=weights)
        return hybrid_ep.dispatch(self.buffer, payload, self.topk_idx, weights, max_rows=64).rows

    def replayed(self, payload: Tensor, weights: Tensor) -> Tensor:
        return hybrid_ep.dispatch(self.buffer, payload, None, weights, handle=self.handle).rows

    def direct(self, payload: Tensor, weights: Tensor) -> Tensor:
        """The op, called past ``hybrid_ep.dispatch`` and its rules."""
        handle, ops = self.handle, torch.ops.hybrid_ep
        layout, num_tokens, buffer_id = handle.layout, handle.num_tokens, self.buffer.id
        if self.name == "combine":
            return ops.combine(payload, weights, None, layout, num_tokens, 0, 0, buffer_id)[0]
        num_rows = handle.num_rows
        return ops.dispatch(payload, weights, None, layout, num_tokens, num_rows, 0, buffer_id)[0]


def as_op(verb: Verb) -> Tensor:
    with mock.patch.object(verbs, "watched", lambda *tensors: True):
        return verb(verb.payload, verb.weights)


def replayed(verb: Verb) -> Tensor:
    way = verb.replayed if verb.name == "dispatch" else verb
    return way(verb.payload, verb.weights)


def compiled(verb: Verb) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(verb.__call__, backend="aot_eager")(verb.payload, verb.weights)


WAYS = {
    "call": lambda verb: verb(verb.payload, verb.weights),
    "replay": replayed,
    "op": as_op,
    "direct_op": lambda verb: verb.direct(verb.payload, verb.weights),
    "checkpoint": lambda verb: hybrid_ep.checkpoint(verb, verb.payload, verb.weights),
    "compiled": compiled,
}


def error_of(call: Callable[[], Any]) -> str:
    """The text of the ValueError that a call raises.

    Not by pytest.raises, which keeps the traceback: a checkpoint of torch that was left by an error
    keeps its dispatch mode on until the traceback is freed.
    """
    return what_it_raises(call, ValueError)


cases = pytest.mark.parametrize("wanted", WANTED, ids=str)
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@cases
@ways
def test_refused_in_the_forward(alone, wanted, way):
    verb = Verb(alone, wanted)
    assert wanted.text in error_of(lambda: way(verb))
    assert not verb.sent, "before anything is sent"


@cases
@ways
def test_works_where_no_gradient_is_wanted(alone, wanted, way):
    verb = Verb(alone, wanted)
    want = verb(verb.payload.detach(), verb.weights.detach())
    with torch.no_grad():
        made = way(verb)
    # a replay of the exact layout has no tail
    same_bytes(made, want[: len(made)], "without a gradient")


@cases
@ways
def test_a_verb_of_a_backward_checks_it_again(alone, wanted, way, monkeypatch):
    """The last resort: what the forward let through is not sent."""
    for rule in ("check_dispatch_gradient", "check_combine_gradient"):
        monkeypatch.setattr(rules, rule, lambda *args: None)
    verb = Verb(alone, wanted)
    made = way(verb)
    verb.sent.clear()
    loss = made.sum(dtype=torch.float32)
    text = error_of(loss.backward)
    assert re.search("a row and its scales need|rows of .* need|combine sums", text), text
    backward = "combine" if wanted.verb == "dispatch" else "combine_backward"
    assert backward not in verb.sent[-1:], "a checkpoint replays the forward, no more"


def test_a_second_derivative_is_refused_in_the_first_backward(alone):
    """The backward of fp8 rows combines zeros of bf16, which an fp8 Buffer cannot dispatch."""
    verb = Verb(alone, Wanted("", (FP8, 0), "dispatch", FP8, "weights", WIDE_ROWS))
    out = hybrid_ep.dispatch(verb.buffer, verb.payload, verb.topk_idx, verb.weights)
    (once,) = torch.autograd.grad((out.weights**2).sum(), verb.weights, retain_graph=True)
    same_bytes(once, 2 * verb.weights.detach(), "first derivative")
    loss = (out.weights**2).sum()
    text = error_of(lambda: torch.autograd.grad(loss, verb.weights, create_graph=True))
    assert WIDE_ROWS in text


Make = Callable[[Tensor], Tensor]
ALONE: dict[str, tuple[tuple[torch.dtype, int], Make]] = {
    "fp8_x": ((BF16, 0), lambda x: x.to(FP8)),
    "fp8_x_in_an_fp8_buffer": ((FP8, 0), lambda x: x.to(FP8)),
    "fp32_x_in_place_of_scales": ((BF16, 64), lambda x: x.to(FP8).float()),
    "int32_x": ((torch.float32, 0), lambda x: (8 * x).to(torch.int32)),
    "int16_x": ((BF16, 0), lambda x: (8 * x).to(torch.int16)),
}


@pytest.mark.parametrize("buffer, make", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("watched", [False, True], ids=["function", "op"])
def test_weights_alone_get_their_gradient_whatever_x_is(alone, watched, buffer, make, monkeypatch):
    if watched:
        monkeypatch.setattr(verbs, "watched", lambda *tensors: True)
    verb = Verb(alone, Wanted("", buffer, "dispatch", torch.float32, "weights", ""))
    x = make(verb.payload)
    out = hybrid_ep.dispatch(verb.buffer, x, verb.topk_idx, verb.weights)
    dots = out.rows.float().sum(dim=1)
    (got,) = torch.autograd.grad((dots * out.weights).sum(), verb.weights)
    want = x.float().sum(dim=1, keepdim=True).expand_as(got)
    torch.testing.assert_close(got, want)  # topk_idx has no hole and no duplicate
