"""The torch backend over NCCL: on GPUs, and as there on the CPU, where gloo stands in for NCCL."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hybrid_ep
from hybrid_ep.backends.torch import fresh, tensors, transport
from hybrid_ep.backends.torch.carrier import Carrier, serving_backend
from hybrid_ep.backends.torch.collectives import Collectives
from tests.cases import Case
from tests.launch import Rank
from tests.ranks import mistakes, out_of_step, verbs
from tests.ranks.raised import raised


@contextlib.contextmanager
def over_nccl() -> Iterator[None]:
    """gloo's ``all_to_all_single`` in the place of NCCL's, for Buffers that are made in here."""

    def always(*args: Any) -> bool:
        return True

    with (
        mock.patch.object(transport, "choose_carrier", lambda *args: Carrier("nccl")),
        mock.patch.object(fresh, "runs_ahead", always),
        mock.patch.object(tensors, "runs_ahead", always),
    ):
        yield


class RankOverNccl(Rank):
    """Where it is alone, its Buffers send themselves what they otherwise would not send."""

    def buffer(self, group: Any = None, **arguments: Any) -> hybrid_ep.Buffer:
        buffer = super().buffer(group, **arguments)
        backend = buffer.communicator.verbs
        if backend._transport.carrier.is_nothing:
            backend._transport.carrier = Carrier("nccl")
            group = buffer.communicator.group
            backend._exchange = Collectives(group, buffer.config.timeout_s)
            backend._calls.exchange = backend._exchange
        return buffer


def run(me: Rank, function: Callable[..., Any], *args: Any) -> Any:
    """``function(me, *args)`` over NCCL."""
    as_nccl = contextlib.nullcontext() if me.target.on_gpu else over_nccl()
    with as_nccl:
        return function(RankOverNccl(me.rank, me.num_ranks, me.device, me.target), *args)


def all_verbs(me: Rank, case: Case, max_rows: int | None) -> dict[str, dict[str, Any]]:
    return run(me, verbs.all_verbs, case, max_rows)


def all_verbs_of_nccl(me: Rank, case: Case, max_rows: int | None) -> dict[str, dict[str, Any]]:
    """The same; NCCL must be what carries the rows."""
    assert serving_backend(None, me.device) == "nccl"
    if me.num_ranks > 1:
        assert "carried by nccl" in describe(me, case)
    return all_verbs(me, case, max_rows)


def describe(me: Rank, case: Case) -> str:
    buffer = me.buffer(**case.sizes())
    buffer.destroy()
    return buffer.describe()


# ---- what makes the host wait


class Questions(TorchDispatchMode):
    """Ops whose result, or its size, the host must know before it goes on."""

    OPS = ("nonzero", "_local_scalar_dense", "bincount", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put_") and torch.bool in [
            t.dtype for t in args[1] if t is not None
        ]
        if name in self.OPS or by_mask:
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


def questions(me: Rank, case: Case, align: int, max_rows: int | None) -> dict[str, Any]:
    """Of each verb: what it asks the device, and how often it reads numbers from it."""
    buffer = me.buffer(**case.sizes())
    inputs = case.inputs(me.rank)
    sizing = {"max_rows": max_rows, "align": align}
    route, (rows, weights, _) = buffer.communicator.verbs.dispatch_fresh(
        inputs.topk_idx, inputs.x, inputs.weights, inputs.scales, **sizing
    )
    layout = route.layout
    calls = {
        "route": lambda: buffer.communicator.verbs.route(inputs.topk_idx, **sizing),
        "fresh": lambda: buffer.communicator.verbs.dispatch_fresh(
            inputs.topk_idx, inputs.x, inputs.weights, inputs.scales, **sizing
        ),
        "replay": lambda: buffer.communicator.verbs.dispatch(
            inputs.x, inputs.weights, None, layout, num_rows=len(rows)
        ),
        "combine": lambda: buffer.communicator.verbs.combine(
            rows, weights, weights, layout, num_tokens=len(inputs.x)
        ),
    }
    seen, honest, reads = {}, Tensor.tolist, []

    def tolist(tensor: Tensor) -> Any:
        reads.append(tensor)
        return honest(tensor)

    for name, call in calls.items():
        reads.clear()
        with Questions() as asked, mock.patch.object(Tensor, "tolist", tolist):
            call()
        seen[name] = asked.asked, len(reads)
    buffer.destroy()
    return seen


# ---- calls that do not belong together


def two_buffers_in_another_order(me: Rank, case: Case) -> list[str]:
    """Rank 0 calls one, its peers the other."""
    buffers = [me.buffer(**case.sizes()) for _ in range(2)]
    inputs = case.inputs(me.rank)
    buffer = buffers[min(me.rank, 1)]
    error = raised(lambda: verbs.send(me, buffer, inputs))
    for each in buffers:
        each.destroy()
    return [type(error).__name__, str(error)]


def one_rank_is_watched(me: Rank, case: Case) -> list[dict[str, Tensor]]:
    """The verbs of the last rank are ops, one by one: a profiler looks at them."""
    buffer = me.buffer(**case.sizes())
    results = []
    for watched in (False, True):
        watch = torch.profiler.profile() if watched and me.rank else contextlib.nullcontext()
        with watch:
            results.append(out_of_step.all_verbs(me, buffer, case))
    buffer.destroy()
    return results


def an_exchange_fails(me: Rank, at: int) -> dict[str, Any]:
    """The collective number ``at`` of a combine cannot be started."""
    buffer = me.buffer(**out_of_step.CASE.sizes())
    out = verbs.send(me, buffer, out_of_step.CASE.inputs(me.rank))

    def combine() -> Any:
        return hybrid_ep.combine(buffer, out.rows, out.handle)

    error = RuntimeError("NCCL Error 6\n and a trace")
    with out_of_step.raising(dist, "all_to_all_single", at, lambda: error):
        first = raised(combine)
    later = [raised(combine), raised(buffer.check)]
    buffer.destroy()
    return {"first": first, "later": [error is first for error in later]}


# ---- on GPUs


def waits(me: Rank, case: Case, align: int, max_rows: int | None) -> dict[str, int]:
    """How often an op of each verb waits for the GPU, in what torch notices."""
    buffer = me.buffer(**case.sizes())
    inputs = case.inputs(me.rank)
    x, topk_idx, weights, scales = (
        None if t is None else t.to(me.device)
        for t in (inputs.x, inputs.topk_idx, inputs.weights, inputs.scales)
    )
    sizing = {"max_rows": max_rows, "align": align}
    seen = {}

    def counted(name: str, call: Callable[[], Any]) -> Any:
        call()  # whatever is made once
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen[name] = sum("synchroniz" in str(warning.message) for warning in caught)
        return result

    verbs_ = buffer.communicator.verbs
    counted("route", lambda: verbs_.route(topk_idx, **sizing))
    route, (rows, row_weights, _) = counted(
        "fresh", lambda: verbs_.dispatch_fresh(topk_idx, x, weights, scales, **sizing)
    )
    layout = route.layout
    counted("replay", lambda: verbs_.dispatch(x, weights, None, layout, num_rows=len(rows)))
    sums = rows, row_weights, row_weights, layout
    counted("combine", lambda: verbs_.combine(*sums, num_tokens=len(x)))
    buffer.destroy()
    return seen


def wait_in_vain(
    me: Rank, verb: Callable[[mistakes.Call], None], sizes: dict[str, Any]
) -> BaseException | None:
    """Rank 0 makes a call that its peer does not make; what it raises."""
    call = mistakes.Call(me)
    call.buffer.destroy()
    call.buffer = me.buffer(**{**mistakes.CASE.sizes(), **sizes})
    call.handle = verbs.send(me, call.buffer, mistakes.CASE.inputs(me.rank)).handle
    return raised(lambda: verb(call)) if me.rank == 0 else None


def captured(me: Rank, case: Case) -> str:
    """What a dispatch raises while a graph is captured."""
    buffer = me.buffer(**case.sizes())
    inputs = case.inputs(me.rank)
    x, topk_idx = inputs.x.to(me.device), inputs.topk_idx.to(me.device)
    errors = []
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        errors.append(raised(lambda: hybrid_ep.dispatch(buffer, x, topk_idx, max_rows=64)))
    buffer.destroy()
    return str(errors[0])
