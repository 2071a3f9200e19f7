"""Dense maps and top-k routing, each made of the other, against plain loops; their gradients."""

import pytest
import torch

import hybrid_ep
from hybrid_ep.backends.cuda import maps as kernels

pytestmark = pytest.mark.not_on("nvlink", "nodes", why="no backend takes part: torch_gpu shows it")


def loops(routing_map, probs, topk):
    """What map_to_topk returns, expert by expert, but the most experts of all tokens."""
    tokens, experts = routing_map.shape
    topk_idx = torch.full((tokens, topk), -1, dtype=torch.int16)
    weights = torch.zeros(tokens, topk)
    most = 0
    for t in range(tokens):
        named = [e for e in range(experts) if routing_map[t, e]]
        most = max(most, len(named))
        for slot, expert in enumerate(named[:topk]):
            topk_idx[t, slot] = expert
            weights[t, slot] = probs[t, expert]
    return topk_idx, weights, torch.tensor(most, dtype=torch.int32)


def drawn(tokens, experts, density):
    generator = torch.Generator().manual_seed(tokens * 1000 + experts)
    routing_map = torch.rand(tokens, experts, generator=generator) < density
    probs = torch.randn(tokens, experts, generator=generator)
    # what the map leaves out is not read; a prob of zero that it names is one
    probs = torch.where(routing_map, probs, float("nan"))
    if tokens and experts > 2:
        probs[routing_map[:, 1], 1] = 0.0
    return routing_map, probs


def same_bits(got, expected):
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert got.cpu().numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(
    ("tokens", "experts", "topk"),
    [(0, 4, 2), (1, 1, 1), (9, 5, 5), (33, 40, 3), (7, 300, 32), (5000, 3, 2)],
)
def test_map_to_topk(alone, tokens, experts, topk, density, with_probs):
    routing_map, probs = drawn(tokens, experts, density)
    given = probs.to(alone.device) if with_probs else None
    topk_idx, weights, most = hybrid_ep.map_to_topk(routing_map.to(alone.device), given, topk)
    expected = loops(routing_map, probs, topk)
    same_bits(topk_idx, expected[0])
    assert most.dim() == 1 and len(most) >= 1
    same_bits(most.max(), expected[2])
    if with_probs:
        same_bits(weights, expected[1])
    else:
        assert weights is None


@pytest.mark.parametrize("at", [0, 15, 16, 4095, 4096, 4999])
def test_one_token_of_many_has_the_most_experts(alone, at):
    routing_map = torch.zeros(5000, 9, dtype=torch.bool, device=alone.device)
    routing_map[:, 3] = True
    routing_map[at] = True
    topk_idx, _, most = hybrid_ep.map_to_topk(routing_map, None, 2)
    assert (most.max(), most.min() >= 1) == (9, True)
    assert topk_idx[at].tolist() == [0, 1] and (topk_idx == 3).sum() == 4999


def test_the_last_of_many_experts(alone):
    routing_map = torch.zeros(2, 2**15 - 1, dtype=torch.bool, device=alone.device)
    routing_map[0, -1] = routing_map[1, 0] = True
    topk_idx, _, most = hybrid_ep.map_to_topk(routing_map, None, 2)
    assert topk_idx.tolist() == [[2**15 - 2, -1], [0, -1]] and most == 1


def test_strides_do_not_matter(alone):
    routing_map, probs = (each.to(alone.device) for each in drawn(6, 10, 0.3))
    straight = hybrid_ep.map_to_topk(routing_map, probs, 4)
    turned = hybrid_ep.map_to_topk(routing_map.t().contiguous().t(), probs.t().clone().t(), 4)
    assert all(map(torch.equal, straight, turned))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_topk_to_dense(alone, dtype):
    topk_idx = torch.tensor([[2, -1, 0], [1, 1, 3], [-1, -1, -1]], dtype=dtype)
    values = torch.tensor([[1.5, float("nan"), -2.0], [1e8, 1.0, -0.0], [7.0, 7.0, 7.0]])
    dense = hybrid_ep.topk_to_dense(values.to(alone.device), topk_idx.to(alone.device), 4)
    once = torch.tensor(1e8) + torch.tensor(1.0)
    expected = torch.tensor([[-2.0, 0, 1.5, 0], [0, once, 0, 0], [0, 0, 0, 0]])
    same_bits(dense, expected)


