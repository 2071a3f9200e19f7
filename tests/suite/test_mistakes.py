"""Bad input raises ValueError or TypeError, with the rule and what was got; nothing is sent."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import hybrid_ep
from tests.cases import FP8
from tests.ranks import mistakes
from tests.ranks.mistakes import CASE, Call

pytestmark = pytest.mark.not_on(
    "torch_gpu", why="the rules are those of the others, and so are the devices"
)
T, K, H = CASE.num_tokens(0), CASE.num_slots, CASE.hidden
E = CASE.num_experts


def dispatch_x_1d(call: Call):
    call.dispatch(call.x[0])


def dispatch_other_hidden(call: Call):
    call.dispatch(call.x[:, :16].contiguous())


def dispatch_other_tokens(call: Call):
    call.dispatch(call.x[:3])


def dispatch_wide_payload(call: Call):
    call.dispatch(torch.zeros((T, H), dtype=torch.float32, device=call.me.device))


def dispatch_other_device(call: Call):
    call.dispatch(call.x.to("meta"))


def dispatch_eight_bytes(call: Call):
    call.dispatch(torch.zeros((T, H), dtype=torch.int64, device=call.me.device))


def dispatch_weights_shape(call: Call):
    call.dispatch(weights=call.weights[:, :2])


def dispatch_weights_dtype(call: Call):
    call.dispatch(weights=call.weights.bfloat16())


def dispatch_scales_tokens(call: Call):
    call.dispatch(scales=call.scales[:2])


def dispatch_scales_1d(call: Call):
    call.dispatch(scales=call.scales[:, 0])


def dispatch_many_scales(call: Call):
    call.dispatch(scales=torch.zeros((T, 100), device=call.me.device))


def route_float_experts(call: Call):
    call.dispatch(topk_idx=call.topk_idx.float())


def route_other_topk(call: Call):
    call.dispatch(topk_idx=call.topk_idx[:, [0, 1, 2, 2]])


def route_1d(call: Call):
    call.dispatch(topk_idx=call.topk_idx[:, 0])


def route_many_tokens(call: Call):
    x = torch.zeros((7, H), dtype=CASE.dtype, device=call.me.device)
    call.dispatch(x, torch.zeros((7, K), dtype=torch.int64, device=call.me.device))


def route_expert_too_high(call: Call):
    call.dispatch(topk_idx=torch.full((T, K), E))


def route_expert_too_low(call: Call):
    call.dispatch(topk_idx=torch.full((T, K), -2))


def route_align_0(call: Call):
    call.dispatch(align=0)


def route_max_rows_negative(call: Call):
    call.dispatch(max_rows=-1)


def route_max_rows_unaligned(call: Call):
    call.dispatch(max_rows=24, align=16)


def route_0d(call: Call):
    call.dispatch(topk_idx=call.topk_idx[0, 0])


def route_align_float(call: Call):
    call.dispatch(align=16.0)


def route_max_rows_float(call: Call):
    call.dispatch(max_rows=16.0)


def route_align_bool(call: Call):
    call.dispatch(align=True)


def route_max_rows_bool(call: Call):
    call.dispatch(max_rows=True)


def route_max_rows_tensor(call: Call):
    call.dispatch(max_rows=torch.tensor(16))


def route_most_dtype(call: Call):
    call.dispatch(most=torch.ones(1, device=call.me.device))


def route_most_empty(call: Call):
    call.dispatch(most=torch.ones(0, dtype=torch.int32, device=call.me.device))


def route_most_device(call: Call):
    call.dispatch(most=torch.ones(1, dtype=torch.int32, device="meta"))


def replay_with_most(call: Call):
    most = torch.ones(1, dtype=torch.int32, device=call.me.device)
    hybrid_ep.dispatch(call.buffer, call.x, handle=call.handle, most=most)


def route_most_number(call: Call):
    call.dispatch(most=3)


def route_neither(call: Call):
    hybrid_ep.dispatch(call.buffer, call.x)


def route_and_handle(call: Call):
    call.dispatch(handle=call.handle)


def replay_with_max_rows(call: Call):
    hybrid_ep.dispatch(call.buffer, call.x, handle=call.handle, max_rows=64)


def replay_other_tokens(call: Call):
    hybrid_ep.dispatch(call.buffer, call.x[:2], handle=call.handle)


def replay_other_buffer(call: Call):
    hybrid_ep.dispatch(call.buffer, call.x, handle=call.other_handle())


def combine_bytes(call: Call):
    call.combine(call.rows.to(FP8))


def combine_other_hidden(call: Call):
    call.combine(call.rows[:, :16])


def combine_other_rows(call: Call):
    call.combine(call.rows[1:])


def combine_wide_rows(call: Call):
    call.combine(call.rows.float())


def combine_weights_shape(call: Call):
    call.combine(weights=call.rows.new_ones(len(call.rows), 1, dtype=torch.float32))


def combine_few_weights(call: Call):
    call.combine(weights=call.rows.new_ones(len(call.rows) - 1, dtype=torch.float32))


def combine_weights_dtype(call: Call):
    call.combine(weights=call.rows.new_ones(len(call.rows), dtype=torch.bfloat16))


def combine_other_buffer(call: Call):
    call.combine(handle=call.other_handle())


CALLS = [
    (dispatch_x_1d, "x must have shape [T, hidden=32], got [32]"),
    (dispatch_other_hidden, "x must have shape [T, hidden=32], got [6, 16]"),
    (dispatch_other_tokens, "as many tokens as its routing, got 3 and 6"),
    (
        dispatch_wide_payload,
        "rows of torch.float32 need 128 bytes, more than the 80 that dtype=torch.bfloat16 and "
        "scale_bytes=8 of the Buffer reserve: convert them to torch.bfloat16, or make the Buffer "
        "with dtype=torch.float32",
    ),
    (dispatch_other_device, "x must be on the Buffer's DEVICE, got meta"),
    (dispatch_eight_bytes, "need 256 bytes, more than the 80"),
    (dispatch_weights_shape, "topk_weights must have shape [6, 3], got [6, 2]"),
    (dispatch_weights_dtype, "topk_weights must be torch.float32, got torch.bfloat16"),
    (dispatch_scales_tokens, "scales must have shape [T=6, S], got [2, 2]"),
    (dispatch_scales_1d, "scales must have shape [T=6, S], got [6]"),
    (
        dispatch_many_scales,
        "rows of torch.bfloat16 and their scales need 464 bytes, more than the 80 that "
        "dtype=torch.bfloat16 and scale_bytes=8 of the Buffer reserve: make the Buffer with "
        "dtype=torch.bfloat16 and scale_bytes=400",
    ),
    (route_float_experts, "topk_idx must be int16, int32 or int64, got torch.float32"),
    (route_other_topk, "topk_idx must have shape [T, topk=3], got [6, 4]"),
    (route_1d, "topk_idx must have shape [T, topk=3], got [6]"),
    (route_many_tokens, "at most max_tokens=6 tokens, got 7"),
    (route_expert_too_high, "must lie in [-1, num_experts=12), got values from 12 to 12"),
    (route_expert_too_low, "must lie in [-1, num_experts=12), got values from -2 to -2"),
    (route_align_0, "align must be an integer of at least 1, got 0"),
    (route_max_rows_negative, "non-negative multiple of align=1, got -1"),
    (route_max_rows_unaligned, "non-negative multiple of align=16, got 24"),
    (route_0d, "topk_idx must have shape [T, topk=3], got []"),
    (route_align_float, "align must be an integer of at least 1, got 16.0"),
    (route_max_rows_float, "non-negative multiple of align=1, got 16.0"),
    (route_align_bool, "align must be an integer of at least 1, got True"),
    (route_max_rows_bool, "non-negative multiple of align=1, got True"),
    (route_max_rows_tensor, "non-negative multiple of align=1, got tensor(16)"),
    (route_most_dtype, "most must be int32 with one element or more, as map_to_topk returns"),
    (route_most_empty, "as map_to_topk returns it, got torch.int32 [0]"),
    (route_most_device, "most must be on the Buffer's DEVICE, got meta"),
    (replay_with_most, "and most is for a new one"),
    (route_neither, "either topk_idx or a handle to replay, got neither"),
    (route_and_handle, "either topk_idx or a handle to replay, got both"),
    (replay_with_max_rows, "a replayed layout has its max_rows"),
    (replay_other_tokens, "as many tokens as its routing, got 2 and 6"),
    (replay_other_buffer, "the handle must be of this Buffer"),
    (combine_bytes, "combine sums bfloat16, float16 or float32 rows, got torch.float8_e4m3fn"),
    (combine_other_hidden, "rows must have shape [M, hidden=32]"),
    (combine_other_rows, "rows must be those of the handle's dispatch"),
    (combine_wide_rows, "rows of torch.float32 need 128 bytes, more than the 64"),
    (combine_weights_shape, "weights must have shape ["),
    (combine_few_weights, "weights must have shape ["),
    (combine_weights_dtype, "weights must be torch.float32, got torch.bfloat16"),
    (combine_other_buffer, "the handle must be of this Buffer"),
]


ON_THE_HOST = pytest.mark.not_on(
    "nvlink",
    "nodes",
    why="the kernels read the experts, after the call: test_expert_out_of_range of tests/gpu",
)
OF_EXPERTS = (route_expert_too_high, route_expert_too_low)


@pytest.mark.parametrize(
    "bad_call, text",
    [
        pytest.param(
            call, text, id=call.__name__, marks=[ON_THE_HOST] if call in OF_EXPERTS else []
        )
        for call, text in CALLS
    ],
)
def test_bad_call_sends_nothing(target, world, bad_call, text):
    told, other = world(2).run(mistakes.mistake, bad_call)
    assert told.startswith("ValueError: ")
    assert text.replace("DEVICE", str(target.rank_device(0, 2))) in told
    assert other == ""


def no_buffer(call: Call):
    hybrid_ep.dispatch(call.x, call.topk_idx, call.weights)


def combine_no_buffer(call: Call):
    hybrid_ep.combine(call.rows, call.handle, None)


def dispatch_no_x(call: Call):
    hybrid_ep.dispatch(call.buffer, None, call.topk_idx)


def replay_no_x(call: Call):
    hybrid_ep.dispatch(call.buffer, None, handle=call.handle)


def dispatch_x_numpy(call: Call):
    call.dispatch(np.zeros((T, H), dtype=np.float32))


def dispatch_topk_idx_list(call: Call):
    call.dispatch(topk_idx=call.topk_idx.tolist())


def dispatch_weights_list(call: Call):
    call.dispatch(weights=call.weights.tolist())


def dispatch_scales_number(call: Call):
    call.dispatch(scales=1.0)


def replay_dispatched(call: Call):
    hybrid_ep.dispatch(call.buffer, call.x, handle=call.sent)


def replay_layout(call: Call):
    hybrid_ep.dispatch(call.buffer, call.x, handle=call.handle.layout)


def combine_dispatched(call: Call):
    hybrid_ep.combine(call.buffer, call.rows, call.sent)


def combine_no_handle(call: Call):
    hybrid_ep.combine(call.buffer, call.rows, None)


def combine_no_rows(call: Call):
    hybrid_ep.combine(call.buffer, None, call.handle)


def combine_rows_dispatched(call: Call):
    hybrid_ep.combine(call.buffer, call.sent, call.handle)


def combine_weights_list(call: Call):
    call.combine(weights=[1.0] * len(call.rows))


TYPES = [
    (no_buffer, "buffer must be a hybrid_ep.Buffer, got one of type Tensor"),
    (combine_no_buffer, "buffer must be a hybrid_ep.Buffer, got one of type Tensor"),
    (dispatch_no_x, "x must be a tensor, got None"),
    (replay_no_x, "x must be a tensor, got None"),
    (dispatch_x_numpy, "x must be a tensor, got one of type ndarray"),
    (dispatch_topk_idx_list, "topk_idx must be a tensor, got one of type list"),
    (dispatch_weights_list, "topk_weights must be a tensor, got one of type list"),
    (dispatch_scales_number, "scales must be a tensor, got one of type float"),
    (
        replay_dispatched,
        "handle must be a hybrid_ep.Handle, got one of type Dispatched: pass its field .handle",
    ),
    (replay_layout, "handle must be a hybrid_ep.Handle, got one of type Tensor"),
    (
        combine_dispatched,
        "handle must be a hybrid_ep.Handle, got one of type Dispatched: pass its field .handle",
    ),
    (combine_no_handle, "handle must be a hybrid_ep.Handle, got None"),
    (combine_no_rows, "rows must be a tensor, got None"),
    (combine_rows_dispatched, "rows must be a tensor, got one of type Dispatched"),
    (combine_weights_list, "weights must be a tensor, got one of type list"),
    (route_most_number, "most must be a tensor, got one of type int"),
]


@pytest.mark.parametrize("bad_call, text", TYPES, ids=[call.__name__ for call, _ in TYPES])
def test_an_argument_of_another_type_sends_nothing(world, bad_call, text):
    told, other = world(2).run(mistakes.mistake, bad_call)
    assert told == f"TypeError: {text}"
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
