"""What a report holds: a record for each call that was timed, and the machine."""

from __future__ import annotations

import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep.bench.ceilings import ceiling_of
from hybrid_ep.bench.clock import Call
from hybrid_ep.bench.inputs import CopyCounts
from hybrid_ep.bench.options import BASELINES, Load, Options


def make_record(
    call: Call,
    load: Load,
    sms: int | None,
    copy_counts: CopyCounts,
    options: Options,
    ceilings: dict[str, Any],
) -> dict[str, Any]:
    """One call's record, as it stands in the JSON; see ``hybrid_ep_cli.bench``."""
    median = statistics.median(call.us)
    gbps = call.link_bytes / median / 1e3
    sms = None if call.backend in BASELINES else sms
    ceiling = ceiling_of(ceilings, call, sms)
    return {
        "op": call.op,
        "backend": call.backend,
        "mode": call.mode,
        "direction": call.direction,
        "sizing": call.sizing,
        "max_rows": call.max_rows,
        "ranks": dist.get_world_size(),
        **load.record(),
        "align": options.align,
        "weighted": options.weighted,
        "sms": sms,
        "us_median": median,
        "us_min": min(call.us),
        "us_max": max(call.us),
        "us_fastest_rank": statistics.median(call.us_of_fastest),
        "rank_spread_us": [min(call.rank_us), max(call.rank_us)],
        "host_us": _median(call.host_us),
        "host_us_after_idle": _median(call.host_us_after_idle),
        "kernels_us": call.kernels_us,
        "phases_us": call.phases_us,
        "phase_begins_us": call.phase_begins_us,
        "sms_occupied": call.sms_occupied,
        "rows": copy_counts.most_rows,
        "nvlink_bytes": call.link_bytes,
        "gbps": gbps,
        "ceiling_gbps": ceiling,
        "ceiling_fraction": gbps / ceiling if ceiling else None,
        "ratio_to_all_to_all": median / statistics.median(call.bare.us) if call.bare else None,
    }


def _median(times: Sequence[float]) -> float | None:
    return statistics.median(times) if times else None


def describe_machine(device: str, num_ranks: int, commit: str | None = None) -> dict[str, Any]:
    """What a report says about where it was made.

    Args:
        device: ``"auto"`` or ``"cpu"``.
        num_ranks: ranks that took part.
        commit: of the code; None asks git.

    Returns:
        dict: ``device``, ``num_gpus``, ``commit``, ``command``.
    """
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    return {
        "device": torch.cuda.get_device_name(0) if gpus else _cpu_name(),
        "num_gpus": min(gpus, num_ranks),
        "commit": commit or _commit(),
        "command": shlex.join(["hybrid-ep", *sys.argv[1:]]),
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
