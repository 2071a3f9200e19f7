"""The bench's bytes, counted again by hand, and what it prints and writes. No times are judged."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep import bench
from hybrid_ep.backends.cuda.trace import Event, PhaseTimes
from hybrid_ep.backends.torch.carrier import serving_backend
from hybrid_ep.bench.baselines import PlainTorch
from hybrid_ep.bench.ceilings import ceiling_of
from hybrid_ep.bench.charts import phase_bars, plot
from hybrid_ep.bench.clock import HOST_CALLS, Call, Clock
from hybrid_ep.bench.command import _sweeps
from hybrid_ep.bench.curves import alike_shapes
from hybrid_ep.bench.fits import fit, fits
from hybrid_ep.bench.inputs import make_inputs
from hybrid_ep.bench.phases import TRACED_CALLS, add_phases
from hybrid_ep.bench.series import series_of
from hybrid_ep.bench.table import print_table
from hybrid_ep.launch import Ran, run_ranks
from hybrid_ep.output.pictures import spread
from hybrid_ep_cli.main import main, make_parser
from tests.launch import Pool, Rank

TINY = bench.Options(
    backends=("torch",),
    tokens=(16,),
    hidden=(64,),
    experts=(8,),
    topk=(2,),
    iters=2,
    warmup=1,
)
REPORT = ["device", "num_gpus", "commit", "command", "ceilings", "records"]
RECORD = {
    "op": str,
    "backend": str,
    "mode": str,
    "direction": str,
    "sizing": str,
    "dtype": str,
    "ranks": int,
    "tokens": int,
    "hidden": int,
    "experts": int,
    "topk": int,
    "skew": float,
    "align": int,
    "weighted": bool,
    "rows": int,
    "us_median": float,
    "us_fastest_rank": float,
    "us_min": float,
    "us_max": float,
    "rank_spread_us": list,
    "nvlink_bytes": int,
    "gbps": float,
    "ceiling_fraction": float,
}


def measure(me: Rank, options: bench.Options) -> dict[str, Any]:
    return bench.measure(me.device, options)


def load_of(
    num_ranks: int,
    tokens: int,
    hidden: int,
    experts: int,
    topk: int,
    dtype: str = "bf16",
    skew: float = 0.0,
) -> bench.Load:
    sizes = {"tokens": tokens, "hidden": hidden, "experts": experts, "topk": topk}
    options = bench.Options(
        **{name: (size,) for name, size in sizes.items()}, dtypes=(dtype,), skew=(skew,)
    )
    (load,) = options.loads(num_ranks)
    return load


def count_by_hand(load: bench.Load, num_ranks: int, copy_bytes: int) -> int:
    """Bytes of the busiest rank, token by token; mean of the input sets."""
    total = 0
    for index in range(bench.NUM_INPUTS):
        sent, received = [0] * num_ranks, [0] * num_ranks
        for source in range(num_ranks):
            for experts in bench.make_topk(load, source, index).tolist():
                targets = {e // (load.num_local_experts) for e in experts if e >= 0}
                for target in targets - {source}:
                    sent[source] += 1
                    received[target] += 1
        total += max(sent + received) * copy_bytes
    return round(total / bench.NUM_INPUTS)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        pytest.param(2, TINY, id="bf16"),
        pytest.param(2, replace(TINY, dtypes=("fp8",), skew=(1.0,)), id="fp8_skewed"),
        pytest.param(3, replace(TINY, experts=(9,), topk=(3,), weighted=True), id="3_ranks"),
    ],
)
def test_bytes(world: Callable[[int], Pool], num_ranks: int, options: bench.Options) -> None:
    reports = world(num_ranks).run(measure, options)
    assert all(report == reports[0] for report in reports)
    (load,) = options.loads(num_ranks)
    copy_bytes = {"dispatch": 64 + 4 if load.is_fp8 else 128, "combine": 128}
    for record in reports[0]["records"]:
        op = "combine" if record["direction"] == "backward" else record["op"]
        wanted = count_by_hand(load, num_ranks, copy_bytes[op])
        assert record["nvlink_bytes"] == wanted > 0, record


def test_records(world: Callable[[int], Pool]) -> None:
    report = world(2).run(measure, TINY)[0]
    kinds = [
        (r["backend"], r["op"], r["mode"], r["direction"], r["sizing"]) for r in report["records"]
    ]
    assert len(kinds) == len(set(kinds)), "no setting twice"
    library = [kind[1:] for kind in kinds if kind[0] == "torch"]
    for sizing in bench.SIZINGS:
        assert ("dispatch", "fresh", "forward", sizing) in library
        for op in ("dispatch", "combine"):
            assert (op, "cached", "forward", sizing) in library
            assert (op, "cached", "backward", sizing) in library
        assert ("combine", "fresh", "forward", sizing) in library
    assert {kind[:3] for kind in kinds if kind[0] != "torch"} == {
        (backend, op, mode)
        for backend, mode in (("all_to_all", "cached"), ("gloo", "fresh"))
        for op in ("dispatch", "combine")
    }
    for record in report["records"]:
        assert record["us_min"] <= record["us_median"] <= record["us_max"]
        assert record["us_fastest_rank"] <= record["us_median"]
        fastest, slowest = record["rank_spread_us"]
        assert 0 < fastest <= slowest <= record["us_median"], "never faster than its slowest rank"
        assert record["kernels_us"] is record["phases_us"] is record["sms_occupied"] is None, (
            "torch has no kernels of ours"
        )
        assert record["ratio_to_all_to_all"] > 0
        assert record["ceiling_fraction"] > 0
        if record["sizing"] == "exact":
            assert record["max_rows"] is None
        else:
            assert record["max_rows"] == 128, "what the largest rank needs, rounded up"
        assert record["sms"] is None, "the torch backend uses none"


def time_host(me: Rank) -> tuple[list[int], tuple[float, ...]]:
    made = []
    call = Call("torch", "dispatch", "cached", lambda i: functools.partial(made.append, i), 1)
    return made, Clock(me.device).time_host(call)


def test_the_host_is_timed_over_calls_in_a_row(world: Callable[[int], Pool]) -> None:
    results = world(2).run(time_host)
    for made, us in results:
        assert made == [i % bench.NUM_INPUTS for i in range(HOST_CALLS)]
        assert len(us) == HOST_CALLS
        assert us == results[0][1], "of one rank, for all"


def test_one_rank(world: Callable[[int], Pool]) -> None:
    records = world(1).run(measure, TINY)[0]["records"]
    assert {record["nvlink_bytes"] for record in records} == {0}


def test_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="a plot is drawn by matplotlib, which is optional")
    path, chart = tmp_path / "bench.json", tmp_path / "charts" / "bench.png"
    sizes = "--tokens 8 16 --hidden 32 --experts 4 --topk 2 --iters 1 --warmup 0 --sizing exact"
    asked = ["bench", "--ranks", "2", "--backend", "torch", "--device", "cpu", *sizes.split()]
    assert main([*asked, "--json", str(path), "--plot", str(chart)]) == 0
    report = json.loads(path.read_text())
    assert list(report) == REPORT
    assert report["num_gpus"] == 0
    assert report["ceilings"]["memory_copy_gbps"] > 0
    for record in report["records"]:
        for key, kind in RECORD.items():
            assert isinstance(record[key], kind), (key, record[key])
    printed = capfd.readouterr().out
    for text in ("Dispatch, us", "Combine, backward, us", "all_to_all", "fresh", "ceiling memory"):
        assert text in printed
    assert "x bare" not in printed
    assert chart.read_bytes().startswith(b"\x89PNG")

    again = tmp_path / "again.json"
    assert main(["bench", "--read", str(path), "--json", str(again)]) == 0
    assert again.read_text() == path.read_text()
    assert capfd.readouterr().out.startswith(printed.splitlines()[0])
    assert main(["bench", "--read", str(path), "--details"]) == 0
    assert "x bare" in capfd.readouterr().out


def test_details_say_what_a_record_says(capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        **dict.fromkeys(RECORD, 1),
        **{key: key for key, kind in RECORD.items() if kind is str},
        **{"sms": 24, "ratio_to_all_to_all": 1.5, "us_median": 12.0, "us_min": 3.0, "us_max": 45.0},
        **{"host_us": 31.4, "ceiling_fraction": 0.84, "rank_spread_us": [11.2, 12.4]},
        **{"mode": "fresh", "kernels_us": 9.6, "phases_us": {"publish rows": 4.1, "pull rows": 7}},
        **{"sms_occupied": 117, "op": "dispatch", "direction": "forward"},
    }
    machine = {"device": "a GPU", "num_gpus": 1, "commit": "abc"}
    ceilings = {"peer_copy_gbps": 395.0, "pull_gbps": {"8": 322.96, "16": 334.0}}
    report = {**machine, "records": [record], "ceilings": ceilings}
    print_table(report, ["nvlink: no GPU"], details=True)
    printed = capsys.readouterr().out
    numbers = ("12 [3..45]", "24", "1.50", "31", "0.84", "11..12", " 10 ", "117")
    for text in ("us [min..max]", *numbers):
        assert text in printed
    for line in (
        "skipped: nvlink: no GPU",
        "ceiling peer copy: 395.0 GB/s",
        "ceiling pull: GB/s by SMs: 323.0 on 8, 334.0 on 16",
    ):
        assert line in printed.splitlines()
    assert "publish rows 4, pull rows 7" in printed


def table_lines(capsys: pytest.CaptureFixture[str], records: list[dict[str, Any]]) -> list[str]:
    machine = {"device": "a GPU", "num_gpus": 2, "commit": "abc", "ceilings": {}}
    print_table({**machine, "records": records})
    return capsys.readouterr().out.splitlines()


def test_a_row_per_way_and_a_column_per_number_of_sms(capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        traced("dispatch", sms, {}, nvlink_bytes=1, us_median=us, sizing=sizing)
        for sizing, times in (("exact", (30, 20)), ("max_rows", (1025, 18)))
        for sms, us in zip((8, 16), times, strict=True)
    ]
    bare = {**records[0], "backend": "all_to_all", "mode": "cached", "sms": None, "us_median": 15}
    lines = table_lines(capsys, [bare, *records])
    machine, sizes = lines[0].split("; ")
    assert machine == "a GPU, 2 GPU(s), commit abc"
    assert sizes == "2 ranks, 16 tokens per rank, hidden 64, 8 experts, top-2, bf16"
    assert lines[3:11] == [
        "all_to_all: the bare exchange of the same copies.",
        "hybrid_ep: its nvlink backend.",
        "",
        "Dispatch, us",
        "  way         routing  size      default SMs  8 SMs  16 SMs",
        "  all_to_all  cached   exact              15      -       -",
        "  hybrid_ep   fresh    exact               -     30      20",
        "  hybrid_ep   fresh    max_rows            -  1,025      18",
    ]


def test_a_column_per_number_of_tokens_where_these_vary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = [
        traced(op, 8, {}, tokens=tokens, nvlink_bytes=1, us_median=us, backend=backend)
        for op in ("combine", "dispatch")
        for tokens, us in ((16, 5), (1024, 9))
        for backend in ("nvlink", "torch")
    ]
    lines = table_lines(capsys, records)
    assert lines[0].endswith("top-2, bf16, 8 SMs")
    assert lines[4:8] == [
        "Dispatch, us",
        "  way               routing  size   16 tokens  1,024 tokens",
        "  hybrid_ep nvlink  fresh    exact          5             9",
        "  hybrid_ep torch   fresh    exact          5             9",
    ]


def test_charts_against_sms(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a plot is drawn by matplotlib, which is optional")
    common = {
        **load_of(2, 16, 64, 8, 2).record(),
        "ranks": 2,
        "mode": "fresh",
        "sizing": "exact",
        "direction": "forward",
        "nvlink_bytes": 10**6,
        "ceiling_gbps": 300.0,
    }
    records = [
        {**common, "op": op, "backend": "nvlink", "sms": sms, "us_median": 100.0 / sms}
        for op in ("dispatch", "combine")
        for sms in (8, 16)
    ]
    records.append({**common, "op": "combine", "backend": "nccl", "sms": None, "us_median": 9})
    report = {"device": "a GPU", "num_gpus": 2, "commit": "abc", "records": records, "ceilings": {}}
    assert plot(report, tmp_path / "sms.png")
    assert (tmp_path / "sms.png").read_bytes().startswith(b"\x89PNG")
    one_point = {**report, "records": records[:1]}
    assert not plot(one_point, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def traced(op: str, sms: int, phases_us: dict[str, float], **others: Any) -> dict[str, Any]:
    shape = load_of(2, 16, 64, 8, 2).record()
    calls = {"mode": "fresh", "sizing": "exact", "direction": "forward", "backend": "nvlink"}
    return {
        **shape,
        **calls,
        "ranks": 2,
        "op": op,
        "sms": sms,
        "us_median": 9.0,
        "phases_us": phases_us,
        **others,
    }


def test_a_bar_for_each_phase(tmp_path: Path) -> None:
    phases = {"publish rows": 9.0, "wait for the peers' rows": 3.0, "pull rows": 20.0}
    record = traced("dispatch", 8, phases)
    lasting = [(bar.name, bar.begin, bar.end, bar.text) for bar in phase_bars(record)]
    assert lasting == [(name, 0, us, f"{us:.0f}") for name, us in phases.items()]
    begins = dict(zip(phases, (0.0, 4.0, 2.0), strict=True))
    timeline = phase_bars({**record, "phase_begins_us": begins})
    assert [(bar.begin, bar.end) for bar in timeline] == [(0, 9), (4, 7), (2, 22)]
    assert timeline[0].colour == timeline[2].colour != timeline[1].colour, "a wait is no work"

    pytest.importorskip("matplotlib", reason="a plot is drawn by matplotlib, which is optional")
    report = {"device": "a GPU", "num_gpus": 2, "commit": "abc", "records": [record]}
    assert plot(report, tmp_path / "phases.png"), "one record has no curve, but phases"
    assert (tmp_path / "phases.png").read_bytes().startswith(b"\x89PNG")


def test_times_that_no_kernel_tells_apart_are_one_curve() -> None:
    def record(op: str, mode: str, sizing: str, us: float, **others: Any) -> dict[str, Any]:
        return traced(op, 8, {}, mode=mode, sizing=sizing, us_median=us, **others)

    found = series_of(
        [
            record("dispatch", "cached", "max_rows", 3),
            record("dispatch", "cached", "exact", 4),
            record("dispatch", "fresh", "max_rows", 5),
            record("dispatch", "fresh", "exact", 6),
            record("dispatch", "cached", "exact", 7, direction="backward"),
            record("combine", "cached", "exact", 8),
            record("combine", "fresh", "exact", 9),
            record("dispatch", "fresh", "exact", 10, backend="nccl"),
        ]
    )
    assert {kind: [r["us_median"] for r in records] for (_, kind), records in found.items()} == {
        "fresh, exact size": [6],
        "fresh, max_rows": [5],
        "cached": [4],
        "combine": [9],
        "backward": [7],
    }


def test_shapes_whose_curves_agree_share_a_panel() -> None:
    records = [
        traced("dispatch", sms, {}, us_median=us / sms, experts=experts)
        for experts, us in ((8, 100), (16, 104), (32, 150))
        for sms in (8, 16)
    ]
    groups = alike_shapes(records, "sms")
    assert [[shape["experts"] for shape in group] for group in groups] == [[8, 16], [32]]


def test_labels_are_moved_apart_and_no_further() -> None:
    assert spread([0.1, 0.5, 0.9], 0.2) == [0.1, 0.5, 0.9]
    assert spread([0.5, 0.5], 0.2) == pytest.approx([0.4, 0.6])
    moved = spread([0.0, 0.5, 0.51, 0.62], 0.1)
    assert moved == pytest.approx([0.0, 0.44333, 0.54333, 0.64333], abs=1e-4)


# ---- time against bytes


def test_a_line_is_found_again() -> None:
    found = fit([(num_bytes, 30 + num_bytes / 300e3) for num_bytes in (10**6, 4 * 10**6, 10**8)])
    assert found.fixed_us == pytest.approx(30)
    assert found.gbps == pytest.approx(300)
    assert found.most_growth < 1


def test_short_calls_say_what_is_fixed() -> None:
    """2 % of noise on the longest call is more than all that is fixed; it must not hide it."""
    points = [(n * 10**7, (30 + n * 30) * (1.02 if n == 32 else 1)) for n in (1, 2, 4, 8, 16, 32)]
    assert fit(points).fixed_us == pytest.approx(30, abs=2)


def test_growth_beyond_the_bytes_shows() -> None:
    assert fit([(1, 10), (2, 19), (4, 57)]).most_growth == pytest.approx(1.5)
    flat = fit([(1, 10), (2, 10), (4, 10)])
    assert flat.fixed_us == pytest.approx(10)
    assert flat.gbps > 1e9, "time does not grow"


def test_records_that_differ_in_tokens_alone_are_a_line() -> None:
    def record(tokens: int, sms: int, **others: Any) -> dict[str, Any]:
        sizes = {"tokens": tokens, "nvlink_bytes": tokens * 1000, "us_median": 20 + tokens * 2}
        return traced("dispatch", sms, {}, **sizes, **others)

    records = [record(tokens, sms) for tokens in (1, 2, 4) for sms in (8, 16)]
    records += [record(tokens, 8, mode="cached") for tokens in (1, 2)]
    found = fits(records)
    assert [each["sms"] for each, _ in found] == [8, 16], "two points of cached are no line"
    assert [line.fixed_us for _, line in found] == pytest.approx([20, 20])


# ---- phases


class Stamped:
    """Stands for a Buffer that traces: call i of a rank has phases of so many microseconds."""

    def __init__(self, rank: int) -> None:
        self.communicator = self.verbs = self
        self.calls, self.rank, self.taken = 0, rank, 0

    def call(self) -> None:
        self.calls += 1

    def take_trace(self) -> list[Event]:
        self.taken += 1
        if self.taken % 2 == 1:  # what prepared the call
            return [Event(3, 0, 1, 0, 10**9, sm=9)]
        publish, pull = 1000 * (self.calls + 10 * self.rank), 5000 * self.calls
        return [
            Event(3, 0, 1, 0, publish, sm=0),
            Event(6, 1, 1, publish + 500, publish + 500 + pull, sm=self.rank),
        ]


def trace(me: Rank) -> PhaseTimes:
    buffer = Stamped(me.rank)
    timed, traced = (
        Call("nvlink", "dispatch", "fresh", lambda i: buffer.call, 1) for _ in range(2)
    )
    add_phases([timed], buffer, [traced], Clock(me.device))
    assert buffer.calls == TRACED_CALLS == 5
    return PhaseTimes(timed.kernels_us, timed.phases_us, timed.sms_occupied, timed.phase_begins_us)


def test_phases_are_medians_of_the_slowest_rank(world: Callable[[int], Pool]) -> None:
    for times in world(2).run(trace):
        assert times.phases == {"publish rows": 13.0, "pull rows": 15.0}
        assert times.kernels == 13 + 0.5 + 15
        assert times.sms == 2, "of rank 1, whose blocks run on two"
        assert times.begins == {"publish rows": 0, "pull rows": 3.5}, "of rank 0, the earlier one"


def test_sweeps_by_name() -> None:
    parser = make_parser()
    (sweep,) = _sweeps(parser.parse_args("bench --sweep tokens --hidden 64 --device cpu".split()))
    assert sweep.tokens == (1024, 2048, 4096, 8192, 16384, 32768)
    assert (sweep.hidden, sweep.experts, sweep.backward) == ((64,), (16,), True)
    asked = "bench --sweep tokens --tokens 8 16 --no-backward".split()
    (named,) = _sweeps(parser.parse_args(asked))
    assert named.tokens == (8, 16)
    assert not named.backward


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (
            {"experts": (7,)},
            "divisible by the number of ranks, got num_experts=7 with 2",
        ),
        ({"topk": (9,)}, "topk must be at most num_experts=8, got 9"),
        ({"hidden": (4,)}, "multiple of 16 bytes"),
        ({"backends": ("quick",)}, "backend must be one of"),
        ({"iters": 0}, "--iters must be at least 1, got 0"),
        ({"tokens": (0,)}, "max_tokens must be an integer of at least 1"),
        ({"skew": (0.0, -1.0)}, "skew must not be negative, got -1.0"),
    ],
)
def test_mistakes(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        replace(TINY, **change).check(2)


def test_routing_is_skewed_and_repeatable() -> None:
    skewed = load_of(2, 512, 64, 16, 4, skew=1.2)
    topk_idx = bench.make_topk(skewed, 1, 2)
    assert torch.equal(topk_idx, bench.make_topk(skewed, 1, 2))
    assert (topk_idx.sort(dim=1).values.diff(dim=1) > 0).all(), "distinct experts"
    load = topk_idx.flatten().bincount(minlength=16)
    even = bench.make_topk(replace(skewed, skew=0.0), 1, 2).flatten().bincount(minlength=16)
    assert load.max() > 2 * even.max()


@dataclass(frozen=True)
class Compared:
    same_rows: bool
    same_weights: bool
    same_scales: bool
    same_counts: bool
    error: float  # of the sums, over the sum of the absolute terms


def compare_plain_torch(me: Rank, load: bench.Load) -> list[Compared]:
    plain = PlainTorch(load.num_experts, dist.group.WORLD)
    buffer = hybrid_ep.Buffer(
        hidden=load.hidden,
        num_experts=load.num_experts,
        max_tokens=load.max_tokens,
        topk=load.topk,
        dtype=torch.float32,
        device=me.device,
        backend="torch",
    )
    compared = []
    for index in range(bench.NUM_INPUTS):
        x = make_inputs(load, me.rank, index, me.device)
        wanted = hybrid_ep.dispatch(buffer, x.x, x.topk_idx, x.topk_weights, scales=x.scales)
        got = plain.dispatch(x)
        rows = wanted.rows if x.scales is None else wanted.rows.to(torch.bfloat16)
        home = hybrid_ep.combine(buffer, rows, wanted.handle).double()
        terms = hybrid_ep.combine(buffer, rows.abs(), wanted.handle).double()
        error = (plain.combine(rows, got.route).double() - home).abs() / terms.clamp(min=1e-30)
        compared.append(
            Compared(
                torch.equal(got.rows.view(torch.uint8), wanted.rows.view(torch.uint8)),
                torch.equal(got.weights, wanted.weights),
                x.scales is None or torch.equal(got.scales, wanted.scales),
                torch.equal(got.counts.int(), wanted.counts),
                float(error.max()),
            )
        )
    buffer.destroy()
    return compared


@pytest.mark.parametrize(
    ("num_ranks", "load"),
    [
        pytest.param(2, load_of(2, 48, 64, 8, 3, "bf16"), id="bf16"),
        pytest.param(4, load_of(4, 33, 32, 16, 4, "fp32", 1.5), id="4_ranks_skewed"),
        pytest.param(3, load_of(3, 20, 256, 9, 9, "fp8"), id="fp8_all_experts"),
        pytest.param(3, load_of(3, 1, 32, 9, 1, "bf16"), id="rank_without_rows"),
    ],
)
def test_plain_torch_does_the_same(
    world: Callable[[int], Pool], num_ranks: int, load: bench.Load
) -> None:
    for compared in world(num_ranks).run(compare_plain_torch, load):
        for each in compared:
            assert each.same_rows
            assert each.same_weights
            assert each.same_scales
            assert each.same_counts
            assert each.error < (1e-6 if load.dtype == torch.float32 else 3 * 2**-8)


def test_a_call_is_held_against_the_ceiling_of_its_way() -> None:
    ceilings = {
        "peer_copy_gbps": 395.0,
        "pull_gbps": {"8": 1.0, "16": 2.0},
        "push_gbps": {"8": 3.0},
    }

    def ceiling(op: str, direction: str, sms: int | None, known: dict[str, Any]) -> float | None:
        call = Call("nvlink", op, "cached", lambda i: int, 1, direction=direction)
        return ceiling_of(known, call, sms)

    assert ceiling("dispatch", "forward", 8, ceilings) == 1.0
    assert ceiling("combine", "backward", 16, ceilings) == 2.0
    assert ceiling("dispatch", "forward", None, ceilings) == 2.0, "the best of all for NCCL"
    assert ceiling("combine", "forward", 8, ceilings) == 3.0
    assert ceiling("dispatch", "backward", 8, ceilings) == 3.0
    assert ceiling("dispatch", "forward", 8, {"peer_copy_gbps": 395.0}) == 395.0
    assert ceiling("dispatch", "forward", 8, {}) is None


def test_what_gpus_are_asked_without_sizes() -> None:
    wide, narrow = bench.gpu_sweeps(bench.Options(iters=7))
    wide.check(2)
    narrow.check(2)
    assert [load.num_experts for load in wide.loads(2)] == [16, 256]
    assert [load.is_fp8 for load in narrow.loads(2)] == [True]
    assert wide.iters == narrow.iters == 7
    assert wide.backward and narrow.backward
    left_out = bench.gpu_sweeps(bench.Options(backward=False))
    assert not any(sweep.backward for sweep in left_out)


@pytest.mark.parametrize(
    ("asked", "named"),
    [("", "gloo"), ("--group nccl", "nccl"), ("--group unnamed", None)],
    ids=["default", "nccl", "unnamed"],
)
def test_the_group_is_the_one_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, named: str | None
) -> None:
    got = []

    def start(*args: Any, group: str | None, **others: Any) -> Ran:
        got.append(group)
        return Ran([{"records": [], "skipped": ["nothing"]}])

    monkeypatch.setattr("hybrid_ep.bench.command.on_ranks", start)
    assert main(["bench", *asked.split()]) == 1
    assert got == [named]


def backend_of_the_group(device: torch.device) -> str:
    return serving_backend(dist.group.WORLD, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing named is NCCL")
def test_ranks_of_a_group_without_a_name_have_gloo_on_the_cpu() -> None:
    assert run_ranks(backend_of_the_group, 2, device="cpu", group=None) == ["gloo", "gloo"]
