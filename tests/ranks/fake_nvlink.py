"""The nvlink backend on ranks without a GPU: an extension that fails where a test wants it to."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import hybrid_ep.buffer
from hybrid_ep import rules
from hybrid_ep.backends import kernels, nvlink, nvshmem, streams
from hybrid_ep.backends.kernels import Fields
from tests.cases import Case
from tests.launch import Rank
from tests.ranks.memory import what_it_raises

CASE = Case("fake", num_ranks=3)
VERBS = Path(__file__).parents[2] / "csrc" / "verbs.h"


def field_names(struct: str) -> list[str]:
    """The fields of a struct of csrc/verbs.h, in their order."""
    body = re.search(rf"struct {struct} {{(.*?)}};", VERBS.read_text(), re.DOTALL)[1]
    declarations = re.sub(r"//.*", "", body).split(";")
    return [name for line in declarations for name in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]


@dataclass
class Fake:
    """``hybrid_ep._nvlink`` for one rank: remembers what it was asked, and when.

    Attributes:
        fails: what CUDA says, for each call that is to fail.
        events: (call, time of the host's clock, which ranks share).
        num_rows: of every exact dispatch.
        left_behind: the fault of an earlier call.
        given: what the last verb was given, by the struct of csrc/verbs.h that it fills.
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

    def required_rows(self, ticket: int, stream: int) -> int:
        self.note("required_rows")
        if self.interrupts:
            raise KeyboardInterrupt
        if self.while_waiting is not None:
            self.while_waiting()
        return self.num_rows

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
def _instead(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


@contextlib.contextmanager
def gpu_with(fake: Fake, host: str = "a host") -> Iterator[None]:
    """What a Hopper with this extension would answer."""
    with _instead(
        (nvlink, "_nvlink", fake),
        (nvshmem, "gpu_uuid", lambda device: "GPU-0"),  # where auto tries nvshmem
        (kernels, "num_sms", lambda device: 132),
        (hybrid_ep.buffer, "host_name", lambda: host),
        (hybrid_ep.buffer, "prepare_order", lambda device: None),
        (torch.cuda, "get_device_capability", lambda device: (9, 0)),
        (torch.cuda, "synchronize", lambda device: None),
    ):
        yield


@contextlib.contextmanager
def cpu_with(fake: Fake) -> Iterator[FakeStreams]:
    """The nvlink backend takes tensors of the CPU; its kernels do nothing."""
    fake_streams = FakeStreams()
    with (
        gpu_with(fake),
        _instead(
            (nvlink, "unavailable_reason", lambda buffer: None),
            (streams, "_reader", fake_streams.reader),
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
            (rules, "check_experts", lambda buffer, topk_idx: None),  # a GPU's kernels do that
        ),
    ):
        yield fake_streams


class Quiet:
    """A Buffer of one rank whose kernels do nothing, within ``cpu_with``."""

    def __init__(self, me: Rank, fake: Fake, streams: FakeStreams) -> None:
        case = CASE.on(1)
        self.fake, self.streams = fake, streams
        self.buffer = me.buffer(**case.sizes(), device="cpu", backend="nvlink")
        self.inputs = case.inputs(0)
        self.asked()

    def dispatch(self, handle: hybrid_ep.Handle | None = None, **sizing: int) -> Any:
        topk_idx = None if handle else self.inputs.topk_idx
        x, weights = self.inputs.x, self.inputs.weights
        return hybrid_ep.dispatch(self.buffer, x, topk_idx, weights, handle=handle, **sizing)

    def handle_of(self, num_rows: int) -> hybrid_ep.Handle:
        """A handle of so many rows."""
        handle = self.dispatch(max_rows=32).handle
        self.asked()
        return replace(handle, num_rows=num_rows)

    def given(self, struct: str) -> dict[str, int]:
        """What the last verb was given for a struct of csrc/verbs.h, by the names of its fields."""
        return dict(zip(field_names(struct), self.fake.given[struct], strict=True))

    def asked(self) -> list[str]:
        """The calls since the last time."""
        events = [call for call, _ in self.fake.events]
        self.fake.events.clear()
        return events


def build(
    me: Rank, backend: str, fails: dict[int, dict[str, str]], hosts: list[str], sizes: dict
) -> dict[str, Any]:
    """A Buffer on fake GPUs: how building it went, and what was asked of the extension.

    Args:
        me: the rank.
        backend: asked for.
        fails: for each rank, the calls that fail and what CUDA says then.
        hosts: of the ranks, in turn.
        sizes: of the Buffer, where they are not those of CASE.
    """
    fake = Fake(fails.get(me.rank, {}))
    told = {"error": "", "backend": None, "describe": ""}
    with gpu_with(fake, hosts[me.rank % len(hosts)]):
        try:
            arguments = {**CASE.on(me.num_ranks).sizes(), **sizes}
            buffer = me.buffer(**arguments, device="cuda:0", backend=backend)
        except RuntimeError as error:
            told["error"] = str(error)
        else:
            told["backend"], told["describe"] = buffer.backend, buffer.describe()
            buffer.destroy()
    return {**told, "calls": [call for call, _ in fake.events]}


def build_on_a_gpu_with_shared_memory(me: Rank, num_bytes: int) -> str:
    fake = Fake()
    fake.shared = num_bytes
    with gpu_with(fake):
        try:
            me.buffer(**CASE.on(me.num_ranks).sizes(), device="cuda:0", backend="nvlink")
        except RuntimeError as error:
            return str(error)
    return ""


def numbers_of_layouts(me: Rank) -> list[tuple[int, int]]:
    """Of a Buffer, after five routes and a restore, of the next: routes before, base of layouts."""
    fake = Fake()
    with gpu_with(fake):
        sizes = CASE.on(me.num_ranks).sizes()
        buffer = me.buffer(**sizes, device="cuda:0", backend="nvlink")
        seen = [(fake.config.num_routes, fake.config.layout_base)]
        fake.routes = 5
        buffer.release()
        buffer.restore()
        seen.append((fake.config.num_routes, fake.config.layout_base))
        buffer.destroy()
        other = me.buffer(**sizes, device="cuda:0", backend="nvlink")
        other.destroy()
    return [*seen, (fake.config.num_routes, fake.config.layout_base)]


def release_and_restore(me: Rank) -> dict[str, Any]:
    """When each rank's part was closed and freed; and a restore that finds no memory at first."""
    fake = Fake()
    with gpu_with(fake):
        buffer = me.buffer(**CASE.on(me.num_ranks).sizes(), device="cuda:0", backend="nvlink")
        if me.rank == 0:
            time.sleep(0.2)  # the others must wait for me before they look for unread memory
        buffer.release()
        released = time.monotonic()
        seen = {name: fake.times(name)[-1] for name in ("destroy", "free_unread_memory")}
        if me.rank == 1:
            fake.fails = {"Runtime": "allocation of symmetric memory: out of memory"}
        refused = what_it_raises(buffer.restore)
        still = what_it_raises(buffer.check)
        fake.fails = {}
        buffer.restore()
        buffer.check()
        described = buffer.describe()
        buffer.destroy()
    return {
        **seen,
        "released": released,
        "refused": refused,
        "still": still,
        "backend": buffer.backend,
        "describe": described,
    }
