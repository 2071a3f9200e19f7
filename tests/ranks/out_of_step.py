"""Calls that do not belong together; what goes wrong around the torch backend's messages."""

from __future__ import annotations

import contextlib
import errno
import gc
import math
import os
import pkgutil
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.backends.torch import host_memory
from tests.cases import Case
from tests.launch import Rank
from tests.ranks import mistakes
from tests.ranks.raised import raised
from tests.ranks.verbs import send

CASE = Case("out of step", tokens=(9, 7), topk=3, num_scales=2)
SHORT = {"config": hybrid_ep.Config(timeout_s=1), "scale_bytes": 64}  # room for rows of fp32

Results = dict[str, Tensor]


def all_verbs(me: Rank, buffer: hybrid_ep.Buffer, case: Case = CASE) -> Results:
    """A dispatch, a replay of it, a combine, and the gradients of both."""
    x, topk_idx, weights, scales = case.leaves(me.rank, me.device)
    out = hybrid_ep.dispatch(buffer, x, topk_idx, weights, scales=scales)
    rows = torch.tanh(out.rows)
    y = hybrid_ep.combine(buffer, rows, out.handle, weights=out.weights)
    grad_y = case.values(me.rank, "grad y", len(y)).to(me.device)
    grad_x, grad_weights = torch.autograd.grad(y, (x, weights), grad_y)
    again = hybrid_ep.dispatch(buffer, x.detach(), handle=out.handle)
    results = {"rows": out.rows, "weights": out.weights, "scales": out.scales, "y": y}
    results |= {"x": grad_x, "topk_weights": grad_weights, "rows again": again.rows}
    return {name: tensor.detach().clone() for name, tensor in results.items()}


def plain(me: Rank, case: Case = CASE) -> Results:
    """The same on a Buffer of its own where nothing goes wrong."""
    buffer = me.buffer(**case.sizes())
    results = all_verbs(me, buffer, case)
    buffer.destroy()
    return results


def look_for_a_fault(me: Rank, buffer: hybrid_ep.Buffer) -> None:
    """On a GPU the host need not have waited for the calls."""
    if me.target.on_gpu:
        torch.cuda.synchronize()
    buffer.check()


# ---- calls that do not belong together


class TwoRoutes:
    """Two dispatches of the same sizes, whose layouts the ranks may mistake for each other."""

    def __init__(self, me: Rank, case: Case) -> None:
        self.me, self.case, self.buffer = me, case, me.buffer(**case.sizes())
        self.outs = [self.new_dispatch(seed) for seed in range(2)]

    def new_dispatch(self, seed: int, buffer: hybrid_ep.Buffer | None = None) -> Any:
        inputs, device = self.case.inputs(self.me.rank), self.me.device
        x = self.case.values(self.me.rank, f"x {seed}", len(inputs.x)).to(device).requires_grad_()
        topk_idx, weights = inputs.topk_idx.to(device), inputs.weights.to(device)
        out = hybrid_ep.dispatch(buffer or self.buffer, x, topk_idx, weights)
        self.x = x
        return out

    def in_another_order(self, verb: Callable[[Any], None]) -> BaseException | None:
        """The last rank begins with the second route, the others with the first."""
        is_last = self.me.rank == self.me.num_ranks - 1

        def both() -> None:
            for out in reversed(self.outs) if is_last else self.outs:
                verb(out)
            look_for_a_fault(self.me, self.buffer)

        error = raised(both)
        self.buffer.destroy()
        return error


def replay(two: TwoRoutes) -> BaseException | None:
    x = two.x.detach()
    return two.in_another_order(lambda out: hybrid_ep.dispatch(two.buffer, x, handle=out.handle))


def combine(two: TwoRoutes) -> BaseException | None:
    return two.in_another_order(
        lambda out: hybrid_ep.combine(two.buffer, out.rows.detach(), out.handle)
    )


def backward_of_dispatch(two: TwoRoutes) -> BaseException | None:
    return two.in_another_order(lambda out: out.rows.float().sum().backward())


def backward_of_combine(two: TwoRoutes) -> BaseException | None:
    rows = [out.rows.detach().requires_grad_() for out in two.outs]
    two.outs = [
        hybrid_ep.combine(two.buffer, r, out.handle) for r, out in zip(rows, two.outs, strict=True)
    ]
    return two.in_another_order(lambda y: y.float().sum().backward())


