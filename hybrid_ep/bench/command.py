"""Runs ``hybrid-ep bench``; ``hybrid_ep_cli.bench`` has its options."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid_ep import bench
from hybrid_ep.bench.charts import plot
from hybrid_ep.bench.layer import SHAPES, LayerOptions, measure_layers
from hybrid_ep.bench.layer.chart import plot_layers
from hybrid_ep.bench.layer.options import shapes_of
from hybrid_ep.bench.layer.table import print_layers
from hybrid_ep.bench.overlap import OverlapOptions, measure_overlap
from hybrid_ep.bench.overlap.chart import plot_overlaps
from hybrid_ep.bench.overlap.table import print_overlaps
from hybrid_ep.bench.records import describe_machine
from hybrid_ep.bench.table import print_table
from hybrid_ep.launch import on_ranks, ranks_here
from hybrid_ep.output.files import STDOUT, check_report, keep, make_room_for_plot, text_beside

_UNNAMED = "unnamed"  # of --group
_DEFAULTS: dict[str, Any] = {
    "tokens": (4096,),
    "hidden": (1024,),
    "experts": (256,),
    "topk": (8,),
    "sms": (16, 32, 48),
    "dtypes": ("bf16",),
    "skew": (0.0,),
}


_LAYER_DEFAULTS: dict[str, Any] = {  # without a named shape
    "tokens": (512,),
    "hidden": (256,),
    "ffn": (256,),
    "experts": (16,),
    "topk": (2,),
    "dtypes": ("bf16",),
}
_GPU_SHAPE = "deepseek-v3"  # of --layer, unless sizes are named
_NOT_OF_LAYERS = ("sweep", "skew", "weighted", "details")
_OF_LAYERS = ("shape", "ffn", "weight_at")
_OF_OVERLAP = ("gemm", "gemms")
_NOT_OF_OVERLAP = ("layer", "sweep", "skew", "dtypes", "weighted", "details")


@dataclass(frozen=True)
class _Kind:
    """What is measured, what its report is told by, and the report's keys.

    Attributes:
        records: the key of the records.
        others: further keys.
    """

    measure: Callable[..., dict[str, Any]]
    print_table: Callable[..., None]
    plot: Callable[[dict[str, Any], Path], bool]
    records: str
    others: tuple[str, ...] = ()


_CALLS = _Kind(bench.measure, print_table, plot, "records", ("ceilings",))
_LAYERS = _Kind(measure_layers, print_layers, plot_layers, "layers")
_OVERLAPS = _Kind(measure_overlap, print_overlaps, plot_overlaps, "overlaps")
_KINDS = (_CALLS, _LAYERS, _OVERLAPS)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for."""
    if args.read is not None:
        report = _read(args.read)
        check_report(args.json)
        make_room_for_plot(args.plot)
        try:
            _tell(args, report, [])
        except (KeyError, TypeError, AttributeError) as error:  # a record is not one of ours
            raise ValueError(
                f"--read must name a file that --json wrote, got {args.read}: "
                f"{type(error).__name__} {error}"
            ) from error
        return 0
    num_ranks = ranks_here(args.ranks)
    kind, options = _asked(args, num_ranks)
    for each in options:
        each.check(num_ranks)
    check_report(args.json)
    make_room_for_plot(args.plot)
    group = None if args.group == _UNNAMED else args.group
    with text_beside(args.json):
        ran = on_ranks(kind.measure, args.ranks, *options, device=args.device, group=group)
    measured = ran.values[0]
    if not measured[kind.records]:
        if ran.speaks:
            print(f"hybrid-ep bench: {'; '.join(measured['skipped'])}", file=sys.stderr)
        return 1
    if not ran.speaks:
        return 0
    machine = describe_machine(args.device, len(ran.values), args.commit)
    report = {**machine, **measured}
    _tell(args, report, report.pop("skipped"))
    return 0


def _asked(args: argparse.Namespace, num_ranks: int) -> tuple[_Kind, tuple[Any, ...]]:
    """What to measure, with which options; ValueError for one of another kind."""
    for option, names, is_asked in (
        ("--layer", _OF_LAYERS, args.layer),
        ("--overlap", _OF_OVERLAP, args.overlap),
    ):
        for name in names:
            if not is_asked and getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs {option}")
    if args.overlap:
        return _OVERLAPS, (_overlap_options(args),)
    if args.layer:
        return _LAYERS, (_layer_options(args, num_ranks),)
    return _CALLS, _sweeps(args)


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"--read must name a file that --json wrote: {error}") from None
    except ValueError:
        raise ValueError(
            f"--read must name a file of JSON, which --json wrote, got {path}"
        ) from None
    machine = ("device", "num_gpus", "commit")
    if not isinstance(report, dict) or not any(
        all(key in report for key in (*machine, kind.records, *kind.others))
        and report[kind.records]
        for kind in _KINDS
    ):
        raise ValueError(f"--read must name a file that --json wrote, got {path}")
    return report


