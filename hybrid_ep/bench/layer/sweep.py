"""All layers that were asked for, one after the other, on every rank."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep.backends.torch.carrier import serving_backend
from hybrid_ep.bench.baselines import PlainTorch
from hybrid_ep.bench.calls import BOUND_MULTIPLE, make_buffer
from hybrid_ep.bench.clock import Call, Clock
from hybrid_ep.bench.layer.options import LayerOptions, LayerShape
from hybrid_ep.bench.layer.plain import PlainLayer
from hybrid_ep.bench.layer.ways import (
    PASSES,
    Parts,
    Rows,
    Way,
    in_plain_torch,
    on_buffer,
    rows_of,
    without_communication,
)
from hybrid_ep.buffer import Buffer
from hybrid_ep.config import Config
from hybrid_ep.group import Group
from hybrid_ep.integers import round_up

NO_CARRIER = "plain torch: NCCL wants a GPU for each rank"


def measure_layers(device: torch.device, options: LayerOptions) -> dict[str, Any]:
    """Measure on this rank, together with all others of the default group.

    Args:
        device: of this rank.
        options: equal on all ranks.

    Returns:
        dict: ``layers`` (a record for each pass of each way) and ``skipped`` (why a way was), the
        same on all ranks; see ``hybrid_ep_cli.bench``.
    """
    clock = Clock(device)
    report: dict[str, Any] = {"layers": [], "skipped": []}
    for shape in options.shapes:
        _measure_shape(shape, options, clock, report)
    return report


def _measure_shape(
    shape: LayerShape, options: LayerOptions, clock: Clock, report: dict[str, Any]
) -> None:
    device = clock.device
    parts = Parts(shape, dist.get_world_size(), dist.get_rank(), device)
    ways: list[tuple[Way, int | None]] = []  # with the SMs
    rows: list[Rows] = []
    buffers: list[Buffer] = []
    known = set()
    for backend, sms in itertools.product(options.backends, options.sms):
        try:
            config = Config(num_sms_publish=sms, num_sms_dispatch=sms, num_sms_combine=sms)
            buffer = make_buffer(shape.on(dist.get_world_size()), device, backend, config)
        except RuntimeError as error:  # raised on all ranks: this backend cannot run here
            if str(error) not in report["skipped"]:
                report["skipped"].append(str(error))
            continue
        buffers.append(buffer)
        key = (buffer.backend, None if buffer.backend == "torch" else sms)
        if key in known:
            continue
        known.add(key)
        rows = rows or rows_of(parts, buffer)
        for sizing in options.sizings:
            max_rows = None if sizing == "exact" else _bound(rows)
            ways.append((on_buffer(parts, buffer, max_rows, options.weight_at), key[1]))
    if ways:
        if clock.carrier is None:
            if NO_CARRIER not in report["skipped"]:
                report["skipped"].append(NO_CARRIER)
        else:
            plain = PlainTorch(shape.experts, clock.carrier)
            layer = PlainLayer(parts.router, parts.experts, plain, options.weight_at)
            carrier = serving_backend(clock.carrier, device)
            ways.append((in_plain_torch(parts, layer, carrier), None))
        ways += [(way, None) for way in without_communication(parts, rows, options.weight_at)]
        report["layers"] += _time(shape, ways, rows, options, clock)
    dist.barrier()
    for buffer in buffers:
        buffer.destroy()


def _bound(rows: list[Rows]) -> int:
    """The least bound that drops nothing on any rank, as ``hybrid_ep.bench.calls`` rounds it."""
    return round_up(max(Group().gather(max(each.required for each in rows))), BOUND_MULTIPLE)


def _time(
    shape: LayerShape,
    ways: list[tuple[Way, int | None]],
    rows: list[Rows],
    options: LayerOptions,
    clock: Clock,
) -> list[dict[str, Any]]:
    most_rows = max(Group().gather(max(len(each.rows) for each in rows)))
    passes = PASSES if options.backward else PASSES[:1]
    timed: list[tuple[Way, int | None, Call]] = []
    for way, sms in ways:
        way.peak_bytes = _peak_bytes(way, options.backward, clock.device)
        timed += [(way, sms, way.call(each)) for each in passes if each in way.passes]
    calls = [call for _, _, call in timed]
    clock.take_turns(calls, iters=options.iters, warmup=options.warmup)
    alone = {call.op: statistics.median(call.us) for call in calls if call.backend == "experts"}
    records = []
    for way, sms, call in timed:
        median = statistics.median(call.us)
        records.append(
            {
                "shape": shape.name,
                **{name: value for name, value in asdict(shape).items() if name != "name"},
                "ranks": dist.get_world_size(),
                "weight_at": options.weight_at,
                "way": way.name,
                "pass": call.op,
                "sizing": way.sizing,
                "max_rows": way.max_rows,
                "sms": sms,
                "us_median": median,
                "us_min": min(call.us),
                "us_max": max(call.us),
                "us_fastest_rank": statistics.median(call.us_of_fastest),
                "communication_share": None
                if way.name in ("experts", "products")
                else 1 - alone[call.op] / median,
                "tflops": shape.flops(call.op) / median / 1e6,
                "peak_bytes": way.peak_bytes,
                "rows": most_rows,
            }
        )
    return records


def _peak_bytes(way: Way, backward: bool, device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    way.parts.clear()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    if backward:
        way.both(0)
    else:
        way.forward(0)
    torch.cuda.synchronize(device)
    return max(Group().gather(torch.cuda.max_memory_allocated(device) - before))
