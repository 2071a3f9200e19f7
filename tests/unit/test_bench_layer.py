"""The bench of a layer: plain torch is the layer, and what is told. No times are judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.bench.baselines import PlainTorch
from hybrid_ep.bench.layer import SHAPES, LayerOptions, LayerShape, measure_layers
from hybrid_ep.bench.layer.chart import bars
from hybrid_ep.bench.layer.plain import PlainLayer
from hybrid_ep.bench.layer.table import print_layers
from hybrid_ep.bench.layer.ways import Parts
from hybrid_ep.moe import WEIGHT_PLACES, MoELayer
from hybrid_ep_cli.main import main
from tests.launch import Pool, Rank

TINY = LayerShape("custom", 24, 32, 40, 8, 3, "fp32")
RECORD = {
    "shape": str,
    "tokens": int,
    "hidden": int,
    "ffn_hidden": int,
    "experts": int,
    "topk": int,
    "dtype": str,
    "ranks": int,
    "weight_at": str,
    "way": str,
    "pass": str,
    "sizing": str,
    "us_median": float,
    "us_min": float,
    "us_max": float,
    "us_fastest_rank": float,
    "tflops": float,
    "rows": int,
}
OPTIONAL = {"max_rows": int, "sms": int, "communication_share": float, "peak_bytes": int}


def both_layers(me: Rank, shape: LayerShape, weight_at: str) -> list[dict[str, Tensor]]:
    """Result and gradients of the library's layer and of plain torch's."""
    parts = Parts(shape, me.num_ranks, me.rank, me.device)
    buffer = me.buffer(
        hidden=shape.hidden,
        num_experts=shape.experts,
        max_tokens=shape.tokens,
        topk=shape.topk,
        dtype=parts.dtype,
    )
    layer = MoELayer(buffer, shape.ffn_hidden, weight_at=weight_at, device="meta")
    layer.router, layer.experts = parts.router, parts.experts
    plain = PlainTorch(shape.experts, dist.group.WORLD)
    results = []
    for forward in (
        lambda x: layer(x).y,
        PlainLayer(parts.router, parts.experts, plain, weight_at),
    ):
        parts.clear()
        y = forward(parts.tokens[0])
        y.backward(parts.grads[0])
        found = {"y": y.detach(), "x": parts.tokens[0].grad, "router": parts.router.weight.grad}
        found |= {name: weight.grad for name, weight in parts.experts.named_parameters()}
        results.append({name: tensor.clone() for name, tensor in found.items()})
    buffer.destroy()
    return results


@pytest.mark.parametrize("weight_at", WEIGHT_PLACES)
@pytest.mark.parametrize(
    ("num_ranks", "shape"),
    [
        pytest.param(2, TINY, id="2_ranks"),
        pytest.param(4, LayerShape("custom", 33, 16, 24, 16, 5, "fp32"), id="4_ranks"),
        pytest.param(3, LayerShape("custom", 1, 16, 8, 9, 1, "fp32"), id="rank_without_rows"),
    ],
)
def test_plain_torch_is_the_layer(
    world: Callable[[int], Pool], num_ranks: int, shape: LayerShape, weight_at: str
) -> None:
    for wanted, found in world(num_ranks).run(both_layers, shape, weight_at):
        assert wanted["y"].abs().max() > 0
        for name, tensor in wanted.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def measure(me: Rank, options: LayerOptions) -> dict[str, Any]:
    return measure_layers(me.device, options)


@pytest.mark.parametrize("backward", [True, False])
def test_every_pass_of_every_way_is_timed(world: Callable[[int], Pool], backward: bool) -> None:
    options = LayerOptions(
        shapes=(TINY,), backends=("torch",), sms=(16, 32), backward=backward, iters=2, warmup=1
    )
    options.check(2)
    first, second = world(2).run(measure, options)
    assert first == second, "told alike on all ranks"
    records = first["layers"]
    passes = ("forward", "backward", "step") if backward else ("forward",)
    ways = [("torch", "exact"), ("torch", "max_rows"), ("gloo", "exact"), ("experts", "exact")]
    wanted = [(*way, each) for way in ways for each in passes]
    wanted += [("products", "exact", each) for each in passes[:2]]
    assert [(r["way"], r["sizing"], r["pass"]) for r in records] == wanted
    alone = {r["pass"]: r["us_median"] for r in records if r["way"] == "experts"}
    for record in records:
        assert record.keys() == {**RECORD, **OPTIONAL}.keys()
        for key, kind in RECORD.items():
            assert isinstance(record[key], kind), (key, record[key])
        for key, kind in OPTIONAL.items():
            assert record[key] is None or isinstance(record[key], kind), (key, record[key])
        assert (record["max_rows"] is not None) == (record["sizing"] == "max_rows")
        if record["way"] in ("torch", "gloo"):
            share = 1 - alone[record["pass"]] / record["us_median"]
            assert record["communication_share"] == pytest.approx(share)
    assert {record["rows"] <= 2 * 24 * 3 for record in records} == {True}
    bound = next(r["max_rows"] for r in records if r["max_rows"] is not None)
    assert bound % 128 == 0 and bound >= records[0]["rows"]


def test_work_is_that_of_the_products() -> None:
    """By hand: 24 tokens to 3 experts each are 72 rows, each 32 x 40 in three matrices."""
    forward = 72 * 32 * 40 * 2 * 3
    assert [TINY.flops(each) for each in ("forward", "backward", "step")] == [
        forward,
        2 * forward,
        3 * forward,
    ]


@pytest.mark.parametrize(
    ("name", "num_ranks", "experts", "topk"),
    [
        ("deepseek-v3", 2, 64, 8),
        ("qwen3-235b", 8, 128, 8),
        ("qwen3-30b", 1, 16, 8),
        ("mixtral", 2, 2, 2),
        ("mixtral", 1, 1, 1),
    ],
)
def test_a_named_shape_has_the_experts_of_a_rank_of_8(
    name: str, num_ranks: int, experts: int, topk: int
) -> None:
    shape = SHAPES[name].on(name, num_ranks, 4096, "bf16")
    assert (shape.experts, shape.topk, shape.tokens) == (experts, topk, 4096)
    LayerOptions(shapes=(shape,)).check(num_ranks)


@pytest.mark.parametrize(
    ("sizes", "options", "rule"),
    [
        ({"ffn_hidden": 0}, {}, "--ffn must be at least 1, got 0"),
        ({"topk": 9}, {}, "topk must be at most num_experts=8, got 9"),
        ({"hidden": 3}, {}, "rows must be a multiple of 16 bytes, got 12"),
        ({}, {"weight_at": "router"}, "--weight-at must be one of combine, activation, got"),
        ({}, {"sms": (0,)}, "--sms must be at least 1, got 0"),
        ({}, {"iters": 0}, "--iters must be at least 1, got 0"),
    ],
    ids=["ffn", "topk", "hidden", "weight_at", "sms", "iters"],
)
def test_mistakes(sizes: dict[str, Any], options: dict[str, Any], rule: str) -> None:
    shape = LayerShape(**{**vars(TINY), **sizes})
    with pytest.raises(ValueError, match=rule):
        LayerOptions(shapes=(shape,), **options).check(2)


def test_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="a plot is drawn by matplotlib, which is optional")
    path, chart = tmp_path / "layer.json", tmp_path / "charts" / "layer.png"
    sizes = "--tokens 8 16 --hidden 32 --ffn 16 --experts 4 --topk 2 --iters 1 --warmup 0"
    asked = ["bench", "--layer", "--ranks", "2", "--backend", "torch", "--device", "cpu"]
    asked += [*sizes.split(), "--weight-at", "activation", "--sizing", "exact"]
    assert main([*asked, "--json", str(path), "--plot", str(chart)]) == 0
    report = json.loads(path.read_text())
    assert list(report) == ["device", "num_gpus", "commit", "command", "layers"]
    assert {record["tokens"] for record in report["layers"]} == {8, 16}
    printed = capfd.readouterr().out
    for text in (
        "hybrid_ep torch",
        "plain torch gloo",
        "experts alone",
        "16 tokens per rank, hidden 32, ffn 16",
    ):
        assert text in printed
    assert "experts enter at the activation" in printed
    assert chart.read_bytes().startswith(b"\x89PNG")

    again = tmp_path / "again.json"
    assert main(["bench", "--read", str(path), "--json", str(again)]) == 0
    assert again.read_text() == path.read_text()


def record(**values: Any) -> dict[str, Any]:
    return {
        **dict.fromkeys(RECORD, 98765),
        **{"shape": "deepseek-v3", "dtype": "bf16", "weight_at": "activation", "way": "nvshmem"},
        **{"ranks": 8, "tokens": 32768, "hidden": 7168, "ffn_hidden": 2048},
        **{"experts": 256, "topk": 8},
        **{"pass": "backward", "sizing": "max_rows", "max_rows": 36864, "sms": 48},
        **{"communication_share": 0.175, "tflops": 587.34, "peak_bytes": 3_456_000_000},
        **values,
    }


def test_the_table_fits_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    records = [record(), record(way="nccl", sms=None, sizing="exact", max_rows=None)]
    report = {"device": "NVIDIA H200", "num_gpus": 2, "commit": "abc", "layers": records}
    print_layers(report, ["nvshmem: no network"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "hybrid_ep nvshmem" in lines[3] and "18%" in lines[3] and "3456" in lines[3]
    assert "plain torch NCCL" in lines[4]
    assert lines[-2] == "The weights of a token's experts enter at the activation."
    assert lines[-1] == "skipped: nvshmem: no network"


def test_ways_that_differ_are_bars_of_their_own() -> None:
    records = [
        record(us_median=9.0),
        record(us_median=4.0, **{"pass": "forward"}),
        record(us_median=8.0, sms=24),
        record(us_median=7.0, way="experts", sms=None, sizing="exact"),
    ]
    assert bars(records) == {
        "hybrid_ep nvshmem, max_rows, 48 SMs": {"backward": 9.0, "forward": 4.0},
        "hybrid_ep nvshmem, max_rows, 24 SMs": {"backward": 8.0},
        "experts alone": {"backward": 7.0},
    }
