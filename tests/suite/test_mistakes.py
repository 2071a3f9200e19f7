"""Bad input raises ValueError or TypeError, with the rule and what was got; nothing is sent."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import hybrid_ep
from tests.cases import FP8
from tests.launch import Rank
from tests.ranks import mistakes
from tests.ranks.mistakes import CASE, Call

pytestmark = pytest.mark.not_on(
    "torch_gpu", why="the rules are those of the others, and so are the devices"
)
T, K, H = CASE.num_tokens(0), CASE.num_slots, CASE.hidden
E = CASE.num_experts


def sized(**sizing: Any) -> Callable[[Call], Any]:
    return lambda c: c.dispatch(**sizing)


CALLS = {  # what rank 0 does with a Call, and the rule that this breaks
    "dispatch_x_1d": (lambda c: c.dispatch(c.x[0]), "x must have shape [T, hidden=32], got [32]"),
    "dispatch_other_hidden": (
        lambda c: c.dispatch(c.x[:, :16].contiguous()),
        "x must have shape [T, hidden=32], got [6, 16]",
    ),
    "dispatch_other_tokens": (
        lambda c: c.dispatch(c.x[:3]),
        "as many tokens as its routing, got 3 and 6",
    ),
    "dispatch_wide_payload": (
        lambda c: c.dispatch(torch.zeros((T, H), dtype=torch.float32, device=c.me.device)),
        "rows of torch.float32 need 128 bytes, more than the 80 that dtype=torch.bfloat16 and "
        "scale_bytes=8 of the Buffer reserve: convert them to torch.bfloat16, or make the Buffer "
        "with dtype=torch.float32",
    ),
    "dispatch_other_device": (
        lambda c: c.dispatch(c.x.to("meta")),
        "x must be on the Buffer's DEVICE, got meta",
    ),
    "dispatch_eight_bytes": (
        lambda c: c.dispatch(torch.zeros((T, H), dtype=torch.int64, device=c.me.device)),
        "need 256 bytes, more than the 80",
    ),
    "dispatch_weights_shape": (
        lambda c: c.dispatch(weights=c.weights[:, :2]),
        "topk_weights must have shape [6, 3], got [6, 2]",
    ),
    "dispatch_weights_dtype": (
        lambda c: c.dispatch(weights=c.weights.bfloat16()),
        "topk_weights must be torch.float32, got torch.bfloat16",
    ),
    "dispatch_scales_tokens": (
        lambda c: c.dispatch(scales=c.scales[:2]),
        "scales must have shape [T=6, S], got [2, 2]",
    ),
    "dispatch_scales_1d": (
        lambda c: c.dispatch(scales=c.scales[:, 0]),
        "scales must have shape [T=6, S], got [6]",
    ),
    "dispatch_many_scales": (
        lambda c: c.dispatch(scales=torch.zeros((T, 100), device=c.me.device)),
        "rows of torch.bfloat16 and their scales need 464 bytes, more than the 80 that "
        "dtype=torch.bfloat16 and scale_bytes=8 of the Buffer reserve: make the Buffer with "
        "dtype=torch.bfloat16 and scale_bytes=400",
    ),
    "route_float_experts": (
        lambda c: c.dispatch(topk_idx=c.topk_idx.float()),
        "topk_idx must be int16, int32 or int64, got torch.float32",
    ),
    "route_other_topk": (
        lambda c: c.dispatch(topk_idx=c.topk_idx[:, [0, 1, 2, 2]]),
        "topk_idx must have shape [T, topk=3], got [6, 4]",
    ),
    "route_1d": (
        lambda c: c.dispatch(topk_idx=c.topk_idx[:, 0]),
        "topk_idx must have shape [T, topk=3], got [6]",
    ),
    "route_many_tokens": (
        lambda c: c.dispatch(c.x.new_zeros(7, H), c.topk_idx.new_zeros(7, K)),
        "at most max_tokens=6 tokens, got 7",
    ),
    "route_expert_too_high": (
        lambda c: c.dispatch(topk_idx=torch.full((T, K), E)),
        "must lie in [-1, num_experts=12), got values from 12 to 12",
    ),
    "route_expert_too_low": (
        lambda c: c.dispatch(topk_idx=torch.full((T, K), -2)),
        "must lie in [-1, num_experts=12), got values from -2 to -2",
    ),
    "route_align_0": (sized(align=0), "align must be an integer of at least 1, got 0"),
    "route_max_rows_negative": (sized(max_rows=-1), "non-negative multiple of align=1, got -1"),
    "route_max_rows_unaligned": (
        sized(max_rows=24, align=16),
        "non-negative multiple of align=16, got 24",
    ),
    "route_0d": (
        lambda c: c.dispatch(topk_idx=c.topk_idx[0, 0]),
        "topk_idx must have shape [T, topk=3], got []",
    ),
    "route_align_float": (sized(align=16.0), "align must be an integer of at least 1, got 16.0"),
    "route_max_rows_float": (sized(max_rows=16.0), "non-negative multiple of align=1, got 16.0"),
    "route_align_bool": (sized(align=True), "align must be an integer of at least 1, got True"),
    "route_max_rows_bool": (sized(max_rows=True), "non-negative multiple of align=1, got True"),
    "route_max_rows_tensor": (
        lambda c: c.dispatch(max_rows=torch.tensor(16)),
        "non-negative multiple of align=1, got tensor(16)",
    ),
    "route_most_dtype": (
        lambda c: c.dispatch(most=torch.ones(1, device=c.me.device)),
        "most must be int32 with one element or more, as map_to_topk returns",
    ),
    "route_most_empty": (
        lambda c: c.dispatch(most=torch.ones(0, dtype=torch.int32, device=c.me.device)),
        "as map_to_topk returns it, got torch.int32 [0]",
    ),
    "route_most_device": (
        lambda c: c.dispatch(most=torch.ones(1, dtype=torch.int32, device="meta")),
        "most must be on the Buffer's DEVICE, got meta",
    ),
    "replay_with_most": (
        lambda c: c.replay(most=torch.ones(1, dtype=torch.int32, device=c.me.device)),
        "and most is for a new one",
    ),
    "route_neither": (
        lambda c: hybrid_ep.dispatch(c.buffer, c.x),
        "either topk_idx or a handle to replay, got neither",
    ),
    "route_and_handle": (
        lambda c: c.dispatch(handle=c.handle),
        "either topk_idx or a handle to replay, got both",
    ),
    "replay_with_max_rows": (lambda c: c.replay(max_rows=64), "a replayed layout has its max_rows"),
    "replay_other_tokens": (
        lambda c: c.replay(c.x[:2]),
        "as many tokens as its routing, got 2 and 6",
    ),
    "replay_other_buffer": (
        lambda c: c.replay(handle=c.other_handle()),
        "the handle must be of this Buffer",
    ),
    "combine_bytes": (
        lambda c: c.combine(c.rows.to(FP8)),
        "combine sums bfloat16, float16 or float32 rows, got torch.float8_e4m3fn",
    ),
    "combine_other_hidden": (
        lambda c: c.combine(c.rows[:, :16]),
        "rows must have shape [M, hidden=32]",
    ),
    "combine_other_rows": (
        lambda c: c.combine(c.rows[1:]),
        "rows must be those of the handle's dispatch",
    ),
    "combine_wide_rows": (
        lambda c: c.combine(c.rows.float()),
        "rows of torch.float32 need 128 bytes, more than the 64",
    ),
    "combine_weights_shape": (
        lambda c: c.combine(weights=c.rows.new_ones(len(c.rows), 1, dtype=torch.float32)),
        "weights must have shape [",
    ),
    "combine_few_weights": (
        lambda c: c.combine(weights=c.rows.new_ones(len(c.rows) - 1, dtype=torch.float32)),
        "weights must have shape [",
    ),
    "combine_weights_dtype": (
        lambda c: c.combine(weights=c.rows.new_ones(len(c.rows), dtype=torch.bfloat16)),
        "weights must be torch.float32, got torch.bfloat16",
    ),
    "combine_other_buffer": (
        lambda c: c.combine(handle=c.other_handle()),
        "the handle must be of this Buffer",
    ),
}


ON_THE_HOST = pytest.mark.not_on(
    "nvlink",
    "nodes",
    why="the kernels read the experts, after the call: test_expert_out_of_range of tests/gpu",
)
OF_EXPERTS = ("route_expert_too_high", "route_expert_too_low")


def mistake(me: Rank, name: str) -> str:
    """What rank 0 is told of the call of that name; see ``mistakes.mistake``."""
    return mistakes.mistake(me, {**CALLS, **TYPES}[name][0])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[ON_THE_HOST] if name in OF_EXPERTS else []) for name in CALLS],
)
def test_bad_call_sends_nothing(target, world, name):
    told, other = world(2).run(mistake, name)
    assert told.startswith("ValueError: ")
    assert CALLS[name][1].replace("DEVICE", str(target.rank_device(0, 2))) in told
    assert other == ""


TYPES = {  # the same, and what it is told
    "no_buffer": (
        lambda c: hybrid_ep.dispatch(c.x, c.topk_idx, c.weights),
        "buffer must be a hybrid_ep.Buffer, got one of type Tensor",
    ),
    "combine_no_buffer": (
        lambda c: hybrid_ep.combine(c.rows, c.handle, None),
        "buffer must be a hybrid_ep.Buffer, got one of type Tensor",
    ),
    "dispatch_no_x": (
        lambda c: hybrid_ep.dispatch(c.buffer, None, c.topk_idx),
        "x must be a tensor, got None",
    ),
    "replay_no_x": (
        lambda c: hybrid_ep.dispatch(c.buffer, None, handle=c.handle),
        "x must be a tensor, got None",
    ),
    "dispatch_x_numpy": (
        lambda c: c.dispatch(np.zeros((T, H), dtype=np.float32)),
        "x must be a tensor, got one of type ndarray",
    ),
    "dispatch_topk_idx_list": (
        lambda c: c.dispatch(topk_idx=c.topk_idx.tolist()),
        "topk_idx must be a tensor, got one of type list",
    ),
    "dispatch_weights_list": (
        lambda c: c.dispatch(weights=c.weights.tolist()),
        "topk_weights must be a tensor, got one of type list",
    ),
    "dispatch_scales_number": (
        lambda c: c.dispatch(scales=1.0),
        "scales must be a tensor, got one of type float",
    ),
    "replay_dispatched": (
        lambda c: c.replay(handle=c.sent),
        "handle must be a hybrid_ep.Handle, got one of type Dispatched: pass its field .handle",
    ),
    "replay_layout": (
        lambda c: c.replay(handle=c.handle.layout),
        "handle must be a hybrid_ep.Handle, got one of type Tensor",
    ),
    "combine_dispatched": (
        lambda c: hybrid_ep.combine(c.buffer, c.rows, c.sent),
        "handle must be a hybrid_ep.Handle, got one of type Dispatched: pass its field .handle",
    ),
    "combine_no_handle": (
        lambda c: hybrid_ep.combine(c.buffer, c.rows, None),
        "handle must be a hybrid_ep.Handle, got None",
    ),
    "combine_no_rows": (
        lambda c: hybrid_ep.combine(c.buffer, None, c.handle),
        "rows must be a tensor, got None",
    ),
    "combine_rows_dispatched": (
        lambda c: hybrid_ep.combine(c.buffer, c.sent, c.handle),
        "rows must be a tensor, got one of type Dispatched",
    ),
    "combine_weights_list": (
        lambda c: c.combine(weights=[1.0] * len(c.rows)),
        "weights must be a tensor, got one of type list",
    ),
    "route_most_number": (
        lambda c: c.dispatch(most=3),
        "most must be a tensor, got one of type int",
    ),
}


@pytest.mark.parametrize("name", TYPES)
def test_an_argument_of_another_type_sends_nothing(world, name):
    told, other = world(2).run(mistake, name)
    assert told == f"TypeError: {TYPES[name][1]}"
    assert other == ""


def test_rows_too_wide_for_a_Buffer_without_scales(alone):
    """The text names the dtype and does not speak of scales."""
    buffer = alone.buffer(**{**CASE.sizes(), "scale_bytes": 0})
    inputs = CASE.inputs(0)
    with pytest.raises(ValueError, match=r"rows of torch\.float32 need 128 bytes") as raised:
        mistakes.send(alone, buffer, replace(inputs, x=inputs.x.float(), scales=None))
    assert "more than the 64 that dtype=torch.bfloat16 of the Buffer reserves" in str(raised.value)
    assert "convert them to torch.bfloat16, or make the Buffer with dtype" in str(raised.value)
    assert "scale" not in str(raised.value)


BUFFERS = [
    ({"hidden": 0}, "hidden must be an integer of at least 1, got 0"),
    ({"hidden": 32.0}, "hidden must be an integer of at least 1, got 32.0"),
    ({"hidden": True}, "hidden must be an integer of at least 1, got True"),
    ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
    ({"topk": -1}, "topk must be an integer of at least 1, got -1"),
    ({"num_experts": 0}, "num_experts must be an integer of at least 1, got 0"),
    ({"topk": 13}, "topk must be at most num_experts=12, got 13"),
    ({"topk": torch.tensor(3)}, "topk must be an integer of at least 1, got tensor(3)"),
    ({"scale_bytes": True}, "scale_bytes must be an integer of at least 0, got True"),
    ({"ranks_per_node": True}, "ranks_per_node must be an integer of at least 1, got True"),
    ({"ranks_per_node": 1.0}, "ranks_per_node must be an integer of at least 1, got 1.0"),
    ({"scale_bytes": -1}, "scale_bytes must be an integer of at least 0, got -1"),
    ({"backend": "nccl"}, "backend must be one of auto, torch, nvlink, nvshmem, got 'nccl'"),
    ({"ranks_per_node": 0}, "ranks_per_node must be an integer of at least 1, got 0"),
    ({"ranks_per_node": 2}, "got ranks_per_node=2 with 1 ranks"),
]


@pytest.mark.parametrize("wrong, text", BUFFERS, ids=str)
def test_bad_buffer(alone, wrong, text):
    with pytest.raises(ValueError) as raised:
        alone.buffer(**{**CASE.sizes(), **wrong})
    assert text in str(raised.value)


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", None, np.float32])
def test_a_dtype_that_is_none_of_torch(alone, dtype):
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype like torch\.bfloat16, got"):
        alone.buffer(**{**CASE.sizes(), "dtype": dtype})


ON_TWO_RANKS = [
    ({"num_experts": 7}, "DeepEP#479", "got num_experts=7 with 2 ranks"),
    ({"ranks_per_node": 3}, "DeepEP#596", "got ranks_per_node=3 with 2 ranks"),
]


@pytest.mark.parametrize("wrong, report, text", ON_TWO_RANKS, ids=lambda v: str(v)[:20])
def test_bad_buffer_of_two_ranks(world, wrong, report, text):
    for told in world(2).run(mistakes.disagree, [wrong, wrong]):
        assert text in told


DISAGREEMENTS = {
    "hidden": (32, 64),
    "num_experts": (12, 24),
    "max_tokens": (6, 7),
    "topk": (3, 2),
    "dtype": (torch.bfloat16, torch.float32),
    "scale_bytes": (0, 16),
    "backend": ("torch", "auto"),
    "ranks_per_node": (1, 2),
    "config": (hybrid_ep.Config(timeout_s=1), hybrid_ep.Config(timeout_s=2)),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_DeepEP_604_ranks_disagree(world, name):
    values = DISAGREEMENTS[name]
    for told in world(2).run(mistakes.disagree, [{name: value} for value in values]):
        assert f"{name} must be equal on all ranks" in told
        assert f"rank 0: {values[0]}, rank 1: {values[1]}" in told


def test_equal_deadlines_of_other_types_are_no_disagreement(world):
    configs = [{"config": hybrid_ep.Config(timeout_s=seconds)} for seconds in (60, 60.0)]
    assert world(2).run(mistakes.disagree, configs) == ["", ""]


def test_Megatron_Bridge_1948_the_group_counts_not_the_environment(alone, monkeypatch):
    for name, value in {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    topology = alone.buffer(**CASE.sizes()).topology
    assert (topology.rank, topology.num_ranks, topology.ranks_per_node) == (0, 1, 1)
