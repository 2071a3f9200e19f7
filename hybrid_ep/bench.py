"""Times of dispatch and combine, beside what the same bytes cost without the library.

What is timed is what a user calls, from the call until its result is there, on every rank; the time
of an iteration is that of its slowest rank. Bytes are those of copies (a token once per rank) that
leave their rank: the rank's own tokens, weights and indices are not counted, so GB/s can be held
against a link.

    dispatch fresh    routing and rows from topk_idx, as a training step does
    dispatch cached   the rows alone, by the handle of an earlier call
    combine cached    rows home; a backward is the other op, by the same handle
    all_to_all        the bare all_to_all_single of the same copies: buffers there, rows in order
    sort_all_to_all   plain torch: sort by expert, all_to_all_single, sort; index_add in fp32

The calls of one setting take turns, iteration by iteration, so that a busy machine slows them all,
and the inputs change from call to call, so that no cache keeps them.
"""

from __future__ import annotations

import functools
import itertools
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.buffer import BACKENDS, Buffer
from hybrid_ep.config import Config
from hybrid_ep.ops import combine, dispatch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
BASELINES = ("all_to_all", "sort_all_to_all")
SIZINGS = ("exact", "max_rows")
NUM_INPUTS = 3  # sets that the calls rotate through
VALUES_PER_SCALE = 128  # of fp8 rows, float32 each
SPARE_ROWS = 1.125  # max_rows over the rows that the busiest rank needs


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure: the product of the lists.

    Attributes:
        backends: names as of Buffer.
        tokens: T of every rank.
        hidden: H.
        experts: E, over all ranks.
        topk: K.
        dtypes: keys of ``DTYPES``; fp8 rows travel with scales and come home as bf16.
        sms: values of all three ``Config.num_sms_*``; the torch backend uses none of them.
        sizings: of ``SIZINGS``.
        skew: 0 for uniform routing, else expert e (in shuffled order) is chosen by a Zipf law with
            this exponent.
        align: rows of an expert are padded to a multiple of it.
        weighted: combine sums with weights.
        backward: also time the gradients.
        iters: measured iterations.
        warmup: iterations before them.
    """

    backends: tuple[str, ...] = ("auto",)
    tokens: tuple[int, ...] = (4096,)
    hidden: tuple[int, ...] = (1024,)
    experts: tuple[int, ...] = (256,)
    topk: tuple[int, ...] = (8,)
    dtypes: tuple[str, ...] = ("bf16",)
    sms: tuple[int, ...] = (32,)
    sizings: tuple[str, ...] = SIZINGS
    skew: float = 0.0
    align: int = 1
    weighted: bool = False
    backward: bool = True
    iters: int = 20
    warmup: int = 5

    def check(self, num_ranks: int) -> None:
        """Raise ValueError where an option breaks a rule, before any rank is started."""
        for name, values, known in (
            ("backend", self.backends, BACKENDS),
            ("dtype", self.dtypes, tuple(DTYPES)),
            ("sizing", self.sizings, SIZINGS),
        ):
            for value in values:
                if value not in known:
                    raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        for name in ("tokens", "hidden", "experts", "topk", "sms"):
            if min(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {min(getattr(self, name))}")
        for experts in self.experts:
            if experts % num_ranks:
                raise ValueError(f"experts must divide by {num_ranks} ranks, got {experts}")
        if max(self.topk) > min(self.experts):
            raise ValueError(f"topk must not exceed {min(self.experts)} experts")
        for hidden, dtype in itertools.product(self.hidden, self.dtypes):
            if hidden * DTYPES[dtype].itemsize % 16:
                raise ValueError(f"rows must be a multiple of 16 bytes, got {hidden} {dtype}")
        if self.iters < 1 or self.warmup < 0 or self.align < 1:
            raise ValueError("iters and align must be at least 1, warmup at least 0")

    def shapes(self) -> Iterator[Shape]:
        """Every combination of the sizes."""
        lists = (self.tokens, self.hidden, self.experts, self.topk, self.dtypes)
        for values in itertools.product(*lists):
            yield Shape(*values, self.skew)


@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    tokens: int
    hidden: int
    experts: int
    topk: int
    dtype: str
    skew: float = 0.0

    @property
    def num_scales(self) -> int:
        """Scales of a token."""
        return -(-self.hidden // VALUES_PER_SCALE) if self.dtype == "fp8" else 0

    @property
    def dispatch_bytes(self) -> int:
        """Payload of a copy on its way out, scales included."""
        return self.hidden * DTYPES[self.dtype].itemsize + 4 * self.num_scales

    @property
    def combine_dtype(self) -> torch.dtype:
        """Dtype of the rows that come home."""
        return torch.bfloat16 if self.dtype == "fp8" else DTYPES[self.dtype]

    @property
    def combine_bytes(self) -> int:
        """Payload of a copy on its way home."""
        return self.hidden * self.combine_dtype.itemsize


@dataclass(frozen=True)
class Inputs:
    """One rank's tokens of one call; topk_idx also on the host, for counting."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    scales: Tensor | None


