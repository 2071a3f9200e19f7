"""How the nvlink backend is set up, or not, when a rank's GPU says no: a fake GPU on each rank."""

import ctypes
import gc
import re
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

import hybrid_ep
from hybrid_ep.backends import empty
from hybrid_ep.backends.cuda import arguments, settings
from hybrid_ep.errors import UnknownExpert
from hybrid_ep.shape import NUMBER_OF_DTYPE
from tests.ranks import fake_nvlink, tensors
from tools.fake_nvlink import Fake, FakeStream, cpu_with

NOT_PERMITTED = {
    "Runtime": "allocation of 2097152 bytes of symmetric memory: operation not permitted",
    "ipc_handle": "export of symmetric memory: operation not permitted",
    "open_peers": "mapping of rank 0's symmetric memory: operation not permitted",
}
BEFORE = {
    "Runtime": ["Runtime"],
    "ipc_handle": ["Runtime", "ipc_handle"],
    "open_peers": ["Runtime", "ipc_handle", "open_peers"],
}


def build(world, backend, fails=None, hosts=("a host",), **sizes):
    return world(3).run(fake_nvlink.build, backend, fails or {}, list(hosts), sizes)


def test_gpus_that_say_yes_get_nvlink(world):
    for told in build(world, "auto"):
        assert told["backend"] == "nvlink"
        assert told["calls"] == ["Runtime", "ipc_handle", "open_peers", "destroy"]


@pytest.mark.parametrize("call", NOT_PERMITTED)
def test_DeepEP_487_not_permitted_on_one_rank_falls_back_on_all(world, call):
    """The driver says that memory can be shared, and refuses when it is asked to."""
    for rank, told in enumerate(build(world, "auto", {1: {call: NOT_PERMITTED[call]}})):
        reason = f"the nvlink backend cannot run: rank 1: {NOT_PERMITTED[call]}"
        assert told["backend"] == "torch"
        assert f"because {reason}" in told["describe"]
        check_calls(told["calls"], call, failed=rank == 1)


@pytest.mark.parametrize("call", NOT_PERMITTED)
def test_DeepEP_487_not_permitted_on_one_rank_raises_on_all(world, call):
    for rank, told in enumerate(build(world, "nvlink", {1: {call: NOT_PERMITTED[call]}})):
        assert told["error"] == f"the nvlink backend cannot run: rank 1: {NOT_PERMITTED[call]}"
        check_calls(told["calls"], call, failed=rank == 1)


def check_calls(calls, failing, failed):
    """No rank opens what a peer could not export; what was made is freed once all have unmapped."""
    if failed:
        assert calls[: len(BEFORE[failing])] == BEFORE[failing]
    assert ("open_peers" in calls) == (failing == "open_peers")
    made = not (failed and failing == "Runtime")
    assert calls[-2:] == ["unmap_peers", "free_now"] if made else calls == BEFORE[failing]


def test_DeepEP_487_of_several_failures_the_first_rank_is_told(world):
    fails = {rank: {"Runtime": f"reason {rank}"} for rank in (2, 1)}
    for told in build(world, "nvlink", fails):
        assert told["error"] == "the nvlink backend cannot run: rank 1: reason 1"


def test_DeepEP_596_ranks_of_two_hosts_are_counted_by_where_they_are(world):
    """All three say that they are one node; that two of them are elsewhere is seen on all."""
    hosts = ("a host", "another host", "another host")
    for told in build(world, "nvlink", hosts=hosts, ranks_per_node=3):
        assert "rank 1: it is on another host than rank 0" in told["error"]
        assert told["calls"] == [], "memory was allocated before the ranks agreed"
    for told in build(world, "auto", hosts=hosts):
        assert told["backend"] == "torch"
        assert "the nvshmem backend cannot run" in told["describe"]
        assert "3, 1 node(s) of 3" in told["describe"], "hosts of unequal size are no nodes"


