"""The MoE layer: split over ranks, compiled and bounded it is the layer of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.moe import (
    WEIGHT_PLACES,
    GroupedExperts,
    MoELayer,
    Router,
    replicated_parameters,
)
from tests.launch import Pool, Rank

HIDDEN, FFN_HIDDEN, NUM_EXPERTS, TOPK = 32, 24, 6, 2
TOKENS = [37, 0, 64]  # of each rank
NUM_RANKS = len(TOKENS)
MODES = {
    "exact": {},
    "max_rows": {"max_rows": 128},
    "plain softmax": {"renormalise": False},
    "weights at the activation": {"weight_at": "activation"},
    "weights at the activation, max_rows": {"weight_at": "activation", "max_rows": 128},
}


def make_buffer(me: Rank) -> hybrid_ep.Buffer:
    return me.buffer(
        hidden=HIDDEN, num_experts=NUM_EXPERTS, max_tokens=64, topk=TOPK, dtype=torch.float32
    )


def batch_of(rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x, grad = torch.randn(2, TOKENS[rank], HIDDEN, generator=generator).to(device)
    return x.requires_grad_(), grad


def step(layer: MoELayer, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    out = layer(x)
    ((out.y * grad).sum() + out.aux_loss).backward()
    assert not out.overflow
    return {"y": out.y.detach(), "aux_loss": out.aux_loss.detach(), "x.grad": x.grad}


def parameter_grads(layer: MoELayer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def train(me: Rank) -> dict[str, dict[str, torch.Tensor]]:
    """What a step gives in each mode; gradients of replicated parameters are added up."""
    buffer = make_buffer(me)
    results = {}
    for mode, arguments in MODES.items():
        layer = MoELayer(buffer, FFN_HIDDEN, seed=3, **arguments)
        result = step(layer, *batch_of(me.rank, me.device))
        for parameter in replicated_parameters(layer):
            total = parameter.grad.cpu()
            dist.all_reduce(total)
            parameter.grad.copy_(total)
        results[mode] = result | parameter_grads(layer)
    buffer.destroy()
    return results


def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda m: f"{what}: {m}")


def test_ranks_together_are_one_process(world: Callable[[int], Pool], alone: Rank) -> None:
    by_rank = world(NUM_RANKS).run(train)
    buffer = make_buffer(alone)
    for mode, arguments in MODES.items():
        layer = MoELayer(buffer, FFN_HIDDEN, seed=3, **arguments)
        if "max_rows" in arguments:
            layer.max_rows *= NUM_RANKS
        for rank, results in enumerate(by_rank):
            for name, wanted in step(layer, *batch_of(rank, alone.device)).items():
                close(results[mode][name], wanted.cpu(), f"{name} of rank {rank}, {mode}")
        for name, wanted in parameter_grads(layer).items():
            shares = [results[mode][name] for results in by_rank]
            assert wanted.abs().max() > 0
            if name.startswith("experts."):
                shares = [torch.cat(shares)]
            for share in shares:
                close(share, wanted.cpu(), f"gradient of {name}, {mode}")
    buffer.destroy()


@pytest.mark.parametrize("weight_at", WEIGHT_PLACES)
def test_compiled_whole_it_is_eager(alone: Rank, weight_at: str) -> None:
    layer = MoELayer(make_buffer(alone), FFN_HIDDEN, max_rows=128, weight_at=weight_at)
    x, grad = batch_of(2, alone.device)
    wanted = step(layer, x, grad) | parameter_grads(layer)
    layer.zero_grad()

    torch._dynamo.reset()
    # aot_eager traces forward and backward as inductor does, and needs no C++ compiler
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = step(compiled, x.detach().requires_grad_(), grad) | parameter_grads(layer)

    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], msg=lambda m, n=name: f"{n}: {m}")


def test_where_the_weights_enter_changes_results_by_rounding(alone: Rank) -> None:
    buffer = make_buffer(alone)
    results = []
    for weight_at in WEIGHT_PLACES:
        layer = MoELayer(buffer, FFN_HIDDEN, seed=3, weight_at=weight_at)
        results.append(step(layer, *batch_of(2, alone.device)) | parameter_grads(layer))
    wanted, found = results
    for name, tensor in wanted.items():
        close(found[name], tensor, name)
    with pytest.raises(ValueError, match=r"weight_at must be one of .* got 'router'"):
        MoELayer(buffer, FFN_HIDDEN, weight_at="router")
    buffer.destroy()


def test_main_grad_of_the_layer(alone: Rank) -> None:
    buffer = make_buffer(alone)
    wanted, layer = (MoELayer(buffer, FFN_HIDDEN, main_grad=on) for on in (False, True))
    for each in (wanted, layer):
        step(each, *batch_of(2, alone.device))
    for (name, weight), other in zip(layer.named_parameters(), wanted.parameters(), strict=True):
        found = weight.main_grad if name.startswith("experts.") else weight.grad
        assert torch.equal(found, other.grad), name
    buffer.destroy()


@pytest.mark.parametrize("weight_at", WEIGHT_PLACES)
def test_too_small_a_bound_is_reported(alone: Rank, weight_at: str) -> None:
    # 64 tokens need 128
    layer = MoELayer(make_buffer(alone), FFN_HIDDEN, max_rows=100, weight_at=weight_at)
    out = layer(batch_of(2, alone.device)[0])
    out.y.sum().backward()
    assert out.overflow and out.counts.sum() == 100
    assert all(grad.isfinite().all() for grad in parameter_grads(layer).values())


def test_any_leading_shape(alone: Rank) -> None:
    layer = MoELayer(make_buffer(alone), FFN_HIDDEN)
    x = batch_of(2, alone.device)[0].view(4, 16, HIDDEN)
    assert torch.equal(layer(x).y.view(64, HIDDEN), layer(x.view(64, HIDDEN)).y)


def test_on_the_meta_device_weights_are_made_later(alone: Rank) -> None:
    """As for torch's own modules: to_empty() gives them memory, reset_parameters() fills it."""
    buffer = make_buffer(alone)
    wanted = MoELayer(buffer, FFN_HIDDEN, seed=3)
    with torch.device("meta"):
        layer = MoELayer(buffer, FFN_HIDDEN, seed=3)
    assert all(weight.is_meta for weight in layer.parameters())
    layer.to_empty(device=alone.device)
    layer.reset_parameters()
    assert layer.state_dict().keys() == wanted.state_dict().keys()
    for name, weight in wanted.state_dict().items():
        assert torch.equal(layer.state_dict()[name], weight), name
    assert layer(batch_of(0, alone.device)[0]).y.device == alone.device
    buffer.destroy()


def test_weights_are_on_the_device_and_of_the_dtype_asked_for(alone: Rank) -> None:
    buffer = make_buffer(alone)
    with torch.device("meta"):
        assert GroupedExperts(2, 8, 4).w1.is_meta and Router(8, 4, 2).weight.is_meta
        here = MoELayer(buffer, FFN_HIDDEN, device="cpu", dtype=torch.bfloat16)
        there = MoELayer(buffer, FFN_HIDDEN, device=alone.device)
    assert {weight.device.type for weight in here.parameters()} == {"cpu"}
    assert {weight.device for weight in there.parameters()} == {alone.device}
    assert here.router.weight.dtype == torch.float32
    assert {weight.dtype for weight in here.experts.parameters()} == {torch.bfloat16}
    buffer.destroy()
