"""All settings of overlap that were asked for, one after the other, on every rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep.bench.baselines import bare_calls
from hybrid_ep.bench.calls import least_bound, make_buffer
from hybrid_ep.bench.clock import Clock
from hybrid_ep.bench.inputs import NUM_INPUTS, CopyCounts, Inputs, make_inputs
from hybrid_ep.bench.options import Load
from hybrid_ep.bench.overlap.hiding import allowed, hidden
from hybrid_ep.bench.overlap.options import OverlapOptions
from hybrid_ep.bench.overlap.products import CAN_LEAVE_FREE, dense, gemms_beside
from hybrid_ep.bench.overlap.streams import Ends, Launch, Pair, Streams
from hybrid_ep.buffer import Buffer, combine, dispatch
from hybrid_ep.config import Config


@dataclass(frozen=True)
class Way:
    """One way of communicating.

    Attributes:
        name: the backend, or ``"all_to_all"``, which is NCCL's.
        sms: that it occupies; None where that is not known.
        launch: a dispatch and a combine.
    """

    name: str
    sms: int | None
    launch: Launch


def measure_overlap(device: torch.device, options: OverlapOptions) -> dict[str, Any]:
    """Measure on this rank, together with all others of the default group.

    Args:
        device: of this rank, a GPU.
        options: equal on all ranks.

    Returns:
        dict: ``overlaps`` (a record for each setting) and ``skipped`` (why a way was), the same on
        all ranks; see ``hybrid_ep_cli.bench``.

    Raises:
        ValueError: the device is no GPU, or an option asks for all of its SMs.
    """
    if device.type != "cuda":
        raise ValueError(f"--overlap must run on GPUs, got {device.type}: streams are CUDA's")
    options.check_device(_total_sms(device))
    report: dict[str, Any] = {"overlaps": [], "skipped": []}
    options, skipped = runnable(options)
    report["skipped"] += skipped
    clock = Clock(device)
    for load in options.loads(dist.get_world_size()):
        _measure_load(load, options, clock, report)
    return report


def runnable(options: OverlapOptions) -> tuple[OverlapOptions, list[str]]:
    """The options that this torch can run, and why others are skipped."""
    if CAN_LEAVE_FREE or "rest" not in options.product_sms:
        return options, []
    kept = tuple(each for each in options.product_sms if each != "rest")
    reason = f"GEMMs on the rest: products of torch {torch.__version__} cannot leave SMs free"
    return replace(options, product_sms=kept), [reason]


def _total_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _measure_load(
    load: Load, options: OverlapOptions, clock: Clock, report: dict[str, Any]
) -> None:
    inputs = [make_inputs(load, dist.get_rank(), i, clock.device) for i in range(NUM_INPUTS)]
    ways: list[Way] = []
    buffers: list[Buffer] = []
    for backend in options.backends:
        try:
            buffer = make_buffer(load, clock.device, backend, Config())
        except RuntimeError as error:  # raised on all ranks: this backend cannot run here
            report["skipped"].append(str(error))
            continue
        buffers.append(buffer)
        ways += _of_library(buffer, inputs, options.sms)
    if ways and clock.nccl is not None and dist.get_world_size() > 1:
        ways.append(_of_nccl(load, inputs, clock))
    elif ways:
        report["skipped"].append("all_to_all: NCCL wants two ranks or more, each with its own GPU")
    if ways:
        report["overlaps"] += _time(load, ways, options, clock)
    dist.barrier()
    for buffer in buffers:
        buffer.destroy()


def _of_library(buffer: Buffer, inputs: list[Inputs], sms: tuple[int, ...]) -> Iterator[Way]:
    max_rows = least_bound(buffer, inputs)  # static sizes: the host waits for nothing

    def launch(i: int, *, num_sms: int | None) -> Any:
        each = inputs[i % NUM_INPUTS]
        out = dispatch(
            buffer, each.x, each.topk_idx, each.topk_weights, max_rows=max_rows, num_sms=num_sms
        )
        return out, combine(buffer, out.rows, out.handle, num_sms=num_sms)

    if buffer.backend == "torch":  # its kernels are torch's
        yield Way("torch", None, functools.partial(launch, num_sms=None))
        return
    for each in sms:
        yield Way(buffer.backend, each, functools.partial(launch, num_sms=each))


def _of_nccl(load: Load, inputs: list[Inputs], clock: Clock) -> Way:
    copies = CopyCounts(load, inputs)
    calls = list(bare_calls(load, copies, clock.nccl, clock.device))

    def launch(i: int) -> None:
        for call in calls:
            call.begin(i % NUM_INPUTS)()

    return Way("all_to_all", None, launch)


def _time(
    load: Load, ways: list[Way], options: OverlapOptions, clock: Clock
) -> Iterator[dict[str, Any]]:
    products = dense(options.gemm, options.gemms, clock.device)
    settings = [
        (way, product_sms)
        for way in ways
        for product_sms in options.product_sms
        if product_sms == "all" or way.sms is not None
    ]
    take_turns = functools.partial(
        Streams(clock).take_turns, iters=options.iters, warmup=options.warmup
    )
    first, *others = take_turns(
        [Pair(products=products), *(Pair(communication=way.launch) for way in ways)]
    )
    products_us = first.products_us
    alone = {way: ends.communication_us for way, ends in zip(ways, others, strict=True)}
    pairs = []
    for way, product_sms in settings:
        launch = products
        if product_sms == "rest" and way.sms is not None:
            beside = gemms_beside(alone[way], products_us, options.gemms)
            launch = functools.partial(products, free_sms=way.sms, beside=beside)
        pairs.append(Pair(way.launch, launch))
    total_sms = _total_sms(clock.device)
    for (way, product_sms), ends in zip(settings, take_turns(pairs), strict=True):
        yield {
            "ranks": dist.get_world_size(),
            **load.record(),
            "gemm": list(options.gemm),
            "gemms": options.gemms,
            "way": way.name,
            "sms": way.sms,
            "total_sms": total_sms,
            "product_sms": product_sms,
            "products_alone_us": products_us,
            "communication_alone_us": alone[way],
            **_hidden(way, alone[way], products_us, total_sms, ends),
        }


def _hidden(
    way: Way, alone_us: float, products_us: float, total_sms: int, ends: Ends
) -> dict[str, Any]:
    part = hidden(alone_us, products_us, ends.both_us)
    most = None if way.sms is None else allowed(alone_us, products_us, way.sms, total_sms)
    return {
        "communication_us": ends.communication_us,
        "products_us": ends.products_us,
        "both_us": ends.both_us,
        "hidden_part": part,
        "allowed_part": most,
        "hidden_of_allowed": part / most if most else None,
    }