def test_RL_4038_the_transport_is_chosen_when_the_buffer_is_built(world):
    """One package: the same ranks get nvlink or torch by where they run and what they ask for."""
    assert [t["backend"] for t in build(world, "auto")] == ["nvlink"] * 3
    assert [t["backend"] for t in build(world, "torch")] == ["torch"] * 3
    apart = build(world, "auto", hosts=("a host", "another host", "a third"))
    assert [t["backend"] for t in apart] == ["torch"] * 3
    for told in build(world, "nvlink", ranks_per_node=1):
        assert "it serves one node, the ranks are on 3" in told["error"]


def test_Megatron_LM_3999_a_limit_is_told_before_anything_is_allocated(world):
    for told in build(world, "nvlink", max_tokens=2**29, topk=2):
        assert told["error"] == (
            "the nvlink backend cannot run: rank 0: ranks * max_tokens * topk must be at most "
            f"1073741823, got {3 * 2**29 * 2}"
        )
        assert told["calls"] == []


def test_slime_release_frees_only_when_all_ranks_have_closed(world):
    results = world(3).run(fake_nvlink.release_and_restore)
    closed = max(got["destroy"] for got in results)
    freed = max(got["free_unread_memory"] for got in results)
    for got in results:
        assert got["free_unread_memory"] > closed
        assert got["released"] > freed


def test_slime_restore_without_memory_raises_on_all_ranks_and_can_be_repeated(world):
    for got in world(3).run(fake_nvlink.release_and_restore):
        assert got["refused"] == "rank 1: allocation of symmetric memory: out of memory"
        assert "was released" in got["still"]
        assert got["backend"] == "nvlink"
        assert "released" not in got["describe"]


# ---- the verbs: what the kernels are asked, and in which order


@pytest.fixture
def quiet(alone):
    """A Buffer whose kernels do nothing, on CPU tensors, and what they were asked."""
    fake = Fake(num_rows=24)
    with cpu_with(fake) as streams:
        yield fake_nvlink.Quiet(alone, fake, streams)


def test_the_host_waits_behind_publish_and_only_for_exact_sizes(quiet):
    out = quiet.dispatch()
    assert quiet.asked() == ["publish_fresh", "await_offsets", "pull"]
    assert out.rows.shape[0] == 24
    quiet.dispatch(max_rows=32)
    assert quiet.asked() == ["dispatch_fresh"]
    quiet.dispatch(handle=out.handle)
    assert quiet.asked() == ["dispatch"]
    hybrid_ep.combine(quiet.buffer, out.rows, out.handle)
    assert quiet.asked() == ["combine"]


def test_the_host_does_not_wait_in_a_recomputation_which_knows_its_rows(quiet):
    inputs = quiet.inputs

    def block(x):
        out = hybrid_ep.dispatch(quiet.buffer, x, inputs.topk_idx, inputs.weights)
        return hybrid_ep.combine(quiet.buffer, torch.tanh(out.rows), out.handle)

    y = hybrid_ep.checkpoint(block, inputs.x.clone().requires_grad_())
    assert quiet.asked() == ["publish_fresh", "await_offsets", "pull", "combine"]
    y.sum().backward()
    recomputed, backward = ["dispatch", "combine"], ["dispatch", "combine"]
    assert quiet.asked() == [*recomputed, *backward]


