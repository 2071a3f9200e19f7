"""Errors that need no peer: a Config, a backend that this machine cannot run, PeerError itself."""

import pickle

import pytest
import torch

import hybrid_ep
from tests.ranks import one_rank_fails
from tests.ranks.mistakes import CASE


@pytest.mark.parametrize(
    "wrong, text",
    [
        (
            {"num_sms_dispatch": 0},
            "Config.num_sms_dispatch must be an integer of at least 1, got 0",
        ),
        ({"timeout_s": 0.0}, "Config.timeout_s must be a positive number, or None"),
    ],
)
def test_bad_config(wrong, text):
    with pytest.raises(ValueError) as raised:
        hybrid_ep.Config(**wrong)
    assert text in str(raised.value)


without_a_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is here, and the test is of a machine without one"
)


@without_a_gpu
def test_Automodel_2789_backend_is_not_replaced(alone):
    with pytest.raises(RuntimeError, match="the nvlink backend cannot run: rank 0: "):
        alone.buffer(**{**CASE.sizes(), "backend": "nvlink"})
    buffer = alone.buffer(**{**CASE.sizes(), "backend": "auto"})
    assert buffer.backend == "torch"
    assert "because the nvlink backend cannot run: rank 0: " in buffer.describe()


@without_a_gpu
def test_a_GPU_that_one_rank_lacks_raises_on_all(world):
    (first, after_first), (second, after_second) = world(2).run(
        one_rank_fails.build, [{}, {"device": "cuda"}]
    )
    assert second[0] == "ValueError" and "got cuda: no CUDA device" in second[1]
    assert first == ("ValueError", f"rank 1: {second[1]}")
    assert after_first == after_second == ("", "")


def test_peer_error_travels_between_processes():
    facts = {"rank": 1, "peer": 2, "phase": "route", "call": 3, "channel": 4}
    error = hybrid_ep.PeerError(reason="it slept", **facts)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert {name: getattr(copy, name) for name in facts} == facts


def test_rows_of_any_width_on_the_torch_backend():
    buffer = hybrid_ep.Buffer(
        hidden=5, num_experts=2, max_tokens=3, topk=1, device="cpu", backend="torch"
    )
    x = torch.arange(15.0).view(3, 5).bfloat16()
    out = hybrid_ep.dispatch(buffer, x, torch.tensor([[1], [0], [1]]))
    assert torch.equal(out.rows, x[[1, 0, 2]])
    assert torch.equal(hybrid_ep.combine(buffer, out.rows, out.handle), x)
