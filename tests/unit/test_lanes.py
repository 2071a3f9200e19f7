"""examples/lanes.py on streams that only note what is known to have ended on each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from examples.lanes import CAN_FREE, FreeSms, Lane, in_turns

pytestmark = pytest.mark.filterwarnings("ignore:Setting the SM carveout")


class Stream:
    """What ended before anything that is queued on it from now on."""

    def __init__(self, *_: object, priority: int = 0) -> None:
        self.priority, self.known = priority, frozenset()

    def record_event(self) -> frozenset[str]:
        return self.known

    def wait_event(self, event: frozenset[str]) -> None:
        self.known |= event


class Streams:
    """In place of torch.cuda's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.caller = Stream()
        self._current = [self.caller]
        self.seen: dict[str, tuple[Stream, frozenset[str]]] = {}
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self._current[-1])
        monkeypatch.setattr(torch.cuda, "stream", self._enter)

    @contextlib.contextmanager
    def _enter(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def work(self, name: str) -> str:
        """Queue it on the current stream."""
        stream = self._current[-1]
        self.seen[name] = stream, stream.known
        stream.known |= {name}
        return name

    def known(self, name: str) -> frozenset[str]:
        return self.seen[name][1]


@pytest.mark.parametrize("host_waits", [True, False])
def test_calls_wait_for_their_inputs_and_for_nothing_else(monkeypatch, host_waits):
    streams = Streams(monkeypatch)
    lane = Lane(torch.device("cuda"))
    assert lane.stream.priority < 0

    def parts() -> Iterator[tuple[str]]:
        for half in "ab":
            streams.work(f"mix_{half}")
            yield (half,)

    combined = in_turns(
        lane,
        parts(),
        lambda half: streams.work(f"D_{half}"),
        lambda arrived: streams.work(f"E_{arrived[-1]}"),
        lambda rows, arrived: streams.work(f"C_{arrived[-1]}"),
        host_waits=host_waits,
    )
    for name, (stream, _) in streams.seen.items():
        assert stream is (lane.stream if name[0] in "DC" else streams.caller)
    for half in "ab":
        assert f"mix_{half}" in streams.known(f"D_{half}")
        assert f"D_{half}" in streams.known(f"E_{half}")
        assert f"E_{half}" in streams.known(f"C_{half}")
    assert "mix_b" not in streams.known("D_a"), "D_a beside what makes b"
    assert "D_b" not in streams.known("E_a"), "D_b beside E_a"
    assert "E_a" not in streams.known("D_b")
    assert "E_b" not in streams.known("C_a"), "C_a beside E_b"
    assert "C_a" not in streams.known("E_b")
    order = list(streams.seen)
    assert (order.index("E_a") < order.index("D_b")) == host_waits
    assert (order.index("mix_b") < order.index("D_a")) == host_waits
    for half, arrival in zip("ab", combined, strict=True):
        assert f"C_{half}" not in streams.caller.known
        assert arrival.wait() == f"C_{half}"
        assert f"C_{half}" in streams.caller.known


def test_a_moment_is_before_what_was_queued_after_it(monkeypatch):
    streams = Streams(monkeypatch)
    lane = Lane(torch.device("cuda"))
    streams.work("inputs")
    ready = lane.now()
    streams.work("shared")
    lane.start(streams.work, "early", since=ready)
    lane.start(streams.work, "late")
    assert streams.known("early") == {"inputs"}
    assert streams.known("late") == {"inputs", "shared", "early"}


def test_without_cuda_there_is_no_stream_and_a_gradient_passes():
    for lane in (Lane(torch.device("cpu")), Lane(torch.device("cuda"), beside=False)):
        assert lane.stream is None and lane.now() is None
        x = torch.ones(3, requires_grad=True)
        y, number = lane.start(lambda x: (x * 2, 7), x).wait()
        assert number == 7
        y.sum().backward()
        assert x.grad.tolist() == [2.0] * 3


def test_a_recomputation_begins_where_the_result_arrives():
    """Else it would run on the lane, where the first node of the backward is."""
    lane, made = Lane(torch.device("cpu")), []

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            made.append("forward")
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            made.append("backward of the call")
            return grad * 2 + 0 * ctx.saved_tensors[0]

    x = torch.ones(3, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(
        lambda x: lane.start(Call.apply, x).wait(), x, use_reentrant=False
    )
    y.sum().backward()
    assert made == ["forward", "forward", "backward of the call"]
    assert x.grad.tolist() == [2.0] * 3


@pytest.mark.skipif(not CAN_FREE, reason="this torch has no such setting")
@pytest.mark.parametrize("inside", [True, False], ids=["points_inside", "checkpoint_around_more"])
def test_products_between_two_points_leave_sms_free(inside):
    """In the forward, the recomputation and the backward, and nowhere else."""
    sms, seen = FreeSms(16), []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.save_for_backward(x)
            ctx.name = name
            seen.append((name, torch._C._get_sm_carveout_experimental()))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            _ = ctx.saved_tensors
            seen.append((f"{ctx.name}'", torch._C._get_sm_carveout_experimental()))
            return grad * 2, None

    def block(x):
        x = Product.apply(x, "before") if not inside else x
        x = sms.end(Product.apply(sms.begin(x), "between"))
        return Product.apply(x, "behind") if not inside else x

    x = torch.ones(3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert torch._C._get_sm_carveout_experimental() is None
    between = ("between", 16)
    if inside:
        assert seen == [between, between, ("between'", 16)]
    else:
        forward = [("before", None), between, ("behind", None)]
        assert seen == [*forward, *forward, ("behind'", None), ("between'", 16), ("before'", None)]
    assert sms.begin(x) is not x and FreeSms(0).begin(x) is x
    torch._C._set_sm_carveout_experimental(None)


@pytest.fixture
def carveout():
    """Reads torch's setting, which is 24 before the test."""
    if not CAN_FREE:
        pytest.skip("this torch has no such setting")
    torch._C._set_sm_carveout_experimental(24)
    yield torch._C._get_sm_carveout_experimental
    torch._C._set_sm_carveout_experimental(None)


def test_the_setting_from_before_is_restored(carveout):
    sms, x = FreeSms(16), torch.ones(3, requires_grad=True)
    y = sms.begin(x) * 2
    assert carveout() == 16
    y = sms.end(y)
    assert carveout() == 24
    y.sum().backward()
    assert carveout() == 24


def test_reset_restores_it_after_an_exception_between_the_points(carveout):
    sms, x = FreeSms(16), torch.ones(3, requires_grad=True)
    sms.begin(x)  # and end is not reached
    assert carveout() == 16
    sms.reset()
    assert carveout() == 24
    torch._C._set_sm_carveout_experimental(8)
    sms.reset()
    assert carveout() == 8, "nothing to restore"


def test_reset_restores_it_after_a_backward_that_stops_between_the_points(carveout):
    sms, x = FreeSms(16), torch.ones(3, requires_grad=True)
    between = sms.begin(x) * 2
    y = sms.end(between * 3)
    torch.autograd.grad(y.sum(), between)
    assert carveout() == 16
    sms.reset()
    assert carveout() == 24
    sms.end(sms.begin(x) * 2)
    assert carveout() == 24, "no backward is under way"


def test_a_backward_that_would_never_leave_is_refused(carveout):
    sms, x = FreeSms(16), torch.ones(3)
    with pytest.raises(ValueError, match="must require a gradient"):
        sms.begin(x)
    assert carveout() == 24
    with torch.no_grad():
        sms.end(sms.begin(x))
    assert carveout() == 24


def test_cublaslt_is_preferred_between_the_points_alone(monkeypatch, carveout):
    preferred = ["cublas"]

    def prefer(library: str | None = None) -> str:
        preferred.extend([] if library is None else [library])
        return preferred[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    sms, x = FreeSms(16), torch.ones(3, requires_grad=True)
    between = sms.begin(x)
    assert preferred[-1] == "cublaslt"
    sms.end(between)
    assert preferred == ["cublas", "cublaslt", "cublas"]
