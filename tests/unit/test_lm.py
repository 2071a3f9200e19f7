"""examples/lm, small, on the CPU: it learns, both ways agree, it resumes, gradients are whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.lanes import CAN_FREE
from examples.lm import parallel
from examples.lm.options import OVERLAPS, PRESETS, Options, parse
from examples.lm.text import Windows, load_text
from tests.ranks import lm

ROOT = Path(__file__).resolve().parents[2]
SIZES = replace(PRESETS["small"], hidden=32, ffn_hidden=32, shared_hidden=32, sequence=32, batch=8)
SMALL = Options(sizes=SIZES, device="cpu", steps=6, lr=1e-2, warmup=2, log_every=2, profiled=1)


CAN_SHARD = pytest.mark.skipif(
    not parallel.CAN_SHARD, reason="fully_shard of this torch has no ignored_params"
)
each_dense = pytest.mark.parametrize("dense", [pytest.param("fsdp", marks=CAN_SHARD), "copies"])


def losses(world, num_ranks, options, **changes):
    found = world(num_ranks).run(lm.run, replace(options, **changes))
    assert all(each["losses"] == found[0]["losses"] for each in found), "equal on all ranks"
    return found[0]["losses"]


def test_it_learns_and_tells(world, tmp_path):
    told, *_ = world(2).run(lm.run, replace(SMALL, json=tmp_path / "told.json"))
    assert len(told["losses"]) == len(told["grad_norms"]) == SMALL.steps
    assert told["losses"][0] == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)
    assert told["losses"][-1] < told["losses"][0] - 0.3
    assert len(told["tokens_per_second"]) == 3 and min(told["load"]) >= 1
    assert 0 < told["communication_share"] < 1 and told["dropped"] == 0
    written = json.loads((tmp_path / "told.json").read_text())
    assert written["losses"] == told["losses"] and written["options"]["sizes"]["experts"] == 8
    assert written["held_out"] < written["losses"][0]


# ---- equal whoever moves the tokens, and whatever runs beside what


def test_both_ways_have_the_same_losses(world):
    ours, theirs = (losses(world, 2, SMALL, way=way, steps=3) for way in ("hybrid_ep", "nccl"))
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("way", ["hybrid_ep", "nccl"])
def test_overlap_and_recomputation_change_no_loss(world, way):
    options = replace(SMALL, steps=2, way=way)
    wanted = losses(world, 2, options, overlap="none", recompute=False)
    for overlap in OVERLAPS:
        for recompute in (False, True) if way == "hybrid_ep" else (True,):
            found = losses(world, 2, options, overlap=overlap, recompute=recompute)
            if overlap == "halves":  # gradients of the halves are rounded before they are added
                assert found == pytest.approx(wanted, rel=1e-3)
            else:
                assert found == wanted, (overlap, recompute)


@CAN_SHARD
def test_fsdp_and_copies_have_the_same_losses(world):
    sharded, copied = (
        losses(world, 2, SMALL, dense=dense, steps=3) for dense in ("fsdp", "copies")
    )
    assert sharded == pytest.approx(copied, rel=1e-4)


@pytest.mark.skipif(not CAN_FREE, reason="this torch has no such setting")
def test_sms_left_free_change_no_loss(world):
    options = replace(SMALL, steps=1, overlap="halves")
    assert losses(world, 2, options, leave_free=8) == losses(world, 2, options)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_bound_that_drops_nothing_changes_no_loss(world, overlap):
    options = replace(SMALL, steps=1, overlap=overlap)
    assert losses(world, 2, options, room=8.0) == losses(world, 2, options)


def test_rows_beyond_the_bound_are_told(world):
    told, *_ = world(2).run(lm.run, replace(SMALL, steps=2, room=0.9))
    assert told["dropped"] > 0


# ---- save and resume


@each_dense
def test_resumed_on_the_same_number_of_ranks_the_losses_are_the_same_bits(world, tmp_path, dense):
    options = replace(SMALL, steps=5, folder=tmp_path, save_every=3, dense=dense)
    whole = losses(world, 2, options)
    (tmp_path / "5" / ".metadata").unlink()  # as if it had been interrupted there
    assert len(whole) == 5 and losses(world, 2, options) == whole[3:]
    assert losses(world, 2, options) == [], "nothing is left to do"


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_resumed_on_another_number_of_ranks_the_losses_are_close(world, tmp_path, before, after):
    options = replace(SMALL, steps=5, folder=tmp_path, save_every=3)
    options = replace(options, sizes=replace(SIZES, micro_batch=1), overlap="none", aux=0.0)
    whole = losses(world, before, options)
    (tmp_path / "5" / ".metadata").unlink()
    assert losses(world, after, options) == pytest.approx(whole[3:], rel=1e-3)


# ---- gradients


@each_dense
def test_the_norm_is_that_of_one_process_with_all_experts(world, dense):
    sizes = replace(SIZES, micro_batch=2, batch=4)
    options = replace(SMALL, sizes=sizes, dense=dense, aux=0.0)
    (alone,) = world(1).run(
        lm.gradients, replace(options, sizes=replace(sizes, micro_batch=4)), 0.1
    )
    ranks = world(2).run(lm.gradients, options, 0.1)
    for kind in ("unclipped", "clipped"):
        experts, shared = alone[kind]
        for name, grad in shared.items():
            for told in ranks:
                torch.testing.assert_close(told[kind][1][name], grad, rtol=1e-3, atol=1e-5)
        for name, grad in experts.items():
            found = torch.cat([told[kind][0][name] for told in ranks])
            torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-5)
        everything = torch.cat([g.flatten() for part in (experts, shared) for g in part.values()])
        wanted = everything.double().norm() if kind == "unclipped" else torch.tensor(0.1)
        assert everything.norm() == pytest.approx(float(wanted), rel=1e-4)
    for told in (alone, *ranks):
        wanted = torch.cat([g.flatten() for part in alone["unclipped"] for g in part.values()])
        assert told["norm"].item() == pytest.approx(wanted.double().norm().item(), rel=1e-4)


def test_two_micro_batches_are_one_of_twice_the_size(world):
    found = [
        world(2).run(
            lm.run, replace(SMALL, sizes=replace(SIZES, micro_batch=micro), aux=0.0, steps=3)
        )[0]
        for micro in (2, 4)
    ]
    for name in ("losses", "grad_norms"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-3)


def test_masters_are_float32(world):
    assert world(2).run(lm.dtypes_of_what_is_held, SMALL) == [{torch.float32}] * 2


def test_dispatch_and_combine_are_timed_forward_again_and_backward(world):
    options = replace(SMALL, sizes=replace(SIZES, batch=4))
    for seconds, spans in world(2).run(lm.shares_of_time, options):
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
        ("--layers 0", "--layers must be at least 1, got 0"),
        ("--steps 0", "--steps must be at least 1, got 0"),
    ],
)
def test_options_that_break_a_rule(arguments, text):
    with pytest.raises(ValueError, match=text):
        parse(["--preset", "small", *arguments.split()]).check(2)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_keep_the_rules(preset):
    parse(["--preset", preset, "--overlap", "halves"]).check(2)


def test_the_command(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "examples.lm", "--preset", "small"]
    command += ["--steps", "2", "--device", "cpu", "--json", str(tmp_path / "told.json")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    first, line, last = done.stdout.splitlines()
    assert "M parameters on 2 rank(s), hybrid_ep on torch" in first
    assert "step     2  loss 5." in line and "bits per byte" in last
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["machine"]["ranks"] == 2 and told["median_tokens_per_second"] > 0
    assert told["command"].startswith("torchrun --nproc-per-node 2 -m examples.lm --preset small")