def _tell(args: argparse.Namespace, report: dict[str, Any], skipped: list[str]) -> None:
    """The files first: a reader of the text who leaves early, as in ``| head``, loses none."""
    kind = next(kind for kind in _KINDS if kind.records in report)
    drawn = args.plot is not None and kind.plot(report, args.plot)
    keep(args.json, report)
    if args.json == STDOUT:
        return
    if kind is _CALLS:
        print_table(report, skipped, details=args.details)
    else:
        kind.print_table(report, skipped)
    if args.json is not None:
        print(f"wrote {args.json}")
    if args.plot is not None:
        print(f"wrote {args.plot}" if drawn else "nothing to plot: no SMs or tokens were swept")


def _overlap_options(args: argparse.Namespace) -> OverlapOptions:
    _refuse(args, "--overlap", _NOT_OF_OVERLAP)
    if not _on_gpu(args):
        raise ValueError("--overlap must run on GPUs, got the CPU: the streams are CUDA's")
    names = ("tokens", "hidden", "experts", "topk", "sms", *_OF_OVERLAP)
    asked = {name: given for name in names if (given := getattr(args, name)) is not None}
    return OverlapOptions(
        backends=tuple(args.backend.split(",")),
        **{
            name: tuple(given) if isinstance(given, list) else given
            for name, given in asked.items()
        },
        iters=args.iters,
        warmup=args.warmup,
    )


def _refuse(args: argparse.Namespace, option: str, names: tuple[str, ...]) -> None:
    """ValueError for an option that means nothing beside another."""
    for name in names:
        if getattr(args, name):
            written = "dtype" if name == "dtypes" else name
            raise ValueError(f"--{written} must be left out with {option}")
    if args.align != 1:
        raise ValueError(f"--align must be left out with {option}, got {args.align}")


def _layer_options(args: argparse.Namespace, num_ranks: int) -> LayerOptions:
    _refuse(args, "--layer", _NOT_OF_LAYERS)
    sized = ("hidden", "ffn", "experts", "topk")
    asked = {name: tuple(given) for name in _LAYER_DEFAULTS if (given := getattr(args, name))}
    named = args.shape
    if named is None and _on_gpu(args) and not any(name in asked for name in sized):
        named = [_GPU_SHAPE]
    if named is None:
        shapes = tuple(shapes_of(*{**_LAYER_DEFAULTS, **asked}.values()))
    else:
        for name in sized:
            if name in asked:
                raise ValueError(f"--{name} must be left out with --shape, which has its own")
        tokens = asked.get("tokens", _DEFAULTS["tokens"])
        dtypes = asked.get("dtypes", _DEFAULTS["dtypes"])
        shapes = tuple(
            SHAPES[name].on(name, num_ranks, each, dtype)
            for name in named
            for each in tokens
            for dtype in dtypes
        )
    return LayerOptions(
        shapes=shapes,
        backends=tuple(args.backend.split(",")),
        sizings=tuple(args.sizing),
        sms=tuple(args.sms or _DEFAULTS["sms"]),
        weight_at=args.weight_at or "combine",
        backward=args.backward,
        iters=args.iters,
        warmup=args.warmup,
    )


def _on_gpu(args: argparse.Namespace) -> bool:
    return args.device != "cpu" and torch.cuda.is_available()


def _sweeps(args: argparse.Namespace) -> tuple[bench.Options, ...]:
    on_gpu = _on_gpu(args)
    asked = {name: tuple(given) for name in _DEFAULTS if (given := getattr(args, name)) is not None}
    sizes = {**_DEFAULTS, **bench.SWEEPS.get(args.sweep, {}), **asked}
    if on_gpu and "hidden" not in asked:
        sizes["hidden"] = (7168,)
    options = bench.Options(
        backends=tuple(args.backend.split(",")),
        **sizes,
        sizings=tuple(args.sizing),
        align=args.align,
        weighted=args.weighted,
        backward=args.backward,
        iters=args.iters,
        warmup=args.warmup,
    )
    return bench.gpu_sweeps(options) if on_gpu and not (asked or args.sweep) else (options,)
