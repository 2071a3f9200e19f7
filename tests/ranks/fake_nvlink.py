"""The nvlink backend on ranks without a GPU: an extension that fails where a test wants it to."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hybrid_ep
from tests.cases import Case
from tests.launch import Rank
from tests.ranks.raised import what_it_raises
from tools.fake_nvlink import Fake, FakeStreams, gpu_with

CASE = Case("fake", num_ranks=3)
VERBS = Path(__file__).parents[2] / "csrc" / "kernels" / "verbs.h"


def field_names(struct: str) -> list[str]:
    """The fields of a struct of csrc/kernels/verbs.h, in their order."""
    body = re.search(rf"struct {struct} {{(.*?)}};", VERBS.read_text(), re.DOTALL)[1]
    declarations = re.sub(r"//.*", "", body).split(";")
    return [name for line in declarations for name in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]


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
        """What the last verb was given for a struct of kernels/verbs.h, by name of its fields."""
        return dict(zip(field_names(struct), self.fake.given[struct], strict=True))

    def asked(self) -> list[str]:
        """The calls since the last time."""
        events = [call for call, _ in self.fake.events]
        self.fake.events.clear()
        return events


def built(make: Callable[[], hybrid_ep.Buffer]) -> dict[str, Any]:
    """What a Buffer says of itself, which is then destroyed, or why it cannot be made."""
    try:
        buffer = make()
    except RuntimeError as error:
        return {"error": str(error), "backend": None, "describe": ""}
    told = {"error": "", "backend": buffer.backend, "describe": buffer.describe()}
    buffer.destroy()
    return told


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
    arguments = {**CASE.on(me.num_ranks).sizes(), **sizes}
    with gpu_with(fake, hosts[me.rank % len(hosts)]):
        told = built(lambda: me.buffer(**arguments, device="cuda:0", backend=backend))
    return {**told, "calls": [call for call, _ in fake.events]}


def build_on_a_gpu_with_shared_memory(me: Rank, num_bytes: int) -> str:
    fake = Fake()
    fake.shared = num_bytes
    sizes = {**CASE.on(me.num_ranks).sizes(), "device": "cuda:0", "backend": "nvlink"}
    with gpu_with(fake):
        return what_it_raises(lambda: me.buffer(**sizes))


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
