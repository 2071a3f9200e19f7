"""A Buffer that gives its memory back for a while, as a trainer does before it generates text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hybrid_ep
from tests.cases import Case
from tests.launch import Rank
from tests.ranks.raised import what_it_raises
from tests.ranks.verbs import send


def held_bytes(me: Rank) -> int:
    """What is in use on my GPU, by whomever; on the CPU, what I map of the shared outbox."""
    if me.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(me.device)
        return total - free
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if "/memfd:hybrid_ep" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)


def together(me: Rank, look: Callable[[Rank], int]) -> int:
    """Look while no rank does anything else."""
    if me.num_ranks > 1:
        dist.barrier()
    seen = look(me)
    if me.num_ranks > 1:
        dist.barrier()
    return seen


def release_and_restore(me: Rank, case: Case) -> dict[str, Any]:
    """A forward, a release in the middle of it, and the rest of it after a restore."""
    buffer = me.buffer(**case.sizes())
    name = buffer.id
    x = case.values(me.rank, "x", case.num_tokens(me.rank)).to(me.device).requires_grad_()
    inputs = replace(case.inputs(me.rank), x=x)
    out = send(me, buffer, inputs)
    y = hybrid_ep.combine(buffer, torch.tanh(out.rows), out.handle, weights=out.weights)
    grad_y = case.values(me.rank, "grad y", len(y)).to(me.device)
    (grad_x,) = torch.autograd.grad(y, x, grad_y, retain_graph=True)

    held = {"before": together(me, held_bytes)}
    buffer.release()
    buffer.release()
    held["released"] = together(me, held_bytes)
    refused = {
        "dispatch": what_it_raises(lambda: send(me, buffer, inputs)),
        "replay": what_it_raises(lambda: hybrid_ep.dispatch(buffer, x, handle=out.handle)),
        "combine": what_it_raises(lambda: hybrid_ep.combine(buffer, out.rows, out.handle)),
        "check": what_it_raises(buffer.check),
    }
    described = buffer.describe()

    buffer.restore()
    buffer.restore()
    held["restored"] = together(me, held_bytes)
    # the old handle first: a restored Buffer has seen no call of its own
    replayed = hybrid_ep.dispatch(
        buffer, x, topk_weights=inputs.weights.to(me.device), handle=out.handle
    )
    fresh = send(me, buffer, inputs)
    rows = torch.tanh(replayed.rows)
    y_again = hybrid_ep.combine(buffer, rows, out.handle, weights=replayed.weights)
    (grad_again,) = torch.autograd.grad(y, x, grad_y)  # the graph from before the release
    results = {
        "held": held,
        "refused": refused,
        "described": described,
        "same id": buffer.id == name,
        "pairs": {
            "replayed rows": (replayed.rows, out.rows),
            "replayed weights": (replayed.weights, out.weights),
            "fresh rows": (fresh.rows, out.rows),
            "fresh counts": (fresh.counts, out.counts),
            "fresh offsets": (fresh.offsets, out.offsets),
            "y": (y_again, y),
            "gradient of x": (grad_again, grad_x),
        },
    }
    buffer.release()
    buffer.destroy()
    buffer.destroy()
    results["after destroy"] = [what_it_raises(f) for f in (buffer.restore, buffer.release)]
    return results


def release_many_times(me: Rank, case: Case, rounds: int) -> list[int]:
    """Bytes held while released, each time."""
    buffer = me.buffer(**case.sizes())
    held = []
    for _ in range(rounds):
        send(me, buffer, case.inputs(me.rank))
        buffer.release()
        held.append(together(me, held_bytes))
        buffer.restore()
    buffer.destroy()
    return held


def release_after_a_failure(me: Rank, case: Case) -> list[str]:
    """Rank 0 keeps a failure that the others know nothing of; each release tells them."""
    buffer = me.buffer(**case.sizes())
    facts = {"rank": 0, "peer": 1, "phase": "combine", "call": 7}
    failure = hybrid_ep.PeerError(reason="made up", **facts) if me.rank == 0 else None
    with mock.patch.object(buffer.communicator.verbs, "check", side_effect=failure):
        texts = [what_it_raises(buffer.release) for _ in range(3)]
    assert buffer.communicator.group.gather(me.rank) == list(range(me.num_ranks)), (
        "ranks are out of step"
    )
    buffer.destroy()
    return texts


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that torch makes while this is on."""

    num_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(made) if torch.is_tensor(t)]
        self.num_bytes = max(self.num_bytes, *sizes, 0)
        return made


def largest_of_routing(me: Rank, case: Case) -> int:
    buffer = me.buffer(**case.sizes())
    topk_idx = case.inputs(me.rank).topk_idx.to(me.device)
    with LargestTensor() as largest:
        buffer.communicator.verbs.route(topk_idx, max_rows=None, align=1)
    buffer.destroy()
    return largest.num_bytes
