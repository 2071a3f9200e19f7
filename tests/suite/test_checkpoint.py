"""The arguments of hybrid_ep.checkpoint are those of torch's; what they compute: test_autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import noop_context_fn

import hybrid_ep
from tests.cases import Case
from tests.checks import same_bytes

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