def test_the_sizes_of_a_fresh_dispatch_are_parts_of_one_small_tensor(quiet):
    out = quiet.dispatch(max_rows=32)
    handle, experts = out.handle, quiet.buffer.num_local_experts
    told = (ctypes.c_int32 * (4 * experts + 4)).from_address(quiet.given("NewLayout")["counts"])
    told[:] = range(4 * experts + 4)  # as the kernels do
    assert out.counts.tolist() == list(range(experts))
    assert out.offsets.tolist() == list(range(experts, 2 * experts + 1))
    assert (handle.required_rows.shape, int(handle.required_rows)) == ((), 2 * experts + 2)
    assert handle.overflow_word.tolist() == [2 * experts + 3]
    words = told[2 * experts + 4 :]
    assert handle.padded_counts.dtype == torch.int64
    assert handle.padded_counts.view(torch.int32).tolist() == words
    assert handle.counts is out.counts and handle.offsets is out.offsets
    out.counts.zero_()  # all_reduce, say: nobody else's business
    assert out.offsets.tolist() == list(range(experts, 2 * experts + 1))
    assert handle.layout._version == out.offsets._version == 0
    assert out.counts.untyped_storage().nbytes() == 4 * len(told), "counts keep the layout alive"


def test_verbs_are_given_what_the_structs_say(quiet):
    x, topk_idx, weights = quiet.inputs.x, quiet.inputs.topk_idx, quiet.inputs.weights
    tokens, hidden = x.shape
    out = quiet.dispatch()
    routed = {"num_tokens": tokens, "align": 1, "max_rows": -1, "most": 0, "num_most": 0}
    assert quiet.given("Choices").items() >= routed.items()
    assert quiet.given("Choices")["topk_idx"] == topk_idx.data_ptr()
    assert quiet.given("Choices")["idx_bytes"] == topk_idx.element_size()
    assert quiet.given("NewLayout") == {
        "words": out.handle.layout.data_ptr(),
        "counts": out.counts.data_ptr(),
        "offsets": out.offsets.data_ptr(),
        "required_rows": out.handle.required_rows.data_ptr(),
        "overflow": out.handle.overflow_word.data_ptr(),
        "padded_counts": out.handle.padded_counts.data_ptr(),
    }
    sent = {
        "x": x.data_ptr(),
        "x_stride": 2 * hidden,
        "row_bytes": 2 * hidden,
        "weights": weights.data_ptr(),
        "weights_stride": weights.shape[1],
        "scales": 0,
        "scales_stride": 0,
        "scale_bytes": 0,
        "dtypes": NUMBER_OF_DTYPE[torch.bfloat16],
        "num_tokens": tokens,
        "words": out.handle.layout.data_ptr(),
        "num_sms": 0,
    }
    received = {
        "rows": out.rows.data_ptr(),
        "weights": out.weights.data_ptr(),
        "scales": 0,
        "num_rows": 24,
    }
    assert (quiet.given("Sent"), quiet.given("Received")) == (sent, received)

    fresh = quiet.dispatch(max_rows=32)
    assert quiet.given("Choices").items() >= {**routed, "max_rows": 32}.items()
    assert quiet.given("NewLayout")["offsets"] == fresh.offsets.data_ptr()
    assert quiet.given("NewLayout")["required_rows"] == fresh.handle.required_rows.data_ptr()
    assert quiet.given("Received")["num_rows"] == 32

    y = hybrid_ep.combine(quiet.buffer, out.rows, out.handle, weights=out.weights, num_sms=5)
    assert quiet.given("Summed") == {
        "rows": out.rows.data_ptr(),
        "num_rows": len(out.rows),
        "type": 0,
        "row_bytes": 2 * hidden,
        "weights": out.weights.data_ptr(),
        "values": 0,
        "y": y.data_ptr(),
        "home_values": 0,
        "num_tokens": tokens,
        "words": out.handle.layout.data_ptr(),
        "num_sms": 5,
    }


def test_the_extension_takes_as_many_fields_as_its_structs_have():
    extension = pytest.importorskip(
        "hybrid_ep._nvlink", reason="hybrid_ep._nvlink was not built: that takes nvcc"
    )
    for verb, structs in {
        "route": ("Choices", "NewLayout"),
        "dispatch": ("Sent", "Received"),
        "combine": ("Summed",),
    }.items():
        tuples = re.findall(r"[tT]uple\[([^\]]*)\]", getattr(extension.Runtime, verb).__doc__)
        fields = [len(fake_nvlink.field_names(struct)) for struct in structs]
        assert [text.count(",") + 1 for text in tuples] == fields


