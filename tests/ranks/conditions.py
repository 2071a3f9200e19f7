"""What the kernels meet outside the plain case: odd pointers, streams, failures half way."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep import Config
from hybrid_ep.backends.cuda.arguments import Sent
from tests.cases import Case
from tests.checks import same_bytes
from tests.launch import Rank
from tests.ranks.memory import held_bytes, together
from tests.ranks.raised import raised_by
from tests.ranks.verbs import send

CASE = Case("conditions", tokens=(96, 70), topk=2, hidden=512)


def what_it_raises(call: Callable[[], Any]) -> str:
    """Kind and text of the exception, "" if there is none."""
    kind, text = raised_by(call)
    return f"{kind}: {text}" if kind else ""


def equal_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))  # NaN too


def finish(me: Rank, buffer: hybrid_ep.Buffer) -> None:
    torch.cuda.synchronize()
    buffer.check()
    if me.num_ranks > 1:
        dist.barrier()
    buffer.destroy()


def batch(me: Rank, case: Case, value: float) -> tuple[Tensor, Tensor]:
    """Tokens of one value, so that rows of two batches can be told apart."""
    inputs = case.inputs(me.rank)
    x = torch.full_like(inputs.x, value, device=me.device)
    return x, inputs.topk_idx.to(me.device)


# ---- pointers


def scales_at_any_address(me: Rank) -> None:
    """The same scales at addresses from 0 to 3 behind a multiple of 4 bytes."""
    case = replace(CASE, num_scales=8, scale_dtype=torch.uint8)
    buffer = me.buffer(**case.sizes())
    x, topk_idx = batch(me, case, 1.0)
    size = len(x) * case.num_scales
    scales = torch.arange(size, device=me.device).to(torch.uint8)
    rows = []
    for offset in range(4):
        packed = torch.zeros(size + 4, dtype=torch.uint8, device=me.device)
        moved = packed[offset : offset + size].copy_(scales).view(len(x), case.num_scales)
        assert moved.data_ptr() % 4 == offset
        out = hybrid_ep.dispatch(buffer, x, topk_idx, scales=moved)
        rows.append(out.scales)
    for other in rows[1:]:
        same_bytes(other, rows[0], "scales")
    finish(me, buffer)


def refused_by_the_runtime(me: Rank) -> dict[str, str]:
    """What the host says of calls that reach it past all rules; and that it serves afterwards."""
    case = replace(CASE, num_scales=4)
    buffer = me.buffer(**case.sizes())
    out = send(me, buffer, case.inputs(me.rank))
    verbs, layout = buffer.communicator.verbs, out.handle.layout
    tokens = case.num_tokens(me.rank)

    def x_of(dtype: torch.dtype, width: int = case.hidden) -> Tensor:
        return torch.zeros((tokens, width), dtype=dtype, device=me.device)

    def dispatch(x: Tensor, scales: Tensor | None = None) -> Any:
        return verbs.dispatch(x, None, scales, layout, num_rows=len(out.rows))

    def combine(rows: Tensor) -> Any:
        return verbs.combine(rows, None, None, layout, num_tokens=tokens)

    wide_scales = torch.zeros((tokens, 4096), device=me.device)
    many = torch.zeros((case.sizes()["max_tokens"] + 1, case.hidden), device=me.device).bfloat16()
    topk_idx = case.inputs(me.rank).topk_idx.to(me.device)
    narrow = torch.zeros((len(out.rows), 20), dtype=torch.int8, device=me.device)
    wide = torch.zeros((len(out.rows), case.hidden), device=me.device)
    seen = {
        "a wider dispatch": what_it_raises(lambda: dispatch(x_of(torch.float32))),
        "wider scales": what_it_raises(lambda: dispatch(x_of(torch.bfloat16), wide_scales)),
        "a row of 20 bytes": what_it_raises(lambda: dispatch(x_of(torch.int8, 20))),
        "a wider combine": what_it_raises(lambda: combine(wide)),
        "a sum of rows of 20 bytes": what_it_raises(lambda: combine(narrow.view(torch.float32))),
        "too many tokens": what_it_raises(lambda: dispatch(many)),
        "align": what_it_raises(lambda: verbs.route(topk_idx, max_rows=None, align=2**29)),
    }
    again = send(me, buffer, case.inputs(me.rank))
    same_bytes(again.rows, out.rows, "rows of the dispatch behind the refused calls")
    finish(me, buffer)
    return seen


# ---- failures half way


def out_of_memory_between_the_parts(me: Rank) -> dict[str, Any]:
    """The last rank gets no memory for the rows of an exact dispatch; then all go on."""
    buffer = me.buffer(**CASE.on(me.num_ranks).sizes())
    fails = me.rank == me.num_ranks - 1
    real = Sent.make_rows

    def no_memory(*args: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("made up")

    case = CASE.on(me.num_ranks)
    x, topk_idx = batch(me, case, 1.0)
    with mock.patch.object(Sent, "make_rows", no_memory if fails else real):
        raised = what_it_raises(lambda: hybrid_ep.dispatch(buffer, x, topk_idx))
    second, topk_idx = batch(me, case, 2.0)
    bounded = hybrid_ep.dispatch(buffer, second, topk_idx, max_rows=256 * me.num_ranks)
    third, topk_idx = batch(me, case, 3.0)
    exact = hybrid_ep.dispatch(buffer, third, topk_idx)
    y = hybrid_ep.combine(buffer, exact.rows, exact.handle)
    values = [
        bounded.rows[: int(bounded.offsets[-1])].float().unique().tolist(),
        exact.rows.float().unique().tolist(),
        (y / y.abs().clamp(min=1)).float().unique().tolist(),
    ]
    finish(me, buffer)
    return {"raised": raised, "values": values}


def interrupted_while_it_waits_for_the_size(me: Rank) -> dict[str, Any]:
    """Ctrl-C on rank 0 while an exact dispatch waits for a late peer; then all go on."""
    buffer = me.buffer(**CASE.sizes())
    x, topk_idx = batch(me, CASE, 1.0)
    torch.cuda.synchronize()
    dist.barrier()  # it may be the first dispatch of the process: the Buffer has loaded the kernels
    raised, waited = "", 0.0
    if me.rank == 0:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer.start()
        start = time.monotonic()
        try:
            hybrid_ep.dispatch(buffer, x, topk_idx)
        except KeyboardInterrupt:
            raised = "KeyboardInterrupt"
        waited = time.monotonic() - start
        signal.signal(signal.SIGINT, before)
    else:
        time.sleep(2)
        hybrid_ep.dispatch(buffer, x, topk_idx)
    second, topk_idx = batch(me, CASE, 2.0)
    out = hybrid_ep.dispatch(buffer, second, topk_idx)
    values = out.rows.float().unique().tolist()
    finish(me, buffer)
    return {"raised": raised, "waited": waited, "values": values}


class Refusing:
    """A runtime one of whose launches CUDA refuses; a Mock would make up its properties."""

    def __init__(self, runtime: Any, verb: str) -> None:
        self._runtime, self._verb = runtime, verb

    def __getattr__(self, name: str) -> Any:
        return self._refuse if name == self._verb else getattr(self._runtime, name)

    def _refuse(self, *arguments: Any) -> None:
        raise RuntimeError("kernel launch: out of memory")


def a_launch_fails(me: Rank, verb: str) -> dict[str, Any]:
    """CUDA refuses a launch of the last rank: what all ranks are told, now and afterwards."""
    buffer = me.buffer(**CASE.sizes(), config=Config(timeout_s=30))
    out = send(me, buffer, CASE.inputs(me.rank))
    torch.cuda.synchronize()
    dist.barrier()
    x, topk_idx = batch(me, CASE, 1.0)
    calls = {
        "pull": lambda: hybrid_ep.dispatch(buffer, x, topk_idx),
        "dispatch": lambda: hybrid_ep.dispatch(buffer, x, handle=out.handle),
        "combine": lambda: hybrid_ep.combine(buffer, out.rows, out.handle),
    }

    def call() -> None:
        calls[verb]()
        torch.cuda.synchronize()
        buffer.check()

    start = time.monotonic()
    if me.rank == me.num_ranks - 1:
        refusing = Refusing(buffer.communicator.backend._runtime, verb)
        with mock.patch.object(buffer.communicator.backend, "_runtime", refusing):
            raised = what_it_raises(call)
    else:
        raised = what_it_raises(call)
    waited = time.monotonic() - start
    later = [what_it_raises(f) for f in (*calls.values(), buffer.check)]
    buffer.destroy()
    return {"raised": raised, "later": later, "waited": waited}


def another_thread_calls(me: Rank) -> str:
    """A second thread calls while the first waits for the size of an exact dispatch."""
    buffer = me.buffer(**CASE.sizes())
    x, topk_idx = batch(me, CASE, 1.0)
    seen: list[str] = []
    if me.rank == 0:

        def other() -> None:
            time.sleep(0.3)
            seen.append(what_it_raises(lambda: hybrid_ep.dispatch(buffer, x, topk_idx)))

        thread = threading.Thread(target=other)
        thread.start()
        hybrid_ep.dispatch(buffer, x, topk_idx)
        thread.join()
    else:
        time.sleep(1.5)
        hybrid_ep.dispatch(buffer, x, topk_idx)
    out = hybrid_ep.dispatch(buffer, *batch(me, CASE, 2.0))
    assert out.rows.float().unique().tolist() == [2.0]
    finish(me, buffer)
    return "".join(seen)


# ---- streams


def streams_of_one_capture(me: Rank) -> int:
    """Two dispatches of one graph on two streams: replays that differ from eager calls."""
    case = replace(CASE, tokens=(512, 400), hidden=1024)
    buffer = me.buffer(**case.sizes(), config=Config(num_sms_dispatch=16, timeout_s=20))
    bound = 4 * 512 * me.num_ranks
    side = torch.cuda.Stream()
    first, second = (
        tuple(tensor.to(me.device) for tensor in (inputs.x, inputs.topk_idx))
        for inputs in (replace(case, seed=seed).inputs(me.rank) for seed in (1, 2))
    )

    def both() -> tuple[Tensor, Tensor]:
        main = torch.cuda.current_stream()
        side.wait_stream(main)  # before the first call: only the Buffer orders the two
        a = hybrid_ep.dispatch(buffer, *first, max_rows=bound)
        with torch.cuda.stream(side):
            b = hybrid_ep.dispatch(buffer, *second, max_rows=bound)
        main.wait_stream(side)
        return a.rows, b.rows

    want = [rows.clone() for rows in both()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = both()
    differing = 0
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        buffer.check()
        differing += any(not equal_bytes(g, w) for g, w in zip(got, want, strict=True))
    finish(me, buffer)
    return differing


def a_handle_dropped_after_its_use_on_another_stream(me: Rank) -> None:
    """Its layout must not be handed out again while the other stream still reads it."""
    buffer = me.buffer(**CASE.sizes())
    out = send(me, buffer, CASE.inputs(me.rank))
    rows, want = out.rows, hybrid_ep.combine(buffer, out.rows, out.handle)
    side = torch.cuda.Stream()
    for _ in range(5):
        out = send(me, buffer, CASE.inputs(me.rank))
        words = out.handle.layout.numel()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            y = hybrid_ep.combine(buffer, rows, out.handle)
        del out
        # what the allocator would give back at once, were it not told of the other stream
        garbage = [torch.full((words,), -1, dtype=torch.int32, device=me.device) for _ in range(3)]
        torch.cuda.current_stream().wait_stream(side)
        same_bytes(y, want, "sums on the other stream")
        del garbage
    finish(me, buffer)


def buffers_in_opposite_order(me: Rank, rounds: int) -> None:
    """Two Buffers that together want more SMs than there are, launched in another order."""
    case = Case("opposite", tokens=(2048,), topk=2, hidden=2048)
    config = Config(num_sms_dispatch=100, num_sms_combine=100, num_sms_publish=100, timeout_s=20)
    made = []
    # one node: across nodes, calls of several Buffers must have the same order on all ranks
    sizes = {**case.sizes(), "ranks_per_node": me.num_ranks}
    for seed in (1, 2):
        buffer = me.buffer(**sizes, config=config)
        inputs = replace(case, seed=seed).inputs(me.rank)
        out = send(me, buffer, inputs)
        y = hybrid_ep.combine(buffer, out.rows, out.handle)
        x = inputs.x.to(me.device)
        made.append((buffer, x, out, y, torch.cuda.Stream()))
    torch.cuda.synchronize()
    dist.barrier()
    for _ in range(rounds):
        results = []
        for buffer, x, out, y, stream in made[:: 1 if me.rank % 2 == 0 else -1]:
            with torch.cuda.stream(stream):
                again = hybrid_ep.dispatch(buffer, x, handle=out.handle)
                sums = hybrid_ep.combine(buffer, again.rows, out.handle)
            results.append((again.rows, out.rows, sums, y))
        torch.cuda.synchronize()
        for buffer, *_ in made:
            buffer.check()
        for rows, want_rows, sums, want_sums in results:
            same_bytes(rows, want_rows, "rows")
            same_bytes(sums, want_sums, "sums")
        dist.barrier()
    for buffer, *_ in made:
        finish(me, buffer)


# ---- kernels that overlap


def routing_that_ends_late(me: Rank, num_sms: int, rounds: int) -> None:
    """The last rank comes late, so the others publish long before their routing ends.

    On few SMs the copy engine publishes as well; each round has other tokens, so that rows of an
    earlier one would show.
    """
    case = Case("late", num_ranks=me.num_ranks, tokens=(8192,), topk=2, hidden=2048)
    config = Config(num_sms_dispatch=num_sms, timeout_s=30)
    buffer = me.buffer(**case.sizes(), config=config)
    x = torch.arange(8192, device=me.device).bfloat16().unsqueeze(1).expand(-1, 2048).contiguous()
    topk_idx = case.inputs(me.rank).topk_idx.to(me.device)
    bound = 8192 * me.num_ranks * 2
    first = hybrid_ep.dispatch(buffer, x, topk_idx, max_rows=bound)
    count = int(first.offsets[-1])  # behind them is the tail, of zeros
    want = first.rows[:count, 0].clone()
    for n in range(rounds):
        torch.cuda.synchronize()
        dist.barrier()
        if me.rank == me.num_ranks - 1:
            torch.cuda._sleep(1_000_000 * (n % 4))
        sign = (-1) ** n
        rows = hybrid_ep.dispatch(buffer, x * sign, topk_idx, max_rows=bound).rows[:count]
        same_bytes(rows[:, 0], want * sign, f"rows of round {n}")
        same_bytes(rows[:, 2047], want * sign, f"ends of rows of round {n}")
    finish(me, buffer)


# ---- memory that is given back


def constructions_that_fail(me: Rank, where: str, rounds: int) -> dict[str, Any]:
    """The last rank fails to build a Buffer, again and again; then a Buffer is built."""
    from hybrid_ep.backends.cuda import nvlink

    case = replace(CASE, tokens=(4096,), hidden=2048)
    fails = me.rank == me.num_ranks - 1
    real = nvlink._nvlink.Runtime

    def refusing(config: Any) -> Any:
        if where == "Runtime":
            raise RuntimeError("no memory left")
        runtime = mock.Mock(wraps=real(config))
        runtime.open_peers.side_effect = RuntimeError("no memory left")
        return runtime

    texts, held = [], []
    for _ in range(rounds):
        with mock.patch.object(nvlink._nvlink, "Runtime", refusing if fails else real):
            texts.append(what_it_raises(lambda: me.buffer(**case.sizes())))
        held.append(together(me, held_bytes))
    buffer = me.buffer(**case.sizes())
    send(me, buffer, case.inputs(me.rank))
    symmetric = buffer.communicator.backend._runtime.symmetric_bytes
    finish(me, buffer)
    return {"texts": texts, "held": held, "symmetric": symmetric}


def restores_that_fail(me: Rank, rounds: int) -> dict[str, Any]:
    """The last rank finds no memory at a restore, again and again; then it does."""
    from hybrid_ep.backends.cuda import nvlink

    case = replace(CASE, tokens=(4096,), hidden=2048)
    buffer = me.buffer(**case.sizes())
    want = send(me, buffer, case.inputs(me.rank))
    symmetric = buffer.communicator.backend._runtime.symmetric_bytes
    buffer.release()
    real = nvlink._nvlink.Runtime

    def refusing(config: Any) -> Any:
        raise RuntimeError("no memory left")

    texts, held = [], []
    for _ in range(rounds):
        refuses = me.rank == me.num_ranks - 1
        with mock.patch.object(nvlink._nvlink, "Runtime", refusing if refuses else real):
            texts.append(what_it_raises(buffer.restore))
        held.append(together(me, held_bytes))
    buffer.restore()
    again = send(me, buffer, case.inputs(me.rank))
    same_bytes(again.rows, want.rows, "rows after the restore")
    replayed = hybrid_ep.dispatch(buffer, case.inputs(me.rank).x.to(me.device), handle=want.handle)
    same_bytes(replayed.rows, want.rows, "rows of a handle from before")
    finish(me, buffer)
    return {"texts": texts, "held": held, "symmetric": symmetric}


def a_peer_died(me: Rank, path: str) -> dict[str, Any]:
    """The last rank dies; the others destroy the Buffer, and see whether its memory comes back.

    Without the dead rank there is no barrier: a file says that it is gone.
    """
    case = replace(CASE, tokens=(4096,), hidden=4096)
    buffer = me.buffer(**case.sizes(), config=Config(timeout_s=2))
    send(me, buffer, case.inputs(me.rank), max_rows=1 << 15)
    symmetric = buffer.communicator.backend._runtime.symmetric_bytes
    torch.cuda.synchronize()
    dist.barrier()
    if me.rank == me.num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    full = held_bytes(me)
    buffer.destroy()
    alone = hybrid_ep.Buffer(  # making one looks at what was kept
        single_group(), **replace(CASE, num_ranks=1).sizes(), device=me.device, backend=me.backend
    )
    freed = full - held_bytes(me)
    alone.destroy()
    return {"freed": freed, "symmetric": symmetric}


def single_group() -> Any:
    """A group of this rank alone, which needs no other rank to be made."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def closed_one_after_the_other(me: Rank) -> dict[str, int]:
    """Rank 0 destroys its Buffer long before the others: nothing is lost, nothing read in vain."""
    case = replace(CASE, tokens=(4096,), hidden=2048)
    first = me.buffer(**case.sizes())  # so that kernels are loaded
    send(me, first, case.inputs(me.rank))
    finish(me, first)
    torch.cuda.empty_cache()
    start = together(me, held_bytes)
    buffer = me.buffer(**case.sizes())
    out = send(me, buffer, case.inputs(me.rank))
    torch.cuda.synchronize()
    dist.barrier()
    if me.rank == 0:
        buffer.destroy()
    dist.barrier()
    if me.rank != 0:
        buffer.destroy()
    dist.barrier()
    symmetric = 2 * out.rows.numel()
    del out
    small = me.buffer(**CASE.sizes())  # making one looks at what was kept
    finish(me, small)
    torch.cuda.empty_cache()
    return {"before": start, "after": together(me, held_bytes), "symmetric": symmetric}


