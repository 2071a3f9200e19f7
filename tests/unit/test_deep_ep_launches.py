"""What HybridEPBuffer launches and waits for beside the library's own dispatch and combine."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_ep.backends.cuda import maps
from hybrid_ep.integrations.deep_ep import HybridEPBuffer, configure, settings
from hybrid_ep.ops import verbs
from tools.fake_nvlink import Fake, cpu_with

TOKENS, HIDDEN, EXPERTS, TOPK, ROWS = 6, 32, 8, 2, 24
# they make no kernel on a GPU: memory, and a tensor of what the host has
ON_THE_HOST = {
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.empty_strided.default",
    "aten.lift_fresh.default",
}


class Extension(Fake):
    """With the kernels of maps."""

    def map_to_topk(self, fields: tuple[int, ...], stream: int) -> None:
        self.note("map_to_topk")

    def topk_to_dense(self, fields: tuple[int, ...], stream: int) -> None:
        self.note("topk_to_dense")


class TorchOps(TorchDispatchMode):
    """The ops of torch that would launch a kernel or a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not op.is_view and str(op) not in ON_THE_HOST:
            self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.fixture
def extension():
    fake = Extension(num_rows=ROWS)
    settings.forget()
    configure(topk=TOPK, max_tokens=64)
    with (
        cpu_with(fake),
        mock.patch.object(maps, "_extension", lambda: fake),
        mock.patch.object(maps, "serve", lambda device: True),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
        mock.patch.object(verbs, "_len_torch_dispatch_stack", lambda: 0),  # TorchOps is no caller
    ):
        yield fake
    settings.forget()


def routed() -> dict[str, torch.Tensor]:
    return {
        "hidden": torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16),
        "routing_map": torch.zeros(TOKENS, EXPERTS, dtype=torch.bool),
        "probs": torch.zeros(TOKENS, EXPERTS),
    }


@pytest.mark.parametrize(
    ("options", "verbs_made"),
    [
        pytest.param({}, ["publish_fresh", "await_offsets", "pull"], id="blocking"),
        pytest.param(
            {"non_blocking": True, "num_permuted_tokens": ROWS},
            ["dispatch_fresh"],
            id="non_blocking",
        ),
    ],
)
def test_one_kernel_before_a_dispatch_and_one_in_its_backward(extension, options, verbs_made):
    buffer = HybridEPBuffer(None, HIDDEN, TOKENS, EXPERTS)
    inputs = routed()
    buffer.dispatch_with_permute(**inputs, **options)  # makes the Buffer
    extension.events.clear()
    with TorchOps() as ops:
        rows, probs, _, counts, handle = buffer.dispatch_with_permute(**inputs, **options)
        overflow = handle[-1]
    assert [call for call, _ in extension.events] == ["map_to_topk", *verbs_made]
    assert ops.seen == []
    assert (counts.shape, counts.dtype) == ((EXPERTS,), torch.int64)
    assert (overflow.shape, overflow.dtype) == ((1,), torch.int32)

    extension.events.clear()
    with TorchOps() as ops:
        grads = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
    assert [call for call, _ in extension.events] == ["combine", "topk_to_dense"]
    assert ops.seen == []
    assert [grad.shape for grad in grads] == [(TOKENS, HIDDEN), (TOKENS, EXPERTS)]


def test_the_kernel_of_a_map_tells_the_dispatch_how_many_experts_tokens_have(extension):
    buffer = HybridEPBuffer(None, HIDDEN, TOKENS, EXPERTS)
    *_, handle = buffer.dispatch_with_permute(**routed())
    *_, most, num_most, slots = extension.given["Choices"]
    assert most != 0 and (num_most, slots) == (1, TOPK)
    assert handle.inner.host_offsets == (0,) * EXPERTS + (ROWS,)