def make_topk(shape: Shape, rank: int, index: int) -> Tensor:
    """Routing of a rank in input set ``index``: int64 ``[T, K]`` on the host, the same always."""
    generator = torch.Generator().manual_seed(1_000_003 * index + rank)
    popularity = torch.arange(1, shape.experts + 1).double().pow(-shape.skew)
    shuffle = torch.randperm(shape.experts, generator=torch.Generator().manual_seed(index))
    noise = torch.empty(shape.tokens, shape.experts).exponential_(generator=generator)
    # the K largest of log p + Gumbel noise: K distinct experts, drawn by popularity
    scores = popularity.log()[shuffle].float() - noise.log()
    return scores.topk(shape.topk, dim=1).indices


def make_inputs(shape: Shape, rank: int, index: int, device: torch.device) -> Inputs:
    """Input set ``index`` of a rank."""
    generator = torch.Generator().manual_seed(7 * index + rank)
    x = torch.randn(shape.tokens, shape.hidden, generator=generator)
    weights = torch.rand(shape.tokens, shape.topk, generator=generator)
    scales = None
    if shape.num_scales:
        scales = torch.rand(shape.tokens, shape.num_scales, generator=generator).to(device)
    return Inputs(
        x.to(device).to(DTYPES[shape.dtype]),
        make_topk(shape, rank, index).to(device),
        weights.to(device),
        scales,
    )


def count_copies(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Int64 ``[R]``: tokens that have an expert on rank r, each counted once."""
    return _present(topk_idx, num_experts, num_ranks).sum(dim=0)


def bytes_between_ranks(copies: Tensor, copy_bytes: int) -> int:
    """What the busiest rank sends to, or receives from, the others; ``copies [from, to]``."""
    away = copies * ~torch.eye(len(copies), dtype=torch.bool)
    return int(torch.maximum(away.sum(dim=0), away.sum(dim=1)).max()) * copy_bytes


# ---- measuring, on every rank


def measure(device: torch.device, options: Options) -> dict[str, Any]:
    """Measure on this rank, together with all others of the default group.

    Args:
        device: of this rank.
        options: equal on all ranks.

    Returns:
        dict: ``ceilings`` and ``records``, the same on all ranks; see ``hybrid_ep.cli.bench``.
    """
    clock = _Clock(device)
    ceilings = _ceilings(device)
    records: list[dict[str, Any]] = []
    skipped: list[str] = []
    for shape in options.shapes():
        inputs = [make_inputs(shape, dist.get_rank(), index, device) for index in range(NUM_INPUTS)]
        traffic = _Traffic(shape, inputs)
        baselines = list(_baselines(shape, inputs, traffic, clock))
        settings = itertools.product(options.backends, options.sizings, options.sms)
        done = set()
        for backend, sizing, sms in settings:
            config = Config(num_sms_publish=sms, num_sms_dispatch=sms, num_sms_combine=sms)
            try:
                buffer = _make_buffer(shape, device, backend, config)
            except RuntimeError as error:  # raised on all ranks: this backend cannot run here
                if str(error) not in skipped:
                    skipped.append(str(error))
                continue
            key = (buffer.backend, sizing, None if buffer.backend == "torch" else sms)
            if key not in done:
                calls = list(_library_calls(buffer, shape, inputs, sizing, traffic, options))
                clock.take_turns([*baselines, *calls], options)
                # the baselines run in every setting, for the ratios, and are reported once
                reported = calls if done else [*baselines, *calls]
                records += [_record(call, shape, key[2], ceilings) for call in reported]
                done.add(key)
                del calls, reported
            dist.barrier()
            buffer.destroy()
    return {"ceilings": ceilings, "records": records, "skipped": skipped}


@dataclass
class _Call:
    """One thing to time: ``call(index)`` makes it on input set ``index``."""

    backend: str
    op: str
    mode: str
    call: Callable[[int], Any]
    link_bytes: int
    direction: str = "forward"
    sizing: str = "exact"
    max_rows: int | None = None
    us: tuple[float, ...] = ()  # of the slowest rank, by iteration
    bare: _Call | None = None  # the all_to_all that took turns with it


class _Clock:
    """Times calls: CUDA events on a GPU, wall clock on the CPU, from a barrier on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nccl = _nccl_group(device)
        self.tick = torch.zeros(1, device=device)

    def take_turns(self, calls: list[_Call], options: Options) -> None:
        """Fill in the times of all calls."""
        times: list[list[float]] = [[] for _ in calls]
        for i in range(options.warmup + options.iters):
            for mine, call in zip(times, calls, strict=True):
                us = self.time(functools.partial(call.call, i % NUM_INPUTS))
                if i >= options.warmup:
                    mine.append(us)
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, times)
        slowest = torch.tensor(everybody, dtype=torch.float64).amax(dim=0)
        for call, us in zip(calls, slowest.tolist(), strict=True):
            call.us = tuple(us)
        bare = {call.op: call for call in calls if call.backend == "all_to_all"}
        for call in calls:
            call.bare = bare.get(call.op)

    def time(self, call: Callable[[], Any]) -> float:
        """Microseconds of one call on this rank."""
        if self.device.type != "cuda":
            dist.barrier()
            begin = time.perf_counter()
            result = call()
            us = (time.perf_counter() - begin) * 1e6
            del result
            return us
        torch.cuda.synchronize(self.device)
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self.nccl is not None:
            # a barrier of the GPUs: the hosts leave theirs tens of microseconds apart
            dist.all_reduce(self.tick, group=self.nccl)
        start.record()
        result = call()
        end.record()
        torch.cuda.synchronize(self.device)
        del result
        return start.elapsed_time(end) * 1e3