@pytest.mark.parametrize("weighted", [True, False])
def test_fresh_rows_with_and_without_weights_and_scales(quiet, weighted):
    inputs = quiet.inputs
    x = inputs.x if weighted else inputs.x.to(torch.float8_e4m3fn)
    scales = torch.ones(x.shape[0], 1, dtype=torch.float16)
    out = hybrid_ep.dispatch(
        quiet.buffer,
        x,
        inputs.topk_idx.t().contiguous().t(),  # slots far apart
        inputs.weights.t().contiguous().t() if weighted else None,
        scales=None if weighted else scales,
        max_rows=32,
    )
    assert (out.rows.shape, out.rows.dtype) == ((32, quiet.buffer.hidden), x.dtype)
    assert (out.weights is not None, out.scales is None) == (weighted, weighted)
    if weighted:
        assert (out.weights.shape, out.weights.dtype) == ((32,), torch.float32)
    else:
        assert (out.scales.shape, out.scales.dtype) == ((32, 1), torch.float16)


def test_memory_is_of_the_buffers_device_whichever_is_current(monkeypatch):
    current = 1
    quick = SimpleNamespace(_empty_strided_cuda=lambda shape, stride, dtype: f"cuda:{current}")
    slow = SimpleNamespace(empty_strided=lambda *args, dtype, device: str(device))
    monkeypatch.setattr(empty, "_quick", quick)
    monkeypatch.setattr(empty.torch, "empty_strided", slow.empty_strided)
    monkeypatch.setattr(empty.torch._C, "_cuda_getDevice", lambda: current, raising=False)
    allocator = empty.empty_on(torch.device("cuda:1"))
    assert allocator() is quick._empty_strided_cuda
    current = 0
    assert allocator()((2,), (1,), torch.int32) == "cuda:1"
    monkeypatch.setattr(empty, "_quick", None)  # a torch without it
    for device in ("cuda:1", "cpu"):
        made = empty.empty_on(torch.device(device))()
        assert made((2,), (1,), torch.int32) == device


def test_a_call_waits_for_the_last_stream_if_it_was_another(quiet):
    first, other = quiet.streams.current, FakeStream(7)
    quiet.dispatch()
    assert first.waited_for == []
    quiet.streams.current = other
    quiet.dispatch()
    assert other.waited_for == [first]
    quiet.streams.current = FakeStream(7)  # another object for the same stream
    out = quiet.dispatch()
    assert quiet.streams.current.waited_for == []
    quiet.streams.current = first
    hybrid_ep.combine(quiet.buffer, out.rows, out.handle)
    assert first.waited_for == [other]


def test_streams_inside_a_capture_follow_each_other_and_none_outside(quiet):
    outside, first, second = (FakeStream(n) for n in (1, 2, 3))
    first.is_capturing = second.is_capturing = True
    for stream in (outside, first, second, first, outside):
        quiet.streams.current = stream
        quiet.dispatch(max_rows=32)
    assert first.waited_for == [second], "the call before the capture is no part of it"
    assert second.waited_for == [first]
    assert outside.waited_for == []


def test_a_stream_that_begins_to_capture_is_another_place(quiet):
    stream, other = (FakeStream(n) for n in (1, 2))
    quiet.streams.current = stream
    quiet.dispatch(max_rows=32)
    stream.is_capturing = other.is_capturing = True
    for quiet.streams.current in (stream, other):
        quiet.dispatch(max_rows=32)
    assert (stream.waited_for, other.waited_for) == ([], [stream])


