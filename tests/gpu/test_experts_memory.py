"""What the experts keep from forward to backward, and what their backward takes, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hybrid_ep.moe import GroupedExperts
from tests.launch import Rank

pytestmark = pytest.mark.not_on("nodes", why="experts depend on the device alone")
ROWS, HIDDEN, FFN_HIDDEN, NUM_EXPERTS = 8192, 2048, 1024, 4
ROWS_BYTES, WIDE_BYTES = 2 * ROWS * HIDDEN, 2 * ROWS * FFN_HIDDEN  # [M, H] and [M, F] of bf16
WEIGHT_BYTES = 3 * 2 * NUM_EXPERTS * HIDDEN * FFN_HIDDEN
ROOM = 8 << 20  # workspaces of the products


@pytest.fixture
def step(alone: Rank) -> Iterator[tuple[int, int]]:
    """Bytes kept by a forward, and the peak of its backward, both beyond what was there before."""
    device, bf16 = alone.device, torch.bfloat16
    experts = GroupedExperts(NUM_EXPERTS, HIDDEN, FFN_HIDDEN, dtype=bf16, device=device)
    offsets = (torch.arange(NUM_EXPERTS + 1, device=device) * (ROWS // NUM_EXPERTS)).int()
    rows = torch.randn(ROWS, HIDDEN, dtype=bf16, device=device, requires_grad=True)
    weights = torch.rand(ROWS, device=device, requires_grad=True)
    grad = torch.randn_like(rows)
    measured = (0, 0)
    for _ in range(2):  # the first compiles, and makes workspaces
        experts.zero_grad()
        rows.grad = weights.grad = None
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        out = experts(rows, offsets, weights)
        kept = torch.cuda.memory_allocated(device) - before
        torch.cuda.reset_peak_memory_stats(device)
        out.backward(grad)
        measured = kept, torch.cuda.max_memory_allocated(device) - before
        del out
    yield measured


def test_the_forward_keeps_its_result_and_two_pre_activations(step: tuple[int, int]) -> None:
    kept, _ = step
    assert kept <= ROWS_BYTES + 2 * WIDE_BYTES + ROOM


def test_the_backward_has_no_rows_in_fp32(step: tuple[int, int]) -> None:
    """Result, gradient of the rows and a part of it; pre-activations and their gradients."""
    _, peak = step
    assert peak <= 3 * ROWS_BYTES + 4 * WIDE_BYTES + WEIGHT_BYTES + ROOM