def combine_after_a_restore(two: TwoRoutes) -> BaseException | None:
    """The first layout is the Buffer's first, the second the first since the restore."""
    two.buffer.release()
    two.buffer.restore()
    two.outs[1] = two.new_dispatch(2)
    return combine(two)


def combine_of_another_buffer(two: TwoRoutes) -> BaseException | None:
    """Both layouts are the first ones of their Buffers."""
    other = two.me.buffer(**two.case.sizes())
    two.outs[1] = two.new_dispatch(2, other)
    other.destroy()
    return combine(two)


def mix_routes(
    me: Rank, verb: Callable[[TwoRoutes], BaseException | None], case: Case
) -> tuple[str, str]:
    error = verb(TwoRoutes(me, case))
    return type(error).__name__, str(error)


MIXED_DTYPES = (
    ("bfloat16", "float16"),
    ("float16", "bfloat16"),
)  # on each of two ranks, here, there


def mix_dtypes(me: Rank, verb: str) -> str:
    """The last rank sends float16 where the others send bfloat16, which is as wide."""
    call = mistakes.Call(me)
    dtype = torch.float16 if me.rank == me.num_ranks - 1 else torch.bfloat16
    calls = {
        "dispatch": lambda: call.dispatch(call.x.to(dtype)),
        "replay": lambda: call.replay(call.x.to(dtype)),
        "scales": lambda: call.dispatch(scales=call.scales.to(dtype)),
        "combine": lambda: call.combine(call.rows.to(dtype)),
    }
    error = raised(lambda: (calls[verb](), look_for_a_fault(me, call.buffer)))
    call.buffer.destroy()
    return str(error)


def mix_num_sms(me: Rank, verb: str) -> str:
    """The last rank asks for another number of SMs."""
    call = mistakes.Call(me)
    asked = {"num_sms": 4 if me.rank < me.num_ranks - 1 else 5}
    calls = {
        "dispatch": lambda: call.dispatch(**asked),
        "dispatch_bounded": lambda: call.dispatch(max_rows=64, **asked),
        "replay": lambda: call.replay(**asked),
        "combine": lambda: call.combine(**asked),
    }
    error = raised(lambda: (calls[verb](), look_for_a_fault(me, call.buffer)))
    call.buffer.destroy()
    return str(error)


# ---- a peer that died before the call


def tell_and_die(call: mistakes.Call) -> None:
    call.buffer.communicator.group.gather(os.getpid())
    mistakes.die(call)


