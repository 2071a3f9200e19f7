"""What the hardware carries, measured in the same run.

Ceilings are a dict, as it stands in the JSON, of GB/s; a byte that is copied counts once:

    memory_copy_gbps   x.copy_ on the device of rank 0
    peer_copy_gbps     x.copy_ from one GPU to another: the copy engine, one direction
    pull_gbps          {SMs: ...}: TMA loads from the next rank's symmetric memory, all at once
    push_gbps          {SMs: ...}: TMA stores into it, likewise
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep.bench.clock import Call, Clock
from hybrid_ep.buffer import Buffer
from hybrid_ep.config import Config
from hybrid_ep.launch import COMMAND_TIMEOUT_S

_LINK_HIDDEN, _LINK_TOKENS = (
    7168,
    8192,
)  # 117 MB in pieces of 14,336 bytes: a third of a millisecond


def measure_ceilings(
    clock: Clock, sms: Iterable[int], *, iters: int, warmup: int
) -> dict[str, Any]:
    """All that can be measured here, the same on all ranks; collective."""
    found: list[dict[str, Any]] = [{}]
    device = clock.device
    if dist.get_rank() == 0:
        found = [{"memory_copy_gbps": _copy_gbps(device, device)}]
        if device.type == "cuda" and torch.cuda.device_count() > 1:
            other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
            found[0]["peer_copy_gbps"] = _copy_gbps(device, other)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of the other GPU's memory too
    dist.broadcast_object_list(found, src=0)
    if clock.nccl is not None and dist.get_world_size() > 1:  # each rank has a GPU of its own
        found[0].update(_link_gbps(clock, sms, iters=iters, warmup=warmup))
    return found[0]


def ceiling_of(ceilings: dict[str, Any], call: Call, sms: int | None) -> float | None:
    """GB/s that a call could reach: dispatch pulls, combine pushes, a backward is the other."""
    pulls = (call.op == "dispatch") == (call.direction == "forward")
    by_sms = ceilings.get("pull_gbps" if pulls else "push_gbps")
    if by_sms:
        return by_sms.get(str(sms)) or max(by_sms.values())
    if "peer_copy_gbps" in ceilings:
        return ceilings["peer_copy_gbps"]
    if call.bare is not None and call.bare.link_bytes:
        return call.bare.link_bytes / statistics.median(call.bare.us) / 1e3
    return None


def _link_gbps(
    clock: Clock, sms: Iterable[int], *, iters: int, warmup: int
) -> dict[str, dict[str, float]]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    try:
        buffer = Buffer(
            hidden=_LINK_HIDDEN,
            num_experts=ranks,
            max_tokens=_LINK_TOKENS,
            topk=2,
            device=clock.device,
            backend="nvlink",
            config=Config(timeout_s=COMMAND_TIMEOUT_S),
        )
    except RuntimeError:  # on all ranks: what it says is said again for the Buffers of the sweep
        return {}
    runtime = buffer.communicator.verbs._runtime
    stream = torch.cuda.current_stream(clock.device).cuda_stream

    def copy(sms: int, push: bool) -> int:
        return runtime.copy_peer((rank + 1) % ranks, 1 << 40, sms, push, stream)

    num_bytes = copy(1, False)
    calls = {
        (name, str(n)): Call(
            "ceiling",
            name,
            "cached",
            lambda i, n=n, p=push: functools.partial(copy, n, p),
            num_bytes,
        )
        for name, push in (("pull_gbps", False), ("push_gbps", True))
        for n in sorted(set(sms))
    }
    clock.take_turns(list(calls.values()), iters=iters, warmup=warmup)
    torch.cuda.synchronize(clock.device)
    dist.barrier()
    buffer.destroy()
    found: dict[str, dict[str, float]] = {}
    for (name, n), call in calls.items():
        found.setdefault(name, {})[n] = num_bytes / statistics.median(call.us) / 1e3
    return found


def _copy_gbps(source: torch.device, target: torch.device) -> float:
    num_bytes = 1 << (30 if source.type == "cuda" else 28)
    a = torch.zeros(num_bytes, dtype=torch.uint8, device=source)
    b = torch.zeros(num_bytes, dtype=torch.uint8, device=target)
    seconds = [_seconds(source, lambda: b.copy_(a)) for _ in range(6)]
    return num_bytes / min(seconds) / 1e9


def _seconds(device: torch.device, call: Callable[[], Any]) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3
