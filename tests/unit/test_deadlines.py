"""Deadlines are ordered: a rank that waits in vain names its peer before a run is ended."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep import Config, check
from hybrid_ep.launch import COMMAND_TIMEOUT_S, GROUP_TIMEOUT_S, RanksFailed, run_ranks
from tests.conftest import TEST_DEADLINE_S
from tests.launch import DEADLINE_S, PATIENCE

NCCL_TIMEOUT_S = 600.0  # torch's default for NCCL, after which its watchdog ends the process


def longest_call_s(timeout_s: float) -> float:
    """Seconds until the last error of a call: csrc/call_state.cpp, await_offsets."""
    return 2 * timeout_s + 10


def test_the_default_survives_a_rank_that_compiles_or_saves_a_checkpoint() -> None:
    assert Config().timeout_s >= 300


def test_a_PeerError_comes_before_the_timeouts_of_groups() -> None:
    across_nodes = 1.5 * Config().timeout_s  # of waits for what a peer gets from others
    assert across_nodes < NCCL_TIMEOUT_S
    assert longest_call_s(Config().timeout_s) < GROUP_TIMEOUT_S
    default = inspect.signature(run_ranks).parameters["timeout_s"].default
    assert default == GROUP_TIMEOUT_S


def test_a_PeerError_comes_before_the_deadlines_of_tests() -> None:
    assert longest_call_s(PATIENCE.timeout_s) < DEADLINE_S < TEST_DEADLINE_S
    assert longest_call_s(max(COMMAND_TIMEOUT_S, check.TIMEOUT_S)) < TEST_DEADLINE_S


# ---- what run_ranks reports


def call_a_peer(device: torch.device, last: str) -> None:
    """The last rank does something else than to take part in a dispatch."""
    buffer = hybrid_ep.Buffer(
        hidden=8, num_experts=2, max_tokens=4, topk=1, device=device, config=Config(timeout_s=1)
    )
    dist.barrier()
    if dist.get_rank() == 1:
        if last == "sleeps":
            time.sleep(3600)
        if last == "dies":
            os._exit(7)
        if last == "raises":
            raise KeyError("a bug")
    hybrid_ep.dispatch(buffer, torch.zeros(4, 8).bfloat16(), torch.zeros(4, 1, dtype=torch.int64))


def build_with_a_bad_size(device: torch.device) -> None:
    hybrid_ep.Buffer(
        hidden=0 if dist.get_rank() else 8, num_experts=2, max_tokens=4, topk=1, device=device
    )


def raised(function: Any, *args: Any) -> RanksFailed:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(function, 2, *args, device="cpu")
    return failed.value


def test_run_ranks_reports_the_PeerError_of_a_rank_that_waited() -> None:
    before = multiprocessing.active_children()  # pools of other tests
    error = raised(call_a_peer, "sleeps")
    assert error.told.startswith("rank 0 waited for rank 1 in route"), error.told
    assert "\n" not in error.told
    assert "rank 0 failed:\nTraceback" in str(error)
    assert set(multiprocessing.active_children()) <= set(before), "the sleeping rank is left"


def test_run_ranks_reports_the_rank_that_died_and_not_its_peer() -> None:
    assert raised(call_a_peer, "dies").told == "rank 1 died without a word (exit code 7)"


def test_run_ranks_reports_a_bug_with_its_traceback() -> None:
    error = raised(call_a_peer, "raises")
    assert error.told == str(error)
    assert error.told.startswith("rank 1 failed:\nTraceback")
    assert error.told.rstrip().endswith("KeyError: 'a bug'")


def test_run_ranks_reports_the_rank_that_broke_a_rule_and_not_its_peer() -> None:
    error = raised(build_with_a_bad_size)
    assert error.told == "hidden must be an integer of at least 1, got 0"
    assert str(error).startswith("rank 1 failed:\nTraceback")
