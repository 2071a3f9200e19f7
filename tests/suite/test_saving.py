"""Checkpoints of models with experts: by expert, so that any number of ranks may load them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from tests import targets
from tests.ranks import saving

pytestmark = pytest.mark.not_on(
    "torch_gpu", "nodes", why="a state dict depends on the device alone: nvlink has GPUs"
)
NUM_EXPERTS = saving.NUM_EXPERTS
SAME_ON_GPU = pytest.mark.not_on("nvlink", why=targets.SAME_PYTHON)
EIGHT = pytest.param(8, marks=pytest.mark.not_on("nvlink", why="eight ranks take turns on a GPU"))
ON_CPU = (
    pytest.mark.only_on("torch_cpu", why="the ranks' group is gloo, and FSDP on GPUs needs NCCL"),
    pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP2 of torch 2.6 runs on GPUs alone"),
)


def all_experts(by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The ranks' parts side by side; what has no experts in it is equal on all."""
    return {
        name: torch.cat([held[name] for held in by_rank]) if first.dim() else first
        for name, first in by_rank[0].items()
    }


def same_experts(found: list[dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> None:
    got, want = all_experts(found), all_experts(wanted)
    assert got.keys() == want.keys() and len(want) >= 3
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("num_ranks", [1, 2, 4, EIGHT])
def test_weights_and_moments_of_4_ranks_are_loaded_on_other_numbers(world, tmp_path, num_ranks):
    saved = world(4).run(saving.save, tmp_path)
    assert all_experts(saved)["exp_avg of moe.experts.w1"].shape[0] == NUM_EXPERTS
    same_experts(world(num_ranks).run(saving.load, tmp_path), saved)


@SAME_ON_GPU
def test_a_checkpoint_of_one_rank_is_loaded_on_two(world, tmp_path):
    saved = world(1).run(saving.save, tmp_path)
    same_experts(world(2).run(saving.load, tmp_path), saved)


@pytest.mark.parametrize("num_groups", [1, 2], ids=["one_group", "two_groups_alike"])
def test_the_state_dict_of_a_model_needs_no_more(world, tmp_path, num_groups):
    saved = world(4).run(saving.save_state_dict, tmp_path, num_groups)
    same_experts(world(2).run(saving.load_state_dict, tmp_path), saved[::num_groups])


@SAME_ON_GPU
def test_another_number_of_experts_is_an_error(world, tmp_path):
    world(2).run(saving.save_state_dict, tmp_path)
    for text in world(2).run(saving.error_of_other_experts, tmp_path, 2 * NUM_EXPERTS):
        assert "Size mismatch between saved" in text


def test_torch_save_per_rank_is_loaded_before_and_after_a_step(world, tmp_path):
    saved = world(2).run(saving.save_plain, tmp_path)
    same_experts(world(2).run(saving.load_plain, tmp_path), saved)


@SAME_ON_GPU
def test_torch_save_of_another_rank_is_an_error(world, tmp_path):
    world(2).run(saving.save_plain, tmp_path)
    own, other = world(2).run(saving.load_the_file_of_rank_0, tmp_path)
    assert own == ""
    assert "must hold the experts of rank 1, got those of rank 0: each rank loads" in other


@SAME_ON_GPU
def test_torch_save_of_another_number_of_ranks_is_an_error(world, tmp_path):
    world(4).run(saving.save_plain, tmp_path)
    for text in world(2).run(saving.error_of_plain, tmp_path):
        assert "must hold 4 of 8 experts, got 2 of 8: torch.distributed.checkpoint" in text


@SAME_ON_GPU
@pytest.mark.parametrize("of_all", [False, True], ids=["of_this_rank", "of_all"])
def test_plain_tensors_of_the_experts_are_loaded(world, of_all):
    for wanted, found in world(2).run(saving.load_tensors, of_all):
        same_experts([found], [wanted])


@pytest.mark.only_on("torch_cpu", why="torch gathers them on CPUs here, as the group is gloo")
def test_full_state_dicts_are_made_and_loaded(world):
    for wanted, found in world(2).run(saving.load_full):
        same_experts([found], [wanted])


@pytest.mark.gpus(2)
@pytest.mark.only_on("nvlink", why="NCCL takes one GPU per rank")
def test_full_state_dicts_are_gathered_over_NCCL(world):
    for wanted, found in world(2).run(saving.load_full, "nccl"):
        same_experts([found], [wanted])


@SAME_ON_GPU
def test_a_deep_copy_is_saved_by_expert(world):
    for wanted, found in world(2).run(saving.copies):
        same_experts([found], [wanted])


@pytest.mark.parametrize("by", ["DDP", pytest.param("FSDP", marks=ON_CPU)])
def test_the_dense_part_is_averaged_by_torch_and_the_experts_are_not(world, tmp_path, by):
    for losses in world(2).run(saving.train_wrapped, by, tmp_path):
        torch.testing.assert_close(losses["wrapped"], losses["plain"], rtol=1e-4, atol=0)
        assert losses["resumed"] == losses["wrapped"][2:]


@SAME_ON_GPU
@pytest.mark.parametrize(
    ("what", "text"),
    [
        pytest.param("experts_in_FSDP", "exclude hybrid_ep.moe.expert", marks=ON_CPU),
        ("moments_of_another_form", r"row of an expert's weight is saved as if .* shape \[9\]"),
        ("no_experts_in_dimension_0", r"dimension 0 of weight must be the 4 experts .* \[3, 3\]"),
        ("twice", "w1 went through save_by_expert before"),
    ],
    ids=["experts_in_FSDP", "moments_of_another_form", "no_experts_in_dimension_0", "twice"],
)
def test_what_cannot_be_saved_by_expert_is_refused_or_told(world, what, text):
    for told in world(2).run(saving.refusal, what):
        assert re.search(text, told), told


def test_an_optimizer_whose_step_is_compiled(world):
    assert world(2).run(saving.compiled_step) == [[NUM_EXPERTS] * 3] * 2


# ---- the recipe of the documents


def test_resumed_on_the_same_number_of_ranks_the_losses_are_the_same_bits(world, tmp_path):
    whole = world(4).run(saving.resume, tmp_path, 6, 3)
    assert whole[0][0] > whole[0][-1]
    (tmp_path / "6" / ".metadata").unlink()  # as if it had been interrupted there
    assert world(4).run(saving.resume, tmp_path, 6, 3) == [losses[3:] for losses in whole]


@pytest.mark.parametrize("num_ranks", [1, 2, EIGHT])
def test_resumed_on_another_number_of_ranks_the_losses_are_close(world, tmp_path, num_ranks):
    whole, *_ = world(4).run(saving.resume, tmp_path, 6, 3)
    (tmp_path / "6" / ".metadata").unlink()
    for losses in world(num_ranks).run(saving.resume, tmp_path, 6, 3):
        torch.testing.assert_close(losses, whole[3:], rtol=1e-4, atol=0)