def test_a_handle_on_another_stream_is_recorded_there(quiet):
    out = quiet.dispatch()
    hybrid_ep.combine(quiet.buffer, out.rows, out.handle)
    assert quiet.streams.recorded == []
    quiet.streams.current = other = FakeStream(7)
    hybrid_ep.combine(quiet.buffer, out.rows, out.handle)
    quiet.dispatch(handle=out.handle)
    assert quiet.streams.recorded == [(out.handle.layout.data_ptr(), other)] * 2


@pytest.mark.parametrize("offset", range(4))
def test_scales_at_an_odd_address_are_copied_to_an_even_one(quiet, offset):
    packed = torch.arange(9 * quiet.inputs.x.shape[0]).to(torch.uint8)
    scales = packed[offset:][: 8 * quiet.inputs.x.shape[0]].view(-1, 8)
    assert scales.data_ptr() % 4 == offset
    x = quiet.inputs.x.to(torch.float8_e4m3fn)
    hybrid_ep.dispatch(quiet.buffer, x, quiet.inputs.topk_idx, scales=scales, max_rows=32)
    assert quiet.given("Sent")["scales"] % 4 == 0
    assert (quiet.given("Sent")["scales"] == scales.data_ptr()) == (offset == 0)


def failing(quiet, error):
    """The rows of an exact dispatch are not made, for once."""

    def make_rows(*args):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments.Sent, "make_rows", make_rows)
        with pytest.raises(type(error)):
            quiet.dispatch()


@pytest.mark.parametrize("error", [MemoryError("made up"), KeyboardInterrupt()])
def test_an_exact_dispatch_that_gets_no_rows_is_ended_without_any(quiet, error):
    failing(quiet, error)
    assert quiet.asked() == ["publish_fresh", "await_offsets", "pull"]
    assert quiet.given("Received") == dict.fromkeys(("rows", "weights", "scales", "num_rows"), 0)
    quiet.dispatch(max_rows=32)


def test_a_dispatch_that_stays_half_made_ends_the_buffer(quiet):
    quiet.fake.is_half_made = True  # a second interrupt, while the first one was handled
    for _ in range(2):
        with pytest.raises(RuntimeError, match="an interrupt between the parts of an exact"):
            quiet.dispatch(max_rows=32)
    assert quiet.asked() == ["give_up 3"]


@pytest.mark.parametrize("verb", ["publish_fresh", "pull", "dispatch_fresh", "combine"])
def test_a_launch_that_fails_ends_the_buffer_and_tells_the_peers(quiet, verb):
    out = quiet.dispatch()
    calls = {
        "publish_fresh": quiet.dispatch,
        "pull": quiet.dispatch,
        "dispatch_fresh": lambda: quiet.dispatch(max_rows=32),
        "combine": lambda: hybrid_ep.combine(quiet.buffer, out.rows, out.handle),
    }
    quiet.fake.fails = {verb: "kernel launch: out of memory"}
    with pytest.raises(RuntimeError, match=r"^kernel launch: out of memory$"):
        calls[verb]()
    quiet.fake.fails = {}
    assert quiet.asked()[-1] == "give_up 1"
    for call in (*calls.values(), quiet.buffer.check):
        with pytest.raises(RuntimeError, match=r"failed half way \(RuntimeError: kernel launch"):
            call()
    assert quiet.asked() == []


def test_what_the_runtime_refuses_does_not_end_the_buffer(quiet):
    quiet.fake.refuses = {"dispatch_fresh": "bytes of a row must be at most 64, got 128"}
    with pytest.raises(ValueError, match="at most 64, got 128"):
        quiet.dispatch(max_rows=32)
    quiet.fake.refuses = {}
    quiet.dispatch(max_rows=32)
    assert quiet.asked() == ["dispatch_fresh", "dispatch_fresh"]


def test_a_second_thread_is_refused_while_an_exact_dispatch_waits(quiet):
    told = []

    def call_from_another_thread():
        def call():
            try:
                quiet.dispatch(max_rows=32)
            except RuntimeError as error:
                told.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    quiet.fake.while_waiting = call_from_another_thread
    quiet.dispatch()
    assert quiet.asked() == ["publish_fresh", "await_offsets", "pull"]
    assert "another thread is in a call of this Buffer" in told[0]


