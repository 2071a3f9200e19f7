"""All settings that were asked for, one after the other, on every rank."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep.bench.baselines import bare_calls, plain_calls
from hybrid_ep.bench.calls import library_calls, make_buffer
from hybrid_ep.bench.ceilings import measure_ceilings
from hybrid_ep.bench.clock import Clock
from hybrid_ep.bench.inputs import NUM_INPUTS, CopyCounts, make_inputs
from hybrid_ep.bench.options import Load, Options
from hybrid_ep.bench.phases import add_phases
from hybrid_ep.bench.records import make_record
from hybrid_ep.config import Config


def measure(device: torch.device, *sweeps: Options) -> dict[str, Any]:
    """Measure on this rank, together with all others of the default group.

    Args:
        device: of this rank.
        sweeps: equal on all ranks.

    Returns:
        dict: ``ceilings``, ``records`` and ``skipped`` (why a backend was), the same on all ranks;
        see ``hybrid_ep_cli.bench``.
    """
    clock = Clock(device)
    sms = [n for options in sweeps for n in options.sms]
    iters, warmup = sweeps[0].iters, sweeps[0].warmup
    report: dict[str, Any] = {
        "ceilings": measure_ceilings(clock, sms, iters=iters, warmup=warmup),
        "records": [],
        "skipped": [],
    }
    for options in sweeps:
        for load in options.loads(dist.get_world_size()):
            _measure_load(load, options, clock, report)
    return report


def _measure_load(load: Load, options: Options, clock: Clock, report: dict[str, Any]) -> None:
    device, group = clock.device, clock.carrier
    inputs = [make_inputs(load, dist.get_rank(), index, device) for index in range(NUM_INPUTS)]
    copy_counts = CopyCounts(load, inputs)
    bare, plain = [], []
    if group is not None:  # gloo moves no CUDA tensors, and NCCL wants a GPU for each rank
        bare = list(bare_calls(load, copy_counts, group, device))
        plain = list(plain_calls(load, inputs, copy_counts, group))
    done = set()
    for backend, sizing, sms in itertools.product(options.backends, options.sizings, options.sms):
        config = Config(num_sms_publish=sms, num_sms_dispatch=sms, num_sms_combine=sms)
        try:
            buffer = make_buffer(load, device, backend, config)
        except RuntimeError as error:  # raised on all ranks: this backend cannot run here
            if str(error) not in report["skipped"]:
                report["skipped"].append(str(error))
            continue
        key = (buffer.backend, sizing, None if buffer.backend == "torch" else sms)
        if key not in done:
            make_calls = functools.partial(
                library_calls,
                load=load,
                inputs=inputs,
                sizing=sizing,
                copy_counts=copy_counts,
                options=options,
            )
            calls = list(make_calls(buffer))
            # plain torch runs once; the bare one in every setting, for the ratios, reported once
            baselines = [] if done else [*bare, *plain]
            clock.take_turns(
                [*(baselines or bare), *calls], iters=options.iters, warmup=options.warmup
            )
            clock.time_hosts(calls)
            if buffer.backend == "nvlink":
                traced = make_buffer(load, device, backend, replace(config, trace=True))
                add_phases(calls, traced, list(make_calls(traced)), clock)
                dist.barrier()
                traced.destroy()
            report["records"] += [
                make_record(call, load, key[2], copy_counts, options, report["ceilings"])
                for call in [*baselines, *calls]
            ]
            done.add(key)
            del calls
        dist.barrier()
        buffer.destroy()