@pytest.mark.parametrize("topk", [8, 32, 70])
def test_many_slots_name_few_experts(alone, topk):
    generator = torch.Generator().manual_seed(topk)
    topk_idx = torch.randint(-1, 6, (50, topk), generator=generator)
    values = torch.randn(50, topk, generator=generator)
    expected = torch.zeros(50, 6)
    for t in range(50):
        for slot, expert in enumerate(topk_idx[t].tolist()):
            if expert >= 0:
                expected[t, expert] += values[t, slot]
    dense = hybrid_ep.topk_to_dense(values.to(alone.device), topk_idx.to(alone.device), 6)
    same_bits(dense, expected)


def test_a_profile_shows_the_kernels_that_run_without_it(alone, monkeypatch):
    monkeypatch.setattr(kernels, "serve", lambda device: True)
    monkeypatch.setattr(kernels, "topk_to_dense", lambda *inputs: "the kernel's")
    values = torch.zeros((2, 3), device=alone.device)
    with torch.profiler.profile():
        assert hybrid_ep.topk_to_dense(values, values.int(), 4) == "the kernel's"


def test_topk_to_dense_without_tokens(alone):
    empty = torch.zeros((0, 3), device=alone.device)
    assert hybrid_ep.topk_to_dense(empty, empty.int(), 5).shape == (0, 5)


def test_each_is_the_gradient_of_the_other(alone):
    routing_map, probs = (each.to(alone.device) for each in drawn(12, 9, 0.4))
    probs = probs.nan_to_num().requires_grad_()
    topk_idx, weights, _ = hybrid_ep.map_to_topk(routing_map, probs, 5)
    grad = torch.randn(12, 5, device=alone.device)
    (of_probs,) = torch.autograd.grad(weights, probs, grad)
    assert torch.equal(of_probs, hybrid_ep.topk_to_dense(grad, topk_idx, 9))

    values = grad.clone().requires_grad_()
    dense = hybrid_ep.topk_to_dense(values, topk_idx, 9)
    (of_values,) = torch.autograd.grad(dense, values, probs.detach())
    assert torch.equal(of_values, weights)


MAP, PROBS = torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: hybrid_ep.map_to_topk(MAP.int(), None, 2), "must be bool [T, E], got torch.int32"),
        (lambda: hybrid_ep.map_to_topk(MAP[0], None, 2), "must be bool [T, E], got torch.bool [3]"),
        (lambda: hybrid_ep.map_to_topk(MAP, PROBS, 4), "at most the 3 experts of the map, got 4"),
        (lambda: hybrid_ep.map_to_topk(MAP, PROBS, 0), "topk must be an integer of at least 1"),
        (lambda: hybrid_ep.map_to_topk(MAP, PROBS.half(), 2), "probs must be float32, got"),
        (lambda: hybrid_ep.map_to_topk(MAP, PROBS[:1], 2), "shape of routing_map, [2, 3], got [1"),
        (lambda: hybrid_ep.map_to_topk(MAP[:, :0], None, 1), "must have 1 to 32767 experts, got 0"),
        (lambda: hybrid_ep.topk_to_dense(PROBS.half(), MAP.int(), 4), "values must be float32"),
        (lambda: hybrid_ep.topk_to_dense(PROBS, MAP[:1].int(), 4), "must have one shape [T, K]"),
        (lambda: hybrid_ep.topk_to_dense(PROBS, MAP.int(), 0), "num_experts must be an integer"),
        (lambda: hybrid_ep.topk_to_dense(PROBS, MAP.char(), 4), "must be int16, int32 or int64"),
        (
            lambda: hybrid_ep.topk_to_dense(PROBS, MAP.int().to("meta"), 4),
            "topk_idx must be where values is, on cpu, got meta",
        ),
        (
            lambda: hybrid_ep.map_to_topk(MAP, PROBS.to("meta"), 2),
            "probs must be where routing_map is, on cpu, got meta",
        ),
    ],
)
def test_rules(alone, call, says):
    with pytest.raises(ValueError) as raised:
        call()
    assert says in str(raised.value)