class _Traffic:
    """Copies between the ranks, for each input set."""

    def __init__(self, shape: Shape, inputs: list[Inputs]) -> None:
        ranks = dist.get_world_size()
        mine = [count_copies(i.topk_idx.cpu(), shape.experts, ranks).tolist() for i in inputs]
        everybody: list[Any] = [None] * ranks
        dist.all_gather_object(everybody, mine)
        self.copies = torch.tensor(everybody).transpose(0, 1)  # [set, from, to]

    def between_ranks(self, copy_bytes: int) -> int:
        """Mean over the sets."""
        each = [bytes_between_ranks(copies, copy_bytes) for copies in self.copies]
        return round(sum(each) / len(each))


def _make_buffer(shape: Shape, device: torch.device, backend: str, config: Config) -> Buffer:
    return Buffer(
        hidden=shape.hidden,
        num_experts=shape.experts,
        max_tokens=shape.tokens,
        topk=shape.topk,
        dtype=shape.combine_dtype,
        device=device,
        backend=backend,
        config=config,
    )


def _library_calls(
    buffer: Buffer,
    shape: Shape,
    inputs: list[Inputs],
    sizing: str,
    traffic: _Traffic,
    options: Options,
) -> Iterator[_Call]:
    align = options.align
    max_rows = None
    if sizing == "max_rows":
        needed = [int(_dispatch(buffer, each, align=align).handle.required_rows) for each in inputs]
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, max(needed))
        max_rows = -(-int(max(everybody) * SPARE_ROWS) // align) * align
    outs = [_dispatch(buffer, each, max_rows=max_rows, align=align) for each in inputs]
    if shape.dtype == "fp8":
        rows = [torch.randn_like(out.rows, dtype=shape.combine_dtype) for out in outs]
    else:
        rows = [out.rows for out in outs]
    weights = [out.weights if options.weighted else None for out in outs]
    out_bytes = traffic.between_ranks(shape.dispatch_bytes)
    home_bytes = traffic.between_ranks(shape.combine_bytes)
    call = functools.partial(_Call, buffer.backend, sizing=sizing, max_rows=max_rows)

    def fresh(i: int) -> Any:
        return _dispatch(buffer, inputs[i], max_rows=max_rows, align=align)

    def cached(i: int) -> Any:
        each = inputs[i]
        return dispatch(
            buffer, each.x, None, each.topk_weights, scales=each.scales, handle=outs[i].handle
        )

    def home(i: int) -> Any:
        return combine(buffer, rows[i], outs[i].handle, weights=weights[i])

    yield call("dispatch", "fresh", fresh, out_bytes)
    yield call("dispatch", "cached", cached, out_bytes)
    yield call("combine", "cached", home, home_bytes)
    if not options.backward or shape.dtype == "fp8":
        return

    # graphs made once; their backward is what is timed
    def graph_of_dispatch(i: int) -> tuple[Any, ...]:
        leaves = (
            inputs[i].x.detach().requires_grad_(),
            inputs[i].topk_weights.detach().requires_grad_(),
        )
        out = dispatch(buffer, leaves[0], None, leaves[1], handle=outs[i].handle)
        return (out.rows, out.weights), leaves, (outs[i].rows, outs[i].weights)

    def graph_of_combine(i: int) -> tuple[Any, ...]:
        leaf = rows[i].detach().requires_grad_()
        y = combine(buffer, leaf, outs[i].handle, weights=weights[i])
        return (y,), (leaf,), (torch.randn_like(y),)

    for op, mode, make, link_bytes in (
        ("dispatch", "cached", graph_of_dispatch, home_bytes),
        ("combine", "cached", graph_of_combine, home_bytes),
    ):
        graphs = [make(i) for i in range(len(inputs))]

        def backward(i: int, graphs: list[tuple[Any, ...]] = graphs) -> Any:
            return torch.autograd.grad(*graphs[i], retain_graph=True)

        yield call(op, mode, backward, link_bytes, direction="backward")


def _dispatch(buffer: Buffer, inputs: Inputs, **sizing: Any) -> Any:
    return dispatch(
        buffer, inputs.x, inputs.topk_idx, inputs.topk_weights, scales=inputs.scales, **sizing
    )


# ---- what the same bytes cost without the library


def _baselines(
    shape: Shape, inputs: list[Inputs], traffic: _Traffic, clock: _Clock
) -> Iterator[_Call]:
    group = clock.nccl if clock.device.type == "cuda" else dist.group.WORLD
    if group is None:
        return  # gloo moves no CUDA tensors, and NCCL wants a GPU for each rank
    rank, copies = dist.get_rank(), traffic.copies
    for op, copy_bytes in (("dispatch", shape.dispatch_bytes), ("combine", shape.combine_bytes)):
        sent, received = copies[:, rank], copies[:, :, rank]
        if op == "combine":
            sent, received = received, sent
        buffers = [
            tuple(
                torch.zeros(int(n.sum()), copy_bytes, dtype=torch.uint8, device=clock.device)
                for n in (received[i], sent[i])
            )
            for i in range(len(inputs))
        ]
        splits = [(received[i].tolist(), sent[i].tolist()) for i in range(len(inputs))]

        def bare(i: int, buffers: Any = buffers, splits: Any = splits) -> None:
            dist.all_to_all_single(*buffers[i], *splits[i], group=group)

        yield _Call("all_to_all", op, "cached", bare, traffic.between_ranks(copy_bytes))

    if shape.dtype == "fp8":
        return
    plain = _SortAllToAll(shape, group)
    routed = [plain.dispatch(each) for each in inputs]
    counts = [plain.count_rows(each) for each in inputs]
    row_bytes = round(
        sum(bytes_between_ranks(c, shape.combine_bytes) for c in counts) / len(counts)
    )
    yield _Call(
        "sort_all_to_all", "dispatch", "fresh", lambda i: plain.dispatch(inputs[i]), row_bytes
    )
    yield _Call(
        "sort_all_to_all", "combine", "cached", lambda i: plain.combine(*routed[i]), row_bytes
    )


class _SortAllToAll:
    """Expert parallelism as plain torch writes it: a row for each (token, expert), sorted twice."""

    def __init__(self, shape: Shape, group: Any) -> None:
        self.shape, self.group = shape, group
        self.ranks = dist.get_world_size()

    def dispatch(self, inputs: Inputs) -> tuple[Tensor, Any]:
        experts = inputs.topk_idx.flatten()
        order = experts.argsort(stable=True)
        token = order // self.shape.topk
        counts = experts.bincount(minlength=self.shape.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent = counts.view(self.ranks, -1).sum(dim=1).tolist()
        received = theirs.view(self.ranks, -1).sum(dim=1).tolist()
        arrived = inputs.x.new_empty((sum(received), self.shape.hidden))
        self._move(arrived, inputs.x.index_select(0, token), received, sent)
        local = torch.arange(theirs.numel() // self.ranks, device=theirs.device).repeat(self.ranks)
        by_expert = local.repeat_interleave(theirs).argsort(stable=True)
        rows = arrived.index_select(0, by_expert)
        return rows, (token, by_expert, sent, received)

    def combine(self, rows: Tensor, route: Any) -> Tensor:
        token, by_expert, sent, received = route
        ordered = torch.empty_like(rows).index_copy_(0, by_expert, rows)
        home = rows.new_empty((sum(sent), self.shape.hidden))
        self._move(home, ordered, sent, received)
        y = home.new_zeros((self.shape.tokens, self.shape.hidden), dtype=torch.float32)
        return y.index_add_(0, token, home.float()).to(rows.dtype)

    def _move(self, to: Tensor, source: Tensor, received: list[int], sent: list[int]) -> None:
        bytes_to, bytes_from = (t.view(torch.uint8) for t in (to, source))
        dist.all_to_all_single(bytes_to, bytes_from, received, sent, group=self.group)

    def count_rows(self, inputs: Inputs) -> Tensor:
        """Rows between ranks, ``[from, to]``."""
        each = self.shape.experts // self.ranks
        mine = (inputs.topk_idx.cpu().flatten() // each).bincount(minlength=self.ranks)
        everybody: list[Any] = [None] * self.ranks
        dist.all_gather_object(everybody, mine.tolist())
        return torch.tensor(everybody)


def _nccl_group(device: torch.device) -> Any:
    """An NCCL group where each rank has a GPU of its own, else None; collective."""
    place = (platform.node(), device.index) if device.type == "cuda" else None
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, place)
    if None in everybody or len(set(everybody)) < len(everybody) or not dist.is_nccl_available():
        return None
    return dist.new_group(backend="nccl")


def _ceilings(device: torch.device) -> dict[str, float]:
    """GB/s of plain copies, measured by rank 0 while the others wait; a byte copied counts once."""
    found = [{}]
    if dist.get_rank() == 0:
        found = [{"memory_copy_gbps": _copy_gbps(device, device)}]
        if device.type == "cuda" and torch.cuda.device_count() > 1:
            other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
            found[0]["peer_copy_gbps"] = _copy_gbps(device, other)
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _copy_gbps(source: torch.device, target: torch.device) -> float:
    num_bytes = 1 << (30 if source.type == "cuda" else 28)  # milliseconds: launching is in it
    a = torch.zeros(num_bytes, dtype=torch.uint8, device=source)
    b = torch.zeros(num_bytes, dtype=torch.uint8, device=target)

    def wait() -> None:
        for device in (source, target):
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    seconds = []
    for _ in range(6):
        wait()
        begin = time.perf_counter()
        b.copy_(a)
        wait()
        seconds.append(time.perf_counter() - begin)
    return num_bytes / min(seconds) / 1e9


# ---- what is reported


def _record(
    call: _Call, shape: Shape, sms: int | None, ceilings: dict[str, float]
) -> dict[str, Any]:
    median = statistics.median(call.us)
    gbps = call.link_bytes / median / 1e3
    ceiling = ceilings.get("peer_copy_gbps")
    if ceiling is None and call.bare is not None:
        ceiling = call.bare.link_bytes / statistics.median(call.bare.us) / 1e3
    library = call.backend not in BASELINES
    return {
        "op": call.op,
        "backend": call.backend,
        "mode": call.mode,
        "direction": call.direction,
        "sizing": call.sizing,
        "max_rows": call.max_rows,
        "ranks": dist.get_world_size(),
        **asdict(shape),
        "sms": sms if library else None,
        "us_median": median,
        "us_min": min(call.us),
        "us_max": max(call.us),
        "nvlink_bytes": call.link_bytes,
        "gbps": gbps,
        "ceiling_fraction": gbps / ceiling if ceiling else None,
        "ratio_to_all_to_all": median / statistics.median(call.bare.us) if call.bare else None,
    }


def _present(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    rank = torch.where(topk_idx < 0, num_ranks, topk_idx // (num_experts // num_ranks))
    present = torch.zeros(topk_idx.shape[0], num_ranks + 1, dtype=torch.bool)
    return present.scatter_(1, rank, True)[:, :num_ranks]


def describe_machine(device: str, num_ranks: int) -> dict[str, Any]:
    """What a report says about where it was made; ``device`` is ``"auto"`` or ``"cpu"``."""
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    return {
        "device": torch.cuda.get_device_name(0) if gpus else _cpu_name(),
        "num_gpus": min(gpus, num_ranks),
        "torch": torch.__version__,
        "commit": _commit(),
        "command": shlex.join(sys.argv),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Of the tree the package lies in; None where it is installed without one."""
    where = Path(__file__).resolve().parent
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=where,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None
