"""Files of a Config, and what tune decides from given times. No measured time is judged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hybrid_ep
from hybrid_ep import Config, bench
from hybrid_ep.tune import command, lines
from hybrid_ep.tune import search as tune
from hybrid_ep.tune.search import Goal, Measurement, choose, confirm, search
from hybrid_ep_cli.main import main
from tests.launch import Pool, Rank

TUNED = Config(
    num_sms_publish=16, num_sms_dispatch=40, num_sms_combine=48, slice_bytes=7168, timeout_s=2.5
)
SIZES = {"hidden": 64, "num_experts": 4, "max_tokens": 8, "topk": 2}


# ---- files


@pytest.mark.parametrize("tuned_for", [None, {}, {"device": "H200 µ", "tokens": 4096}])
@pytest.mark.parametrize(
    "config",
    [Config(), TUNED, Config(trace=True), Config(timeout_s=None), Config(timeout_s=1e300)],
    ids=["default", "tuned", "trace", "no deadline", "long deadline"],
)
def test_round_trip(tmp_path: Path, config: Config, tuned_for: dict[str, Any] | None) -> None:
    path = tmp_path / "config.json"
    config.save(path, tuned_for=tuned_for)
    assert Config.load(path) == Config.load(str(path)) == config
    assert "Infinity" not in path.read_text(), "which is no JSON"
    assert json.loads(path.read_text()).get("tuned_for") == tuned_for


def test_a_file_may_leave_settings_out(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"num_sms_combine": 48, "timeout_s": 5}')
    config = Config.load(path)
    assert config == Config(num_sms_combine=48, timeout_s=5.0)
    assert repr(config) == repr(Config(num_sms_combine=48, timeout_s=5.0)), "ranks compare these"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (60, 60.0),
        (Fraction(5, 2), 2.5),
        (None, math.inf),
        (10**400, math.inf),
        (2**60, float(2**60)),
    ],
    ids=str,
)
def test_deadlines_of_equal_length_are_equal_settings(first: Any, second: Any) -> None:
    one, other = Config(timeout_s=first), Config(timeout_s=second)
    assert one == other
    assert repr(one) == repr(other), "ranks compare these"
    assert type(one.timeout_s) is float


@pytest.mark.parametrize("written", ["null", "Infinity", "1e999", "1" + "0" * 400], ids=len)
def test_no_deadline_in_a_file(tmp_path: Path, written: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{{"timeout_s": {written}}}')
    assert Config.load(path) == Config(timeout_s=math.inf)


BAD_FILES = {
    "no_json": ("num_sms_combine = 3", ["must hold JSON", "Expecting value"]),
    "empty": ("", ["must hold JSON"]),
    "not_utf8": (b"\xff\xfe", ["must hold JSON", "utf-8"]),
    "deep": ("[" * 100_000, ["must hold JSON"]),
    "no_object": ("[1, 2]", ["must hold a JSON object", "[1, 2]"]),
    "unknown_key": ('{"num_sms": 3}', ["num_sms_publish, ", "'num_sms' with 3"]),
    "key_twice": ('{"trace": true, "trace": false}', ["'trace'", "twice", "True and False"]),
    "tuned_for": ('{"tuned_for": [1]}', ["tuned_for must be an object", "[1]"]),
    "tuned_for_null": ('{"tuned_for": null}', ["tuned_for must be an object", "None"]),
    "sms_text": ('{"num_sms_publish": "32"}', ["num_sms_publish must be an integer", "'32'"]),
    "sms_bool": ('{"num_sms_dispatch": true}', ["num_sms_dispatch must be an integer", "True"]),
    "sms_float": ('{"num_sms_combine": 32.0}', ["num_sms_combine must be an integer", "32.0"]),
    "sms_0": ('{"num_sms_combine": 0}', ["num_sms_combine must be an integer of at least 1", "0"]),
    "slice_text": ('{"slice_bytes": "big"}', ["slice_bytes must be a multiple of 16", "'big'"]),
    "slice_odd": ('{"slice_bytes": 1000}', ["slice_bytes must be a multiple of 16", "1000"]),
    "slice_large": ('{"slice_bytes": 32768}', ["slice_bytes must be a multiple of 16", "32768"]),
    "timeout_bool": ('{"timeout_s": true}', ["timeout_s must be a positive number", "True"]),
    "timeout_0": ('{"timeout_s": 0}', ["timeout_s must be a positive number", "got 0"]),
    "timeout_text": ('{"timeout_s": "60"}', ["timeout_s must be a positive number", "'60'"]),
    "timeout_nan": ('{"timeout_s": NaN}', ["timeout_s must be a positive number", "nan"]),
    "timeout_huge": (f'{{"timeout_s": -1{"0" * 400}}}', ["timeout_s must be a positive number"]),
    "trace_1": ('{"trace": 1}', ["trace must be True or False", "got 1"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file(alone: Rank, tmp_path: Path, name: str) -> None:
    content, said = BAD_FILES[name]
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for load in (Config.load, lambda path: alone.buffer(**SIZES, config=path)):
        with pytest.raises(ValueError) as raised:
            load(path)
        for text in (str(path), *said):
            assert text in str(raised.value)


def test_missing_file(alone: Rank, tmp_path: Path) -> None:
    for load in (Config.load, lambda path: alone.buffer(**SIZES, config=path)):
        with pytest.raises(FileNotFoundError, match=r"none\.json"):
            load(tmp_path / "none.json")


@pytest.mark.parametrize("kind", [str, Path])
def test_buffer_reads_a_path(alone: Rank, tmp_path: Path, kind: type) -> None:
    TUNED.save(tmp_path / "config.json", tuned_for={"tokens": 8})
    buffer = alone.buffer(**SIZES, config=kind(tmp_path / "config.json"))
    assert buffer.config == TUNED
    buffer.destroy()


@pytest.mark.parametrize("wrong", [{"slice_bytes": 16}, 3, b"config.json"])
def test_buffer_refuses_what_is_neither_config_nor_path(alone: Rank, wrong: Any) -> None:
    with pytest.raises(ValueError, match="config must be a Config or the path of its file, got"):
        alone.buffer(**SIZES, config=wrong)


def load_on_ranks(me: Rank, paths: list[str]) -> tuple[str, str]:
    """The config of a Buffer, or what was raised."""
    try:
        buffer = me.buffer(**SIZES, config=paths[me.rank])
    except (OSError, ValueError) as error:
        return type(error).__name__, str(error)
    buffer.destroy()
    return "config", repr(buffer.config)


def test_ranks_with_files(world: Callable[[int], Pool], tmp_path: Path) -> None:
    here, there, other, bad = (str(tmp_path / name) for name in ("a", "b", "other", "bad"))
    TUNED.save(here, tuned_for={"rank": 0})
    TUNED.save(there)
    replace(TUNED, num_sms_combine=8).save(other)
    Path(bad).write_text('{"slice_bytes": 5}')
    none = str(tmp_path / "none")

    def told(*paths: str) -> list[tuple[str, str]]:
        return world(2).run(load_on_ranks, list(paths))

    assert told(here, there) == [("config", repr(TUNED))] * 2, "another path, the same settings"
    for kind, text in told(here, other):
        assert kind == "ValueError"
        for part in ("config must be equal on all ranks", "combine=48", "combine=8"):
            assert part in text
    (_, good), (kind, own) = told(here, bad)
    assert kind == "ValueError" and bad in own and "slice_bytes must be" in own
    assert good == f"rank 1: {own}"
    (kind, own), (_, good) = told(none, here)
    assert kind == "FileNotFoundError" and none in own
    assert good == f"rank 0: {own}"
    assert [kind for kind, _ in told(bad, bad)] == ["ValueError"] * 2
    assert [kind for kind, _ in told(none, none)] == ["FileNotFoundError"] * 2


# ---- counts of any integer type


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_counts_of_a_Config(tmp_path: Path, kind: type) -> None:
    counts = {"num_sms_dispatch": 24, "network_chunk_tokens": 4, "slice_bytes": 4096}
    config = Config(**{name: kind(value) for name, value in counts.items()})
    want = Config(**counts)
    assert repr(config) == repr(want)
    path = tmp_path / "config.json"
    config.save(path)
    assert json.loads(path.read_text())["num_sms_dispatch"] == 24
    assert Config.load(path) == want


@pytest.mark.parametrize("wrong", [True, np.bool_(True), 16.0, np.float64(16), "16"])
@pytest.mark.parametrize("name", ["num_sms_dispatch", "slice_bytes"])
def test_counts_of_a_Config_that_are_no_integers(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"Config.{name} must be a"):
        Config(**{name: wrong})


# ---- the decision


def combine(sms: int, *ratios: float) -> Measurement:
    config = Config(num_sms_combine=sms)
    return Measurement("combine", config, tuple(100 * r for r in ratios), (100.0,) * len(ratios))


def pull(publish: int, dispatch: int, ratio: float, slice_bytes: int = 16384) -> Measurement:
    config = Config(num_sms_publish=publish, num_sms_dispatch=dispatch, slice_bytes=slice_bytes)
    return Measurement("dispatch", config, (100 * ratio,) * 4, (100.0,) * 4)


def flat(ratio_of: dict[int, float]) -> list[Measurement]:
    return [combine(sms, ratio, ratio, ratio) for sms, ratio in ratio_of.items()]


@dataclass(frozen=True)
class Choice:
    name: str
    measured: list[Measurement]
    fastest: int  # which of the measured
    fewest: int
    within: float = 1.05


NOISY = (0.96, 0.99, 1.0, 1.01, 1.04)
CHOICES = [
    Choice("one", flat({32: 1.0}), 0, 0),
    Choice("monotone", flat({8: 4.0, 16: 2.0, 32: 1.0, 48: 0.8}), 3, 3),
    Choice("knee", flat({8: 2.0, 16: 1.04, 32: 1.0, 48: 0.995}), 3, 1),
    Choice("the_bound_is_in", flat({16: 1.5, 32: 1.0}), 1, 0, within=1.5),
    Choice("beyond_the_bound", flat({16: 1.501, 32: 1.0}), 1, 1, within=1.5),
    Choice("within_1", flat({16: 1.001, 32: 1.0}), 1, 1, within=1.0),
    Choice("more_sms_are_slower", flat({16: 1.2, 24: 0.9, 32: 1.0, 48: 1.1}), 1, 1),
    Choice("a_dip_below_the_knee", flat({12: 1.03, 16: 1.3, 24: 1.02, 48: 1.0}), 3, 0),
    Choice("tie", flat({48: 1.0, 32: 1.0, 40: 1.0}), 1, 1),
    Choice(
        "noise_ties_and_fewer_sms_win",
        [combine(48, *NOISY), combine(40, *(r + 0.005 for r in NOISY)), combine(24, *[1.2] * 5)],
        1,
        1,
    ),
    Choice(
        "noise_of_the_slower_makes_no_tie",
        [combine(48, *[1.0] * 5), combine(16, 0.5, 1.0, 1.06, 1.5, 2.0)],
        0,
        0,
    ),
    Choice(
        "noise_hides_at_most_2_percent",
        [combine(48, 0.2, 0.6, 1.0, 1.4, 1.8), combine(16, *[1.03] * 5)],
        0,
        1,
    ),
    Choice(
        "an_outlier_does_not_count",
        [combine(48, 0.9, 0.9, 0.9, 0.9, 9.0), combine(40, 1.0, 1.0, 1.0, 1.0, 0.1)],
        0,
        0,
    ),
    Choice("publish_counts_where_it_is_more", [pull(48, 24, 1.0), pull(32, 32, 1.04)], 0, 1),
    Choice("publish_is_free_below_pull", [pull(16, 32, 1.0), pull(32, 32, 1.01)], 0, 0),
    Choice("publish_tie", [pull(32, 32, 1.0), pull(16, 32, 1.0)], 1, 1),
    Choice("slice_tie_whole_rows", [pull(32, 32, 1.0, 7168), pull(32, 32, 1.0)], 1, 1),
    Choice("slice", [pull(32, 32, 0.9, 7168), pull(32, 32, 1.0)], 0, 0),
]


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: case.name)
def test_choice(case: Choice) -> None:
    for aim, wanted in (("fastest", case.fastest), ("fewest", case.fewest)):
        goal = Goal(aim=aim, within=case.within)
        for order in (case.measured, case.measured[::-1]):
            assert choose(order, goal) == case.measured[wanted], aim


def test_times_are_judged_in_turns_with_the_default() -> None:
    """A machine that became twice as slow half way: the setting is 10 % faster all the time."""
    measured = Measurement("combine", Config(), (90.0, 90.0, 180.0), (100.0, 100.0, 200.0))
    assert measured.ratio == pytest.approx(0.9)
    assert measured.noise == pytest.approx(0.0)
    assert combine(8, 1.0).noise == 0.0, "of one iteration nothing is known"


@dataclass(frozen=True)
class Doubt:
    name: str
    seen: dict[int, float]  # ratio by SMs
    again: dict[int, float]  # and when they are measured again
    goal: Goal
    sms: int
    asked: list[int]


DOUBTS = [
    Doubt("it_holds", {16: 2.0, 32: 1.0}, {32: 1.01}, Goal(), 32, [32]),
    Doubt("luck", {8: 0.3, 16: 0.9, 32: 1.0}, {8: 3.0, 16: 0.91}, Goal(), 16, [8, 16]),
    Doubt("unlucky_twice", {16: 0.8, 32: 0.9}, {16: 0.95, 32: 0.99}, Goal(), 16, [16, 32]),
    Doubt(
        "the_fastest_was_lucky_and_set_the_bound",
        {16: 1.0, 32: 0.98, 48: 0.9},
        {16: 1.01, 32: 0.99, 48: 0.97},
        Goal(aim="fewest", within=1.05),
        16,
        [48, 16],
    ),
    Doubt(
        "at_most_4_rounds",
        {sms: sms / 100 for sms in range(1, 9)},
        {sms: 2.0 - sms / 10 for sms in range(1, 9)},
        Goal(),
        4,
        [1, 2, 3, 4],
    ),
]


@pytest.mark.parametrize("case", DOUBTS, ids=lambda case: case.name)
def test_what_looked_best_is_measured_again(case: Doubt) -> None:
    asked = []

    def measure(config: Config) -> Measurement:
        asked.append(config.num_sms_combine)
        return flat({asked[-1]: case.again[asked[-1]]})[0]

    confirmed = confirm(flat(case.seen), measure, case.goal)
    assert asked == case.asked
    assert confirmed == flat({case.sms: case.again[case.sms]})[0]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"aim": "best"}, "--aim must be one of fastest, fewest, got 'best'"),
        ({"max_sms": 0}, "--max-sms must be at least 1, got 0"),
        ({"within": 0.9}, "--within must be at least 1, got 0.9"),
        ({"within": float("nan")}, "--within must be at least 1, got nan"),
        ({"seconds": 0.0}, "--seconds must be positive, got 0.0"),
    ],
)
def test_bad_goal(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Goal(**change).check()


# ---- the search


def test_no_kernel_gets_fewer_SMs_than_it_needs():
    (spread, _) = lines.combine_lines(6)
    allowed = lines.at_least({"num_sms_dispatch": 2, "num_sms_combine": 3}, spread)
    assert [config.num_sms_combine for config in allowed(Config())] == [6, 5, 4, 3]
    assert not list(allowed(Config(num_sms_dispatch=1)))


def test_what_is_tried() -> None:
    assert lines.sms_grid(48) == [48, 42, 36, 30, 24, 18, 12, 6]
    assert lines.sms_grid(3) == [3, 2, 1]
    assert lines.sms_beside(48, 48) == [45]
    assert lines.sms_beside(1, 8) == [2]
    assert lines.slice_sizes(14336) == [16384, 7168, 3584]
    assert lines.slice_sizes(16384) == [16384, 8192, 4096]
    assert lines.slice_sizes(28672) == [16384, 7168, 3584], "two pieces of 14336 with the first"
    assert lines.slice_sizes(24) == [16384, 16]
    assert lines.slice_sizes(16) == [16384]
    assert lines.within_budget(Config(num_sms_combine=64), 16) == Config(
        num_sms_publish=16, num_sms_dispatch=16, num_sms_combine=16
    )


@dataclass
class Machine:
    """Takes ``us(config)`` for a call, and a second to measure it."""

    op: str
    us: Callable[[Config], float]
    seconds: int = 0

    def measure(self, config: Config) -> Measurement:
        self.seconds += 1
        return Measurement(self.op, config, (self.us(config),) * 3, (self.us(Config()),) * 3)

    def search(self, tried: list[lines.Line], goal: Goal) -> tuple[list[Measurement], bool]:
        start = lines.within_budget(Config(), goal.max_sms)
        return search(start, tried, self.measure, goal, lambda: self.seconds >= goal.seconds)


def dispatch_us(config: Config) -> float:
    """Publish is done by 12 SMs, the pull by 40; a row in halves is a little faster."""
    publish, pull = 600 / min(config.num_sms_publish, 12), 8000 / min(config.num_sms_dispatch, 40)
    halves = 5 if config.slice_bytes == 7168 else 0
    return publish + pull - halves + 0.1 * (config.num_sms_publish + config.num_sms_dispatch)


def test_search_of_dispatch_finds_each_coordinate() -> None:
    machine = Machine("dispatch", dispatch_us)
    found, complete = machine.search(lines.dispatch_lines(48, 14336), Goal())
    assert complete
    configs = [each.config for each in found]
    assert configs[0] == Config(), "the default comes first"
    assert len(configs) == len(set(configs)), "no setting twice"
    best = choose(found, Goal()).config
    assert best.slice_bytes == 7168
    assert best.num_sms_publish == 12
    assert 39 <= best.num_sms_dispatch <= 42
    assert best.num_sms_combine == Config.num_sms_combine, "not dispatch's to change"
    assert len(configs) < 60, "about as many as fit a minute"


@pytest.mark.parametrize(
    ("goal", "sms"),
    [
        (Goal(), 36),
        (Goal(aim="fewest", within=1.21), 30),
        (Goal(aim="fewest", within=2.0), 18),
        (Goal(max_sms=16), 16),
        (Goal(max_sms=1), 1),
    ],
    ids=str,
)
def test_search_of_combine(goal: Goal, sms: int) -> None:
    machine = Machine("combine", lambda config: 3600 / min(config.num_sms_combine, 36))
    found, complete = machine.search(lines.combine_lines(goal.max_sms), goal)
    assert complete
    assert choose(found, goal).sms == sms
    assert max(each.sms for each in found) <= goal.max_sms


def test_search_ends_between_the_points_of_the_grid() -> None:
    """Slower on both sides of 27, which lies half a step beside 24 and 30."""
    machine = Machine("combine", lambda config: 100 + abs(config.num_sms_combine - 27))
    found, _ = machine.search(lines.combine_lines(48), Goal())
    assert choose(found, Goal()).sms == 27


@pytest.mark.parametrize("seconds", [1, 2, 7])
def test_search_stops_in_time(seconds: int) -> None:
    machine = Machine("dispatch", dispatch_us)
    found, complete = machine.search(lines.dispatch_lines(48, 14336), Goal(seconds=seconds))
    assert len(found) == seconds, "the start, however late it is"
    assert not complete


# ---- the command


ASKED = "tune --tokens 8 --hidden 64 --experts 4 --topk 2 --out".split()


def test_command_without_a_gpu(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "on_ranks", lambda *args: pytest.fail("ranks were started"))
    assert main([*ASKED, str(tmp_path / "there" / "config.json")]) == 2
    told = capfd.readouterr().err
    assert told.startswith("hybrid-ep tune: there is no GPU here")
    assert "the torch backend, which runs here, has nothing to tune" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--aim fewest --within 0.5", "--within must be at least 1, got 0.5"),
        ("--topk 5", "--topk must be at most --experts 4, got 5"),
        ("--ranks 3", "by the number of ranks, got --experts 4 with 3 ranks"),
        ("--json /dev/null/report.json", "--json must name a file that can be written"),
        ("--out /", "--out must name a file that can be written, got /"),
    ],
)
def test_wrong_usage_is_said_before_ranks_start(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    more: str,
    says: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "on_ranks", lambda *args: pytest.fail("ranks were started"))
    monkeypatch.setattr(command, "ranks_here", lambda asked: asked or 2)
    assert main([*ASKED, str(tmp_path / "config.json"), *more.split()]) == 2
    assert says in capfd.readouterr().err


def test_command_writes_a_config_that_a_buffer_loads(
    alone: Rank,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With made-up measurements of two ranks in place of the GPUs'."""
    faster = replace(TUNED, timeout_s=60.0)

    def two_ranks(function: Any, num_ranks: int, load: bench.Load, goal: Goal) -> Any:
        assert function is tune.tune
        measured = tuple(
            Measurement(op, config, (us, us + 1, us + 2), (200.0, 201.0, 202.0))
            for op in tune.OPS
            for config, us in ((Config(), 200.0), (faster, 150.0))
        )
        tuned = tune.Tuned(faster, measured, measured[1::2], False, goal)
        return hybrid_ep.launch.Ran([tuned] * 2)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "on_ranks", two_ranks)
    monkeypatch.setattr(command, "describe_machine", lambda *args: {"device": "X", "num_gpus": 2})
    path, report = tmp_path / "new" / "config.json", tmp_path / "report.json"
    asked = [*ASKED, str(path), "--json", str(report), "--ranks", "2", "--seconds", "9"]
    assert main(asked) == 0
    printed = capfd.readouterr().out
    for text in (
        "measured: 2 ranks on 2 GPU(s), X; tokens 8, hidden 64, experts 4, topk 2, bf16",
        "did not end within 9 s",
        "dispatch  16       40    -        7168   151 [150..152]  0.751",
        "combine   -        -     48       -      151 [150..152]  0.751",
        "chosen, measured again: fastest",
        repr(faster),
        "dispatch: 151 us on 40 SMs, the default 201 us on 32: 0.751 of its time",
        "combine: 151 us on 48 SMs, the default 201 us on 32: 0.751 of its time",
        f"wrote {path}",
    ):
        assert text in printed
    assert "share GPUs" not in printed

    buffer = alone.buffer(**SIZES, config=path)
    assert buffer.config == faster
    buffer.destroy()
    kept = json.loads(path.read_text())["tuned_for"]
    assert (kept["device"], kept["tokens"], kept["aim"]) == ("X", 8, "fastest")
    written = json.loads(report.read_text())
    assert written["config"] == asdict(faster)
    assert len(written["measured"]) == 4
    assert written["confirmed"][0]["default_us_median"] == 201.0
