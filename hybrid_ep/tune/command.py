"""Runs ``hybrid-ep tune``; ``hybrid_ep_cli.tune`` has its options."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from hybrid_ep import bench
from hybrid_ep.bench.records import describe_machine
from hybrid_ep.config import Config
from hybrid_ep.launch import on_ranks, ranks_here
from hybrid_ep.output.files import STDOUT, check_report, keep, make_room, text_beside
from hybrid_ep.output.tables import print_table
from hybrid_ep.tune.search import Goal, Measurement, Tuned, tune

SETTINGS = ("num_sms_publish", "num_sms_dispatch", "num_sms_combine", "slice_bytes")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write the Config."""
    if not torch.cuda.is_available():
        raise ValueError(
            "there is no GPU here that torch can use. The SMs and slices of a Config are those of "
            "the nvlink backend's kernels; the torch backend, which runs here, has nothing to tune"
        )
    goal = Goal(max_sms=args.max_sms, aim=args.aim, within=args.within, seconds=args.seconds)
    goal.check()
    options = bench.Options(
        backends=("nvlink",),
        tokens=(args.tokens,),
        hidden=(args.hidden,),
        experts=(args.experts,),
        topk=(args.topk,),
        dtypes=(args.dtype,),
    )
    options.check(ranks_here(args.ranks))
    (load,) = options.loads(ranks_here(args.ranks))
    make_room("--out", args.out)
    check_report(args.json)
    with text_beside(args.json):
        ran = on_ranks(tune, args.ranks, load, goal)
    if not ran.speaks:
        return 0
    machine = describe_machine("auto", len(ran.values), args.commit)
    report = make_report(ran.values[0], load, len(ran.values), machine)
    tuned_for = {key: report[key] for key in report if key not in ("config", "measured")}
    ran.values[0].config.save(args.out, tuned_for=tuned_for)
    keep(args.json, report)
    if args.json == STDOUT:
        return 0
    tell(report)
    print(f"wrote {args.out}")
    if args.json is not None:
        print(f"wrote {args.json}")
    return 0


def make_report(
    tuned: Tuned, load: bench.Load, num_ranks: int, machine: dict[str, Any]
) -> dict[str, Any]:
    """What ``--json`` writes."""
    return {
        **machine,
        "ranks": num_ranks,
        **load.record(),
        **asdict(tuned.goal),
        "complete": tuned.complete,
        "config": asdict(tuned.config),
        "confirmed": [_record(each) for each in tuned.confirmed],
        "measured": [_record(each) for each in tuned.measured],
    }


def tell(report: dict[str, Any]) -> None:
    """Print a report: what was measured, the choice, the choice beside the default."""
    shape = ", ".join(f"{key} {report[key]}" for key in ("tokens", "hidden", "experts", "topk"))
    title = f"{report['ranks']} ranks on {report['num_gpus']} GPU(s), {report['device']}; {shape}"
    print_table(f"measured: {title}, {report['dtype']}", _HEADER, _rows(report["measured"]))
    if not report["complete"]:
        print(f"the search did not end within {report['seconds']:g} s: more --seconds may help\n")
    if report["ranks"] > report["num_gpus"]:
        print("ranks share GPUs: these times are not those of a GPU for each rank\n")
    aim = report["aim"] if report["aim"] == "fastest" else f"fewest within {report['within']:g}"
    chosen = Config(**report["config"])
    print_table(f"chosen, measured again: {aim}", _HEADER, _rows(report["confirmed"]))
    print(chosen)
    for record in report["confirmed"]:
        default = default_sms(record["op"])
        print(
            f"{record['op']}: {record['us_median']:.0f} us on {record['sms']} SMs, the default "
            f"{record['default_us_median']:.0f} us on {default}: {record['ratio_to_default']:.3f} "
            f"of its time (+- {record['noise']:.3f})"
        )


def default_sms(op: str) -> int:
    """SMs that an op is given by default."""
    return Measurement(op, Config(), (), ()).sms


_HEADER = ("op", "publish", "pull", "combine", "slice", "us [min..max]", "x default", "+-")


def _rows(records: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = []
    for record in records:
        of_op = SETTINGS[2:3] if record["op"] == "combine" else (*SETTINGS[:2], SETTINGS[3])
        settings = (str(record[name]) if name in of_op else "-" for name in SETTINGS)
        times = f"{record['us_median']:.0f} [{record['us_min']:.0f}..{record['us_max']:.0f}]"
        ratio, noise = f"{record['ratio_to_default']:.3f}", f"{record['noise']:.3f}"
        rows.append((record["op"], *settings, times, ratio, noise))
    return rows


def _record(each: Measurement) -> dict[str, Any]:
    return {
        "op": each.op,
        **{name: getattr(each.config, name) for name in SETTINGS},
        "sms": each.sms,
        "us_median": statistics.median(each.us),
        "us_min": min(each.us),
        "us_max": max(each.us),
        "default_us_median": statistics.median(each.default_us),
        "ratio_to_default": each.ratio,
        "noise": each.noise,
    }