def fault(**words: int) -> SimpleNamespace:
    """What a kernel notes; unless others are given, the words are of a dispatch, call 2."""
    usual = {"phase": 1, "peer": 0, "channel": 0, "epoch": 2, "seen": 0, "mine": 0}
    return SimpleNamespace(**{**usual, **words})


ANNOUNCEMENTS = {  # the peer's, mine: verb, route, phase, signature
    "another_phase": (
        (9, 4, 2, 77),
        (9, 4, 1, 77),
        "the peer makes another call; here: dispatch, call 9 of the Buffer; there: combine, call 9 "
        "of the Buffer",
    ),
    "another_layout": (
        (9, 3, 1, 77),
        (9, 4, 1, 77),
        "the peer makes this call with another layout; here: dispatch, call 9 of the Buffer, the "
        "layout of route 4; there: dispatch, call 9 of the Buffer, the layout of route 3",
    ),
    "other_sizes": (
        (9, 4, 1, 76),
        (9, 4, 1, 77),
        "the peer makes this call with other sizes, dtypes or num_sms; here and there: dispatch, "
        "call 9 of the Buffer; compare num_sms, and the shapes and dtypes of x, scales or weights "
        "on both ranks",
    ),
}


@pytest.mark.parametrize("theirs, mine, text", ANNOUNCEMENTS.values(), ids=ANNOUNCEMENTS)
def test_announcements_that_differ_are_told_in_words(quiet, theirs, mine, text):
    base = settings.layout_base(quiet.buffer.number)
    seen, mine = (v << 40 | r + base << 18 | p << 16 | s for v, r, p, s in (theirs, mine))
    quiet.fake.left_behind = fault(kind=2, seen=seen, mine=mine)
    with pytest.raises(hybrid_ep.PeerError, match=text):
        quiet.dispatch()


def test_a_peer_that_gave_up_is_named_with_its_reason(quiet):
    quiet.fake.left_behind = fault(kind=4, seen=1)
    with pytest.raises(hybrid_ep.PeerError, match="no more calls, because it ran out of memory"):
        quiet.dispatch()


def test_a_gpu_with_less_shared_memory_than_a_block_needs(world):
    for told in world(1).run(fake_nvlink.build_on_a_gpu_with_shared_memory, 99 << 10):
        assert told == (
            "the nvlink backend cannot run: rank 0: it needs 232448 bytes of shared memory per "
            "block, the GPU has 101376"
        )


BEYOND = {  # rules of the kernels alone; a tensor of one expanded value has any size
    "scales_of_40000_bytes": (
        lambda q: hybrid_ep.dispatch(
            q.buffer,
            q.inputs.x.to(torch.float8_e4m3fn),
            q.inputs.topk_idx,
            scales=torch.zeros(1, 40000, dtype=torch.uint8).expand(len(q.inputs.x), -1),
        ),
        "scales must have at most 16384 bytes per token, got 40000",
    ),
    "rows_of_more_than_64_GiB": (
        lambda q: hybrid_ep.combine(
            q.buffer,
            torch.zeros(1, q.buffer.hidden, dtype=torch.bfloat16).expand(2**31, -1),
            q.handle_of(2**31),
        ),
        "rows must have at most 68719476736 bytes in all, got 137438953472",
    ),
    "max_rows_beyond_int32": (
        lambda q: q.dispatch(max_rows=2**31),
        "max_rows must be at most 2147483647, got 2147483648",
    ),
    "padding_beyond_int32": (
        lambda q: q.dispatch(align=2**29),
        "align times the 4 experts of a rank must be at most 1073741823, got align=536870912",
    ),
}