# ---- deadlines


def late_beyond_any_deadline(me: Rank, timeout_s: float | None) -> str:
    """A peer that is 2 s late, where the deadline is "never"."""
    buffer = me.buffer(**CASE.sizes(), config=Config(timeout_s=timeout_s))
    send(me, buffer, CASE.inputs(me.rank), max_rows=4096)
    torch.cuda.synchronize()
    dist.barrier()
    if me.rank == me.num_ranks - 1:
        time.sleep(2)
    raised = what_it_raises(lambda: send(me, buffer, CASE.inputs(me.rank), max_rows=4096))
    finish(me, buffer)
    return raised


def deadlines_that_pass_at_any_moment(me: Rank, rounds: int) -> list[str]:
    """Rank 0 calls, its peer does not: some warps see the fault early, some late, all must end."""
    case = replace(CASE, tokens=(500,))
    texts = []
    for n in range(rounds):
        config = Config(timeout_s=0.0005 * (n + 1), num_sms_dispatch=64, num_sms_combine=64)
        patient = me.buffer(**case.sizes())
        out = send(me, patient, case.inputs(me.rank))
        buffer = me.buffer(**case.sizes(), config=config)
        dist.barrier()
        if me.rank == 0:
            texts.append(raised_alone(me, buffer, case, out, n % 3))
        dist.barrier()
        buffer.destroy()
        finish(me, patient)
    return texts


def raised_alone(
    me: Rank, buffer: hybrid_ep.Buffer, case: Case, out: hybrid_ep.Dispatched, verb: int
) -> str:
    """What one of the verbs raises in which the peers take no part."""
    inputs = case.inputs(me.rank)

    def call() -> None:
        if verb == 0:
            hybrid_ep.dispatch(buffer, inputs.x.to(me.device), handle=out.handle)
        elif verb == 1:
            send(me, buffer, inputs, max_rows=4096)
        else:
            hybrid_ep.combine(buffer, out.rows, out.handle)
        torch.cuda.synchronize()
        buffer.check()

    return what_it_raises(call)


NEVER = {"inf": math.inf, "none": None, "3000_years": 1e11, "largest": 1.7e308}