def after_the_death(call: mistakes.Call, verb: Callable[[mistakes.Call], None]) -> None:
    """The last rank is dead, and its connections are closed, when this rank begins the call."""
    victim = call.buffer.communicator.group.gather(os.getpid())[-1]
    while True:
        try:
            with open(f"/proc/{victim}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] in "ZX":
                    break
        except FileNotFoundError:
            break
        time.sleep(0.01)
    time.sleep(0.2)  # until gloo's thread has heard of it
    verb(call)


# ---- a call that stops on rank 0


@contextlib.contextmanager
def raising(target: Any, name: str, at: int, error: Callable[[], BaseException]) -> Iterator[None]:
    """The call number ``at`` of ``target.name`` raises."""
    if isinstance(target, str):
        target = pkgutil.resolve_name(target)
    honest, calls = getattr(target, name), 0

    def planted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error()
        return honest(*args, **kwargs)

    with mock.patch.object(target, name, planted):
        yield


def press_ctrl_c() -> BaseException:
    signal.raise_signal(signal.SIGINT)
    return AssertionError("the interrupt did not come")


CAUSES = {
    "KeyboardInterrupt": press_ctrl_c,
    "MemoryError": MemoryError,
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "RuntimeError": lambda: RuntimeError("not enough memory: you tried to allocate 9 bytes"),
}


def by_messages(buffer: hybrid_ep.Buffer) -> None:
    """As across hosts: no shared outbox."""
    transport = buffer.communicator.verbs._transport
    transport.may_share, transport._outbox = False, None


def stop(
    me: Rank,
    verb: Callable[[mistakes.Call], None],
    place: tuple[str, str, int],
    cause: str,
    shares: bool,
) -> dict[str, Any]:
    """A call of ``verb`` stops on rank 0 in ``place``; what it and the next calls raise."""
    call = mistakes.Call(me)
    call.buffer.destroy()
    call.buffer = me.buffer(**{**mistakes.CASE.sizes(), **SHORT})
    if not shares:
        by_messages(call.buffer)
    call.sent = send(me, call.buffer, mistakes.CASE.inputs(me.rank))
    call.handle = call.sent.handle
    if me.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with raising(*place, CAUSES[cause]):
            first = raised(lambda: verb(call))
    else:  # rank 0 may have sent all of its messages: then the next call waits for it
        first = raised(lambda: [verb(call), verb(call)])
    later = [raised(call.combine), raised(call.dispatch), raised(call.buffer.check)]
    call.buffer.destroy()
    return {
        "first": (type(first).__name__, str(first)),
        "later": [(type(error).__name__, str(error)) for error in later],
        "peer": getattr(first, "peer", None),
    }


def stop_in_step(
    me: Rank, verb: str, place: tuple[str, str, int], cause: str, shares: bool
) -> dict[str, Any]:
    """The same with no message under way; then all ranks go on.

    Peers make the call where rank 0 has sent all of its messages, and skip it where it sent none.
    """
    buffer = me.buffer(**CASE.sizes())
    if not shares:
        by_messages(buffer)
    before = all_verbs(me, buffer)
    inputs = CASE.inputs(me.rank)
    out = send(me, buffer, inputs)
    calls = {
        "route": lambda: buffer.communicator.verbs.route(inputs.topk_idx, max_rows=None, align=1),
        "dispatch": lambda: hybrid_ep.dispatch(buffer, inputs.x, handle=out.handle),
        "combine": lambda: hybrid_ep.combine(buffer, out.rows, out.handle),
        "nothing": lambda: None,
    }
    error = None
    if me.rank == 0:
        with raising(*place, CAUSES[cause]):
            error = raised(calls["dispatch" if verb == "nothing" else verb])
    else:
        calls[verb]()
    after = all_verbs(me, buffer)
    buffer.destroy()
    return {"error": type(error).__name__, "before": before, "after": after}


# ---- no shared memory


def refusal(*args: Any) -> None:
    raise OSError(errno.EPERM, "planted")


@contextlib.contextmanager
def limit(what: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def small_files() -> Any:
    return limit(resource.RLIMIT_FSIZE, 512)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """None below the limit is free, and a process that holds more may keep them."""
    free = os.dup(0)
    os.close(free)
    with limit(resource.RLIMIT_NOFILE, free):
        yield


def refuses(target: Any, name: str) -> Callable[[], Any]:
    return lambda: mock.patch.object(target, name, refusal)


def second_memory_refused() -> Any:
    """There is memory for top-k, and none for tokens, which are wider."""
    return raising(os, "memfd_create", 2, lambda: OSError(errno.EMFILE, "planted"))


OBSTACLES = {
    "small_files": small_files,
    "no_descriptors": no_descriptors,
    "no_memfd": refuses(os, "memfd_create"),
    "no_size": refuses(os, "ftruncate"),
    "no_mmap": refuses(host_memory, "mmap"),
    "no_proc": refuses(os, "readlink"),
    "no_second_memory": second_memory_refused,
}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def without_shared_memory(me: Rank, obstacle: str, on_rank: int, case: Case) -> dict[str, Any]:
    buffer = me.buffer(**case.sizes())
    gc.collect()  # Buffers of earlier tests hold a file each
    files = open_files()
    planted = OBSTACLES[obstacle]() if me.rank == on_rank else contextlib.nullcontext()
    with planted:
        first = all_verbs(me, buffer, case)
    shared = "shared memory" in buffer.describe()
    more_files = open_files() - files
    second = all_verbs(me, buffer, case)
    buffer.destroy()
    return {"first": first, "second": second, "shared": shared, "more files": more_files}


# ---- messages of others on the group


def beside_messages_of_the_user(me: Rank, case: Case, shares: bool) -> dict[str, Any]:
    """Each rank has an irecv and an isend of the user's under way while the verbs run.

    The user's tensors are of every size that a message of the library has here, or larger.
    """
    buffer = me.buffer(**case.sizes())
    if not shares:
        by_messages(buffer)
    peer = 1 - me.rank
    sizes = [1, 8, 10, 80, 1 << 12]
    got = [torch.zeros(size, dtype=torch.int64) for size in sizes]
    sent = [torch.full((size,), 100 * me.rank + i) for i, size in enumerate(sizes)]
    recvs = [dist.irecv(tensor, peer) for tensor in got]
    early = [dist.isend(tensor, peer) for tensor in sent[:2]]
    results = all_verbs(me, buffer, case)
    late = [dist.isend(tensor, peer) for tensor in sent[2:]]
    for request in recvs + early + late:
        request.wait()
    buffer.destroy()
    right = [bool((tensor == 100 * peer + i).all()) for i, tensor in enumerate(got)]
    return {"verbs": results, "messages": right}


def two_threads(me: Rank, cases: list[Case], how_often: int) -> list[list[Results]]:
    """A Buffer per thread, both of one group."""
    buffers = [me.buffer(**case.sizes()) for case in cases]
    by_messages(buffers[1])
    results: list[list[Results]] = [[] for _ in cases]

    def work(number: int) -> None:
        for _ in range(how_often):
            results[number].append(all_verbs(me, buffers[number], cases[number]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for buffer in buffers:
        buffer.destroy()
    return results


# ---- two threads on one Buffer


def second_thread(me: Rank, verb: str) -> dict[str, Any]:
    """Rank 0's second thread calls while its first waits in a call for the last rank."""
    case = CASE.on(me.num_ranks)
    buffer = me.buffer(**case.sizes())
    inputs = case.inputs(me.rank)
    out = send(me, buffer, inputs)
    calls = {
        "route": lambda: buffer.communicator.verbs.route(inputs.topk_idx, max_rows=None, align=1),
        "dispatch": lambda: hybrid_ep.dispatch(buffer, inputs.x, handle=out.handle),
        "fresh": lambda: send(me, buffer, inputs),
        "combine": lambda: hybrid_ep.combine(buffer, out.rows, out.handle),
    }
    refused = []
    go, tag = torch.zeros(1), 7
    if me.rank == 0:
        first: list[Any] = []
        thread = threading.Thread(target=lambda: first.append(calls[verb]()))
        thread.start()
        while not buffer.communicator.verbs._turn._holder:
            time.sleep(0.001)
        refused = [str(raised(call)) for call in calls.values()]
        dist.send(go, me.num_ranks - 1, tag=tag)
        thread.join()
        (result,) = first
    else:
        if me.rank == me.num_ranks - 1:
            dist.recv(go, 0, tag=tag)
        result = calls[verb]()
    moved = result if torch.is_tensor(result) else result[0]
    alone = calls[verb]()
    expected = alone if torch.is_tensor(alone) else alone[0]
    if verb == "route":  # a layout holds the number of its call
        moved, expected = result.counts, alone.counts
    buffer.destroy()
    return {"refused": refused, "moved": moved, "expected": expected}


# ---- deadlines


def with_deadline(timeout_s: float) -> hybrid_ep.Config:
    config = hybrid_ep.Config()
    object.__setattr__(config, "timeout_s", timeout_s)
    return config


def deadline_of_any_length(me: Rank, timeout_s: float) -> Results:
    buffer = me.buffer(**CASE.sizes(), config=with_deadline(timeout_s))
    if me.rank == 0:
        time.sleep(0.1)  # the others wait
    results = all_verbs(me, buffer)
    buffer.destroy()
    return results


def later_than_the_group(me: Rank) -> Results:
    """The group's own deadline passes in a call, the Buffer's does not."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    buffer = me.buffer(group, **CASE.sizes(), config=with_deadline(math.inf))
    if me.rank == 0:
        time.sleep(1)
    results = all_verbs(me, buffer)
    buffer.destroy()
    dist.destroy_process_group(group)
    return results


def sooner_than_a_millisecond(me: Rank) -> str:
    """gloo takes a deadline of 0 ms for the group's, which is a minute here."""
    call = mistakes.Call(me)
    call.buffer.destroy()
    call.buffer = me.buffer(**mistakes.CASE.sizes(), config=with_deadline(1e-9))
    error = raised(call.dispatch) if me.rank == 0 else None
    call.buffer.destroy()
    return str(error)