@pytest.mark.parametrize("call, text", BEYOND.values(), ids=BEYOND)
def test_sizes_beyond_the_kernels_arithmetic_are_refused(quiet, call, text):
    with pytest.raises(ValueError, match=text):
        call(quiet)
    assert quiet.asked() == []


def test_layouts_are_numbered_on_after_a_restore_and_apart_in_another_buffer(world):
    made, restored, other = world(1).run(fake_nvlink.numbers_of_layouts)[0]
    assert (made[0], restored) == (0, (5, made[1]))
    assert other[1] != made[1]


def test_what_an_earlier_call_left_is_raised_before_anything_is_sent(quiet):
    out = quiet.dispatch()
    quiet.asked()
    quiet.fake.left_behind = fault(kind=1, channel=5)
    for call in (
        quiet.dispatch,
        lambda: quiet.dispatch(handle=out.handle),
        lambda: hybrid_ep.combine(quiet.buffer, out.rows, out.handle),
    ):
        with pytest.raises(hybrid_ep.PeerError, match=r"dispatch \(call 2"):
            call()
    assert quiet.asked() == []


def test_an_error_that_was_caught_keeps_no_backend_alive(quiet):
    quiet.fake.left_behind = fault(kind=3, phase=0, peer=3, channel=1, epoch=1, seen=99)
    backend = weakref.ref(quiet.buffer.communicator.backend)
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(UnknownExpert, match="got 99 at token 3, top-k slot 1"):
                backend().check()
        assert quiet.asked() == ["give_up 4"], "peers are told once"
        del quiet.buffer
        assert backend() is None
    finally:
        gc.enable()


def test_slime_nothing_to_free_needs_no_gpu():
    extension = pytest.importorskip(
        "hybrid_ep._nvlink", reason="hybrid_ep._nvlink was not built: that takes nvcc"
    )
    extension.free_unread_memory()


# ---- the modes and defaults of torch

SIZINGS = pytest.mark.parametrize("sizing", [{}, {"max_rows": 24}], ids=["exact", "bounded"])


@SIZINGS
@pytest.mark.parametrize("mode", tensors.MODES)
def test_kernels_replay_a_handle_of_inference_in_training(quiet, mode, sizing):
    with tensors.MODES[mode]():
        first = quiet.dispatch(**sizing)
        y = hybrid_ep.combine(quiet.buffer, first.rows, first.handle, weights=first.weights)
    assert first.rows.is_inference() == y.is_inference() == (mode == "inference_mode")
    quiet.inputs.x.requires_grad_()
    quiet.asked()
    out = quiet.dispatch(handle=first.handle)
    scale = torch.ones(1, requires_grad=True)
    y = hybrid_ep.combine(quiet.buffer, out.rows, out.handle, weights=out.weights)
    ((scale * out.offsets).sum() + y.float().sum()).backward()
    assert quiet.asked() == ["dispatch", "combine", "combine_backward", "combine"]
    given = quiet.given("Summed")
    assert given["words"] == first.handle.layout.data_ptr(), "the layout was copied"
    assert quiet.inputs.x.grad.shape == quiet.inputs.x.shape


@SIZINGS
@pytest.mark.parametrize("default", tensors.DEFAULTS)
def test_kernels_under_another_default_device_or_dtype(quiet, default, sizing):
    quiet.inputs.x.requires_grad_()
    grad = torch.ones_like(quiet.inputs.x)
    with tensors.defaults(default):
        out = quiet.dispatch(**sizing)
        y = hybrid_ep.combine(quiet.buffer, out.rows, out.handle, weights=out.weights)
        y.backward(grad)
        made = [*out[:2], *out[3:5], y, out.handle.layout, quiet.inputs.x.grad]
        made += [out.handle.overflow, out.handle.required_rows]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert [t.dtype for t in made[:5]] == [
        torch.bfloat16,
        torch.float32,
        torch.int32,
        torch.int32,
        torch.bfloat16,
    ]
