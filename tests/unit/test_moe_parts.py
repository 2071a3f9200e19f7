"""The parts of the MoE layer: experts by their number, products by groups, the router."""

from __future__ import annotations

import pytest
import torch

from hybrid_ep.moe import GroupedExperts, Router, grouped_mm

HIDDEN, FFN_HIDDEN, NUM_EXPERTS, TOPK = 32, 24, 6, 2


def test_an_expert_does_not_depend_on_its_rank() -> None:
    whole = GroupedExperts(6, HIDDEN, FFN_HIDDEN, seed=5)
    for first in (0, 2, 4):
        part = GroupedExperts(2, HIDDEN, FFN_HIDDEN, first_expert=first, seed=5)
        for name, weight in part.named_parameters():
            assert torch.equal(weight, whole.get_parameter(name)[first : first + 2])
    assert not torch.equal(whole.w1[0], whole.w1[1])
    assert not torch.equal(whole.w1[0], GroupedExperts(1, HIDDEN, FFN_HIDDEN, seed=6).w1[0])


@pytest.mark.parametrize("num_rows", [7, 10], ids=["no tail", "tail"])
def test_grouped_mm_is_a_product_per_group(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([3, 3, 5, 7], dtype=torch.int32)
    expert_of_row = torch.tensor([0, 0, 0, 2, 2, 3, 3])

    y = grouped_mm(rows, weight, ends)
    wanted = torch.einsum("mi,mio->mo", rows[:7], weight[expert_of_row])
    torch.testing.assert_close(y[:7], wanted)
    assert torch.autograd.gradcheck(lambda r, w: grouped_mm(r, w, ends)[:7], (rows, weight))


def test_router_weights_and_aux_loss() -> None:
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(0))
    idx, weights, aux_loss = Router(HIDDEN, NUM_EXPERTS, TOPK, seed=1)(x.bfloat16())
    plain_idx, plain, _ = Router(HIDDEN, NUM_EXPERTS, TOPK, seed=1, renormalise=False)(x.bfloat16())
    assert weights.dtype == aux_loss.dtype == torch.float32
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(50))
    assert torch.equal(idx, plain_idx) and (plain.sum(dim=1) < 1).all()

    # even load and even probabilities give 1; all tokens on the same K experts give E / K
    even = Router(TOPK, TOPK, TOPK)
    assert even(torch.zeros(4, TOPK))[2].item() == pytest.approx(1)
    skewed = Router(1, NUM_EXPERTS, TOPK)
    with torch.no_grad():
        skewed.weight.copy_(torch.tensor([[50.0], [50.0], [0], [0], [0], [0]]))
    assert skewed(torch.ones(4, 1))[2].item() == pytest.approx(NUM_EXPERTS / TOPK)
    assert Router(HIDDEN, NUM_EXPERTS, TOPK)(x[:0])[2].item() == 0
