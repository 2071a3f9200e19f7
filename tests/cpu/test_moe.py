"""The MoE layer: split over ranks, compiled and bounded it is the layer of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.launch import run_ranks
from hybrid_ep.moe import GroupedExperts, MoELayer, Router, grouped_mm, replicated_parameters
from tests.launch import PATIENCE

HIDDEN, FFN_HIDDEN, NUM_EXPERTS, TOPK = 32, 24, 6, 2
TOKENS = [37, 0, 64]  # of each rank
NUM_RANKS = len(TOKENS)
MODES = {
    "exact": {},
    "max_rows": {"max_rows": 128},
    "plain softmax": {"renormalise": False},
}


def make_buffer() -> hybrid_ep.Buffer:
    return hybrid_ep.Buffer(
        hidden=HIDDEN,
        num_experts=NUM_EXPERTS,
        max_tokens=64,
        topk=TOPK,
        dtype=torch.float32,
        device="cpu",
        backend="torch",
        config=PATIENCE,
    )


def batch_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x, grad = torch.randn(2, TOKENS[rank], HIDDEN, generator=generator)
    return x.requires_grad_(), grad


def step(layer: MoELayer, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    out = layer(x)
    ((out.y * grad).sum() + out.aux_loss).backward()
    assert not out.overflow
    return {"y": out.y.detach(), "aux_loss": out.aux_loss.detach(), "x.grad": x.grad}


def parameter_grads(layer: MoELayer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def one_rank(device: torch.device) -> dict:
    buffer = make_buffer()
    results = {}
    for mode, arguments in MODES.items():
        layer = MoELayer(buffer, FFN_HIDDEN, seed=3, **arguments)
        result = step(layer, *batch_of(dist.get_rank()))
        for parameter in replicated_parameters(layer):
            dist.all_reduce(parameter.grad)
        result |= parameter_grads(layer)
        # lists: a tensor would travel by a file descriptor of a process about to end
        results[mode] = {name: tensor.tolist() for name, tensor in result.items()}
    return results


def test_ranks_together_are_one_process() -> None:
    by_rank = run_ranks(one_rank, NUM_RANKS, device="cpu", timeout_s=60)

    buffer = make_buffer()
    for mode, arguments in MODES.items():
        layer = MoELayer(buffer, FFN_HIDDEN, seed=3, **arguments)
        if "max_rows" in arguments:
            layer.max_rows *= NUM_RANKS
        for rank, results in enumerate(by_rank):
            for name, wanted in step(layer, *batch_of(rank)).items():
                found = torch.tensor(results[mode][name]).view(wanted.shape)
                torch.testing.assert_close(found, wanted, msg=lambda m, n=name: f"{n}: {m}")
        for name, wanted in parameter_grads(layer).items():
            shares = [torch.tensor(results[mode][name]) for results in by_rank]
            assert wanted.abs().max() > 0
            if name.startswith("experts."):
                torch.testing.assert_close(torch.cat(shares), wanted, rtol=1e-4, atol=1e-5)
            else:
                for share in shares:
                    torch.testing.assert_close(share, wanted, rtol=1e-4, atol=1e-5)


def test_compiled_whole_it_is_eager() -> None:
    layer = MoELayer(make_buffer(), FFN_HIDDEN, max_rows=128)
    x, grad = batch_of(2)
    wanted = step(layer, x, grad) | parameter_grads(layer)
    layer.zero_grad()

    # aot_eager traces forward and backward as inductor does, and needs no C++ compiler
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = step(compiled, x.detach().requires_grad_(), grad) | parameter_grads(layer)

    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], msg=lambda m, n=name: f"{n}: {m}")


def test_too_small_a_bound_is_reported() -> None:
    layer = MoELayer(make_buffer(), FFN_HIDDEN, max_rows=100)  # 64 tokens need 128
    out = layer(batch_of(2)[0])
    out.y.sum().backward()
    assert out.overflow and out.counts.sum() == 100
    assert all(grad.isfinite().all() for grad in parameter_grads(layer).values())


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


def test_any_leading_shape() -> None:
    layer = MoELayer(make_buffer(), FFN_HIDDEN)
    x = batch_of(2)[0].view(4, 16, HIDDEN)
    assert torch.equal(layer(x).y.view(64, HIDDEN), layer(x.view(64, HIDDEN)).y)


def test_on_the_meta_device_weights_are_made_later() -> None:
    """As for torch's own modules: to_empty() gives them memory, reset_parameters() fills it."""
    buffer = make_buffer()
    wanted = MoELayer(buffer, FFN_HIDDEN, seed=3)
    with torch.device("meta"):
        layer = MoELayer(buffer, FFN_HIDDEN, seed=3)
    assert all(weight.is_meta for weight in layer.parameters())
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.state_dict().keys() == wanted.state_dict().keys()
    for name, weight in wanted.state_dict().items():
        assert torch.equal(layer.state_dict()[name], weight), name
    assert layer(batch_of(0)[0]).y.device.type == "cpu"
    buffer.destroy()


def test_weights_are_on_the_device_and_of_the_dtype_asked_for() -> None:
    buffer = make_buffer()
    with torch.device("meta"):
        assert GroupedExperts(2, 8, 4).w1.is_meta and Router(8, 4, 2).weight.is_meta
        here = MoELayer(buffer, FFN_HIDDEN, device="cpu", dtype=torch.bfloat16)
    assert {weight.device.type for weight in here.parameters()} == {"cpu"}
    assert here.router.weight.dtype == torch.float32
    assert {weight.dtype for weight in here.experts.parameters()} == {torch.bfloat16}
    buffer.destroy()
