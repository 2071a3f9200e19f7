"""The nvlink backend without a GPU: an extension whose calls return at once, or fail on demand.

For tests, and for benchmarks of the host's Python.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from hybrid_ep import group, ops
from hybrid_ep.backends import streams
from hybrid_ep.backends.cuda import nvlink, nvshmem, settings
from hybrid_ep.backends.cuda.arguments import Fields
from hybrid_ep.ops import rules


@dataclass
class Fake:
    """``hybrid_ep._nvlink`` for one rank: remembers what it was asked, and when.

    Attributes:
        fails: what CUDA says, for each call that is to fail.
        events: (call, time of the host's clock, which ranks share).
        num_rows: of every exact dispatch.
        left_behind: the fault of an earlier call.
        given: what the last verb was given, by the struct of csrc/kernels/verbs.h that it fills.
        refuses: the rule that the arguments of a call break.
        while_waiting: done while the host waits for the number of rows.
    """

    fails: dict[str, str] = field(default_factory=dict)
    events: list[tuple[str, float]] = field(default_factory=list)
    num_rows: int = 0
    left_behind: SimpleNamespace | None = None
    given: dict[str, Fields] = field(default_factory=dict)
    refuses: dict[str, str] = field(default_factory=dict)
    while_waiting: Callable[[], None] | None = None

    RuntimeConfig = SimpleNamespace
    handle_words = 64
    symmetric_bytes = 1 << 20
    SHARED_MEMORY = 227 << 10
    shared = 227 << 10  # of a block, on this GPU
    routes = 0
    is_half_made = False
    interrupts = False
    config: SimpleNamespace | None = None

    def note(self, call: str) -> None:
        self.events.append((call, time.monotonic()))
        if call in self.fails:
            raise RuntimeError(self.fails[call])
        if call in self.refuses:
            raise ValueError(self.refuses[call])

    def Runtime(self, config: SimpleNamespace) -> Fake:
        self.note("Runtime")
        self.config = config
        return self

    def shared_memory_per_block(self, device: int) -> int:
        return self.shared

    def num_routes(self) -> int:
        return self.routes

    def unmap_peers(self) -> None:
        self.note("unmap_peers")

    def free_now(self) -> None:
        self.note("free_now")

    def give_up(self, reason: int) -> None:
        self.note(f"give_up {reason}")

    def ipc_handle(self) -> bytes:
        self.note("ipc_handle")
        return b"handle"

    def open_peers(self, handles: list[bytes]) -> None:
        self.note("open_peers")

    def destroy(self) -> None:
        self.note("destroy")

    def fault(self) -> SimpleNamespace | None:
        return self.left_behind

    def route(self, choices: Fields, new_layout: Fields, want_mail: bool, stream: int) -> int:
        self.note("route")
        self.given = {"Choices": choices, "NewLayout": new_layout}
        return 1

    def publish(self, sent: Fields, stream: int) -> None:
        self.note("publish")
        self.is_half_made = True
        self.given["Sent"] = sent

    def publish_fresh(self, choices: Fields, new_layout: Fields, sent: Fields, stream: int) -> int:
        self.note("publish_fresh")
        self.is_half_made = True
        self.given = {"Choices": choices, "NewLayout": new_layout, "Sent": sent}
        return 1

    def await_offsets(self, ticket: int, stream: int) -> list[int]:
        self.note("await_offsets")
        if self.interrupts:
            raise KeyboardInterrupt
        if self.while_waiting is not None:
            self.while_waiting()
        experts = self.config.num_experts // self.config.num_ranks
        return [0] * experts + [self.num_rows]

    def pull(self, received: Fields, stream: int) -> None:
        self.is_half_made = False
        self.note("pull")
        self.given["Received"] = received

    def dispatch(self, sent: Fields, received: Fields, stream: int) -> None:
        self.note("dispatch")
        self.given = {"Sent": sent, "Received": received}

    def dispatch_fresh(
        self, choices: Fields, new_layout: Fields, sent: Fields, received: Fields, stream: int
    ) -> None:
        self.note("dispatch_fresh")
        self.given = {
            "Choices": choices,
            "NewLayout": new_layout,
            "Sent": sent,
            "Received": received,
        }

    def combine(self, summed: Fields, stream: int) -> None:
        self.note("combine")
        self.given = {"Summed": summed}

    def combine_backward(
        self, sent: Fields, received: Fields, weighted: Fields, stream: int
    ) -> None:
        self.note("combine_backward")
        self.given = {"Sent": sent, "Received": received, "Weighted": weighted}

    def free_unread_memory(self) -> None:
        self.note("free_unread_memory")

    def times(self, call: str) -> list[float]:
        return [when for what, when in self.events if what == call]


class FakeStream:
    """The current stream of a fake GPU; remembers which other streams it was told to wait for."""

    def __init__(self, address: int = 0) -> None:
        self.cuda_stream = address
        self.is_capturing = False
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)


class FakeStreams:
    """``current`` is what torch would call the current stream."""

    def __init__(self) -> None:
        self.current = FakeStream()
        self.recorded: list[tuple[int, FakeStream]] = []  # address of a tensor, stream

    def record(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.recorded.append((tensor.data_ptr(), stream))

    def reader(self, device: torch.device) -> Callable[[], int]:
        return lambda: self.current.cuda_stream


@contextlib.contextmanager
def instead(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Each owner's name stands for its replacement."""
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def gpu_with(fake: Fake, host: str = "a host") -> contextlib.AbstractContextManager:
    """What a Hopper with this extension would answer."""
    return instead(
        (nvlink, "_nvlink", fake),
        (nvshmem, "gpu_uuid", lambda device: "GPU-0"),  # where auto tries nvshmem
        (group, "gpu_uuid", lambda device: "GPU-0"),  # where it ends with torch
        (settings, "num_sms", lambda device: 132),
        (group, "host_name", lambda: host),
        (ops, "prepare_order", lambda device: None),
        (torch.cuda, "get_device_capability", lambda device: (9, 0)),
        (torch.cuda, "synchronize", lambda device: None),
    )


@contextlib.contextmanager
def cpu_with(fake: Fake) -> Iterator[FakeStreams]:
    """The nvlink backend takes tensors of the CPU; its kernels do nothing."""
    fake_streams = FakeStreams()
    with (
        gpu_with(fake),
        instead(
            (settings, "what_is_lacking", lambda *args: None),
            (streams, "stream_reader", fake_streams.reader),
            (torch.cuda, "current_stream", lambda device: fake_streams.current),
            (
                torch.cuda,
                "is_current_stream_capturing",
                lambda: fake_streams.current.is_capturing,
            ),
            (streams, "_is_capturing", lambda stream: stream.is_capturing),
            (
                torch.Tensor,
                "record_stream",
                lambda tensor, stream: fake_streams.record(tensor, stream),
            ),
            (
                rules,
                "check_experts",
                lambda communicator, topk_idx: None,
            ),  # a GPU's kernels do that
        ),
    ):
        yield fake_streams
