"""examples/lm, small, on the CPU: it learns, both ways agree, it resumes, gradients are whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples.lanes import CAN_FREE
from examples.lm import parallel, report
from examples.lm.options import OVERLAPS, PRESETS, Options, parse
from examples.lm.text import Windows, load_text
from examples.lm.train import steps_until_line
from tests.ranks import lm

ROOT = Path(__file__).resolve().parents[2]
SIZES = replace(PRESETS["small"], hidden=32, ffn_hidden=32, shared_hidden=32, sequence=32, batch=4)
SMALL = Options(sizes=SIZES, device="cpu", steps=6, lr=1e-2, warmup=2, log_every=2, profiled=1)


CAN_SHARD = pytest.mark.skipif(
    not parallel.CAN_SHARD, reason="fully_shard of this torch has no ignored_params"
)
each_dense = pytest.mark.parametrize("dense", [pytest.param("fsdp", marks=CAN_SHARD), "copies"])


def losses(world, num_ranks, options, **changes):
    options = replace(options, **changes)
    if options.folder is None:
        found = world(num_ranks).run(lm.losses, options)
    else:
        found = [each["losses"] for each in world(num_ranks).run(lm.run, options)]
    assert all(each == found[0] for each in found), "equal on all ranks"
    return found[0]


def test_it_learns_and_reports(world, tmp_path):
    result, *_ = world(2).run(lm.run, replace(SMALL, json=tmp_path / "result.json"))
    assert len(result["losses"]) == len(result["grad_norms"]) == SMALL.steps
    assert result["losses"][0] == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)
    assert result["losses"][-1] < result["losses"][0] - 0.1
    assert len(result["tokens_per_second"]) == 3 and min(result["load"]) >= 1
    assert 0 < result["communication_share"] < 1 and result["dropped"] == 0
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["losses"] == result["losses"] and written["options"]["sizes"]["experts"] == 8
    assert written["held_out"] < written["losses"][0]


# ---- equal losses of both ways of moving tokens, and with any overlap


def test_both_ways_have_the_same_losses(world):
    ours, theirs = (losses(world, 2, SMALL, way=way, steps=2) for way in ("hybrid_ep", "nccl"))
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("way", ["hybrid_ep", "nccl"])
def test_overlap_recomputation_and_a_bound_that_drops_nothing_change_no_loss(world, way):
    options = replace(SMALL, steps=2, way=way)
    wanted = losses(world, 2, options, overlap="none", recompute=False)
    for overlap in OVERLAPS:
        cases = [{"recompute": True}]
        if way == "hybrid_ep":
            cases = [{"recompute": True, "room": 8.0}, {"recompute": overlap == "none"}]
        for case in cases:
            found = losses(world, 2, options, overlap=overlap, **case)
            if overlap == "halves":  # gradients of the halves are rounded before they are added
                assert found == pytest.approx(wanted, rel=1e-3)
            else:
                assert found == wanted, (overlap, case)


@CAN_SHARD
def test_fsdp_and_copies_have_the_same_losses(world):
    sharded, copied = (
        losses(world, 2, SMALL, dense=dense, steps=2) for dense in ("fsdp", "copies")
    )
    assert sharded == pytest.approx(copied, rel=1e-4)


@pytest.mark.skipif(not CAN_FREE, reason="this torch has no such setting")
def test_sms_left_free_change_no_loss(world):
    options = replace(SMALL, steps=1, overlap="halves")
    assert losses(world, 2, options, leave_free=8) == losses(world, 2, options)


def test_rows_beyond_the_bound_are_reported(world):
    result, *_ = world(2).run(lm.run, replace(SMALL, steps=2, room=0.9))
    assert result["dropped"] > 0


def test_plain_torch_has_a_communicator_of_its_own(world):
    assert world(2).run(lm.has_a_group_of_its_own, replace(SMALL, way="nccl")) == [True] * 2


# ---- which call is made when


FROM_OUTPUT = ["_ArrivedBackward", "AddBackward0"]  # on the caller's stream, behind nothing
FROM_COMBINED = ["_ArrivedBackward", "_CombineBackward"]  # where combine arrives, likewise


@pytest.mark.parametrize(
    ("overlap", "room", "forward", "backward", "begins"),
    [
        ("shared", None, "M S D E C", "C' M S D E E' D' S' M'", FROM_OUTPUT),
        ("shared", 8.0, "M D S E C", "C' M D S E E' S' D' M'", FROM_OUTPUT),
        (
            "halves",
            None,
            "M M D E D C E C S S",
            "M M D E D C E C S S S' S' C' E' C' D' E' D' M' M'",
            FROM_COMBINED,
        ),
        (
            "halves",
            8.0,
            "M D M D E C E C S S",
            "M D M D E C E C S S S' S' C' E' C' E' D' M' D' M'",
            FROM_COMBINED,
        ),
    ],
)
def test_the_order_of_calls_of_a_layer(world, overlap, room, forward, backward, begins):
    """As docs/overlap.md has it, and the node of the backward that begins to recompute."""
    options = replace(SMALL, sizes=replace(SIZES, layers=1), overlap=overlap, room=room)
    for made, nodes in world(2).run(lm.order_of_calls, options):
        assert " ".join(made) == f"{forward} {backward}"
        assert nodes == begins


@pytest.mark.skipif(not CAN_FREE, reason="this torch has no such setting")
@pytest.mark.parametrize("overlap", ["shared", "halves"])
def test_a_step_that_raises_leaves_no_setting(world, overlap):
    options = replace(SMALL, overlap=overlap, leave_free=8)
    for seen in world(2).run(lm.settings_after_a_step_that_raises, options):
        assert seen == [None, 8, None]


# ---- save and resume


# two steps are made after a resume: the loss of the second shows the moments that were loaded
SAVED = replace(SMALL, sizes=replace(SIZES, layers=1), steps=4, save_every=2)


@each_dense
def test_resumed_on_the_same_number_of_ranks_the_losses_are_the_same_bits(world, tmp_path, dense):
    options = replace(SAVED, folder=tmp_path, dense=dense)
    whole = losses(world, 2, options)
    (tmp_path / "4" / ".metadata").unlink()  # as if it had been interrupted there
    assert len(whole) == 4 and losses(world, 2, options) == whole[2:]
    assert losses(world, 2, options) == [], "nothing is left to do"


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_resumed_on_another_number_of_ranks_the_losses_are_close(world, tmp_path, before, after):
    options = replace(SAVED, folder=tmp_path, overlap="none", aux=0.0)
    options = replace(options, sizes=replace(SAVED.sizes, micro_batch=1))
    whole = losses(world, before, options)
    (tmp_path / "4" / ".metadata").unlink()
    assert losses(world, after, options) == pytest.approx(whole[2:], rel=1e-3)


@CAN_SHARD
@pytest.mark.parametrize(("before", "after"), [("fsdp", "copies"), ("copies", "fsdp")])
def test_resumed_with_another_dense_part_the_losses_are_close(world, tmp_path, before, after):
    options = replace(SAVED, folder=tmp_path)
    whole = losses(world, 2, options, dense=before)
    (tmp_path / "4" / ".metadata").unlink()
    assert losses(world, 2, options, dense=after) == pytest.approx(whole[2:], rel=1e-4)


def test_a_resumed_run_has_the_settings_of_its_own_command(world, tmp_path):
    options = replace(SAVED, steps=1, folder=tmp_path)
    losses(world, 2, options)
    changed = replace(options, lr=0.5, weight_decay=0.25)
    for groups in world(2).run(lm.settings_of_groups, changed):
        assert {group["lr"] for group in groups} == {0.5}
        assert {group["weight_decay"] for group in groups} == {0.0, 0.25}


# ---- gradients


@each_dense
def test_the_norm_is_that_of_one_process_with_all_experts(world, dense):
    options = replace(SMALL, dense=dense, aux=0.0)
    (alone,) = world(1).run(
        lm.gradients, replace(options, sizes=replace(SIZES, micro_batch=4)), 0.1
    )
    ranks = world(2).run(lm.gradients, options, 0.1)
    for kind in ("unclipped", "clipped"):
        experts, shared = alone[kind]
        for name, grad in shared.items():
            for each in ranks:
                torch.testing.assert_close(each[kind][1][name], grad, rtol=1e-3, atol=1e-5)
        for name, grad in experts.items():
            found = torch.cat([each[kind][0][name] for each in ranks])
            torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-5)
        everything = torch.cat([g.flatten() for part in (experts, shared) for g in part.values()])
        wanted = everything.double().norm() if kind == "unclipped" else torch.tensor(0.1)
        assert everything.norm() == pytest.approx(float(wanted), rel=1e-4)
    for each in (alone, *ranks):
        wanted = torch.cat([g.flatten() for part in alone["unclipped"] for g in part.values()])
        assert each["norm"].item() == pytest.approx(wanted.double().norm().item(), rel=1e-4)


def test_two_micro_batches_are_one_of_twice_the_size(world):
    options = replace(SMALL, aux=0.0, steps=2)
    found = [
        world(2).run(lm.run, replace(options, sizes=replace(SIZES, micro_batch=micro, batch=8)))[0]
        for micro in (2, 4)
    ]
    for name in ("losses", "grad_norms"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-3)


def test_masters_are_float32(world):
    assert world(2).run(lm.dtypes_of_what_is_held, SMALL) == [{torch.float32}] * 2


def test_dispatch_and_combine_are_timed_forward_again_and_backward(world):
    for seconds, spans in world(2).run(lm.shares_of_time, SMALL):
        # of each layer: two calls, their backward, and the dispatch that is recomputed
        assert seconds > 0 and spans == 5 * SIZES.layers


# ---- text and options


def test_each_pass_has_every_window_once():
    windows = Windows(torch.arange(101, dtype=torch.uint8), 10, seed=3)
    assert windows.count == 10
    first, second = windows.take(0, 10), windows.take(10, 10)
    assert first.shape == (10, 11) and not torch.equal(first, second)
    for taken in (first, second):
        assert sorted(taken[:, 0].tolist()) == list(range(0, 100, 10))
        assert (taken.diff(dim=1) == 1).all()
    assert torch.equal(windows.take(7, 6), torch.cat([first[7:], second[:3]]))
    with pytest.raises(ValueError, match="below the text's 101 bytes, got 101"):
        Windows(windows.text, 101, seed=0)


def test_held_out_text_is_text_of_its_own():
    learnt, held_out = load_text()
    assert len(learnt) > 10 * len(held_out) > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--batch 3", "--batch must be a multiple of 2 ranks x --micro-batch 2, got 3"),
        ("--heads 5", "--hidden must be a multiple of twice --heads"),
        ("--overlap halves --micro-batch 1", "must be even with --overlap halves, got 1"),
        ("--way nccl --room 1.5", "--room must be positive and of --way hybrid_ep, got 1.5"),
        ("--leave-free -1", "--leave-free must be at least 0, .*, got -1"),
        ("--leave-free 8 --overlap none", "0 with --overlap none, got 8"),
        ("--way nccl --num-sms 16", "--num-sms must be left out with --way nccl, .*, got 16"),
        ("--way nccl --backend nvlink", "--backend must be left out with --way nccl, .* nvlink"),
        ("--layers 0", "--layers must be at least 1, got 0"),
        ("--steps 0", "--steps must be at least 1, got 0"),
    ],
)
def test_options_that_break_a_rule(arguments, text):
    with pytest.raises(ValueError, match=text):
        parse(["--preset", "small", *arguments.split()]).check(2)


def test_products_cannot_leave_all_SMs_free():
    options = parse(["--leave-free", "131"])
    options.check_device(132)
    with pytest.raises(ValueError, match=r"--leave-free must be below the 131 SMs .*, got 131"):
        options.check_device(131)


@pytest.mark.parametrize(
    ("log_every", "done", "wanted"),
    [(10, 0, 10), (10, 13, 7), (10, 20, 10), (10, 33, 2), (0, 0, 35), (0, 13, 22), (50, 30, 5)],
)
def test_the_first_line_after_a_resume_ends_a_shorter_stretch(log_every, done, wanted):
    assert steps_until_line(replace(SMALL, steps=35, log_every=log_every), done) == wanted


def test_no_memory_of_a_GPU_is_printed_for_the_CPU(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = report.Result({}, {}, losses=[5.0], grad_norms=[1.0])
    result.tokens_per_second, result.load = [100.0], [1.25]
    trainer = SimpleNamespace(progress={"step": 7}, device=torch.device("cpu"))
    assert report.line(trainer, result, False) == (
        "step     7  loss 5.0000  norm 1.000  100 tokens/s  load 1.25"
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_keep_the_rules(preset):
    parse(["--preset", preset, "--overlap", "halves"]).check(2)


def test_the_command(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "1", "-m", "examples.lm", "--preset", "small", "--batch", "2"]
    command += ["--steps", "2", "--device", "cpu", "--dense", "copies"]
    command += ["--json", str(tmp_path / "result.json")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    first, line, last = done.stdout.splitlines()
    assert "M parameters on 1 rank(s), hybrid_ep on torch" in first
    assert "step     2  loss 5." in line and "bits per byte" in last
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["machine"]["ranks"] == 1 and result["median_tokens_per_second"] > 0
    assert result["command"].startswith("torchrun --nproc-per-node 1 -m examples.lm --preset small")
