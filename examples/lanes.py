"""Communication on a stream of its own: what a model needs beside dispatch and combine.

    lane     D_a  D_b  C_a  C_b           D dispatch, C combine, on a stream of high priority
    caller        E_a  E_b  ...           E experts, and whatever the caller does next

Without CUDA there are no streams: the same calls are made in the same order, one after the other.
docs/overlap.md explains the recipe; examples/overlap.py tries it, examples/lm uses it in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only


class Lane:
    """A stream for communication beside the caller's.

    Its backward runs on the same stream: autograd runs each node where its forward ran, and orders
    gradients that go from one stream to another. All parameters belong to the caller's stream.

    Args:
        device: of this rank.
        beside: False: no stream, everything runs where it is called, as it does without CUDA.
    """

    def __init__(self, device: torch.device, *, beside: bool = True) -> None:
        self.stream = None
        if beside and device.type == "cuda":
            # blocks that wait on a stream of higher priority are placed on SMs first
            self.stream = torch.cuda.Stream(device, priority=-1)

    def now(self) -> torch.cuda.Event | None:
        """A moment of the caller's stream, for ``start``: all that was queued so far is done."""
        return None if self.stream is None else torch.cuda.current_stream().record_event()

    def start(
        self,
        function: Callable[..., Any],
        *inputs: Any,
        since: torch.cuda.Event | None = None,
    ) -> Arrival:
        """Call ``function(*inputs)`` on the lane.

        Args:
            function: queues work on the current stream; no parameter of the model is in it.
            inputs: tensors, or nests of them, that the caller's stream has made.
            since: the moment from which the inputs are ready; None: now.
        """
        if self.stream is None:
            return Arrival(function(*inputs), None)
        self.stream.wait_event(since or self.now())
        _record(inputs, self.stream)  # their memory may be freed before the lane has read them
        with torch.cuda.stream(self.stream):
            return Arrival(function(*inputs), self.stream.record_event())


@dataclass(frozen=True)
class Arrival:
    """What a call on a lane returns once it has ended."""

    result: Any
    ended: torch.cuda.Event | None

    def wait(self) -> Any:
        """The result, for the current stream, which waits; the host does not."""
        if self.ended is not None:
            torch.cuda.current_stream().wait_event(self.ended)
            _record(self.result, torch.cuda.current_stream())
        return tree_map_only(Tensor, recompute_from, self.result)


def _record(nest: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that the stream uses tensors of another stream's memory."""
    for tensor in tree_iter(nest):
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            tensor.record_stream(stream)


def recompute_from(tensor: Tensor) -> Tensor:
    """Identity, in whose backward an activation checkpoint begins to recompute.

    A recomputation runs on the stream that is current when the first saved tensor is asked for, and
    behind what the node that asks waits for. This node saves a tensor and is on the stream of its
    caller. Made last in a checkpointed function, it is the first node of its backward.
    """
    return _Arrived.apply(tensor) if tensor.requires_grad else tensor


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor.new_empty(0))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _ = ctx.saved_tensors
        return grad


def in_turns(
    lane: Lane,
    parts: Iterable[tuple[Any, ...]],
    dispatch: Callable[..., Any],
    experts: Callable[[Any], Tensor],
    combine: Callable[[Tensor, Any], Tensor],
    *,
    host_waits: bool,
) -> list[Arrival]:
    """Dispatch, experts and combine of each part, the communication of one beside the next.

    A call that is launched before the products beside it gets its SMs first. But a dispatch of
    exact size holds the host until the GPU has routed, so what runs beside it must be queued
    before:

        host_waits   all parts are made, D_a, E_a, D_b, C_a, E_b, C_b
        else         a is made, D_a, b is made, D_b, E_a, C_a, E_b, C_b

    Args:
        lane: for dispatch and combine.
        parts: arguments of each dispatch, perhaps made when they are asked for.
        dispatch: ``dispatch(*part)``.
        experts: of the result of dispatch; returns the rows for combine.
        combine: ``combine(rows, result of dispatch)``.
        host_waits: whether a dispatch holds the host.

    Returns:
        list: the result of combine of each part.
    """

    def compute(dispatched: Arrival) -> tuple[Tensor, Any, torch.cuda.Event | None]:
        arrived = dispatched.wait()
        return experts(arrived), arrived, lane.now()

    def launch(computed: tuple[Tensor, Any, torch.cuda.Event | None] | None) -> list[Arrival]:
        if computed is None:
            return []
        rows, arrived, since = computed
        return [lane.start(combine, rows, arrived, since=since)]

    combined: list[Arrival] = []
    computed = None
    if host_waits:
        ready = [(part, lane.now()) for part in parts]
        for part, since in ready:
            dispatched = lane.start(dispatch, *part, since=since)
            combined += launch(computed)
            computed = compute(dispatched)
    else:
        for dispatched in [lane.start(dispatch, *part) for part in parts]:
            combined += launch(computed)
            computed = compute(dispatched)
    return combined + launch(computed)


CAN_FREE = hasattr(torch._C, "_set_sm_carveout_experimental")


class FreeSms:
    """Matrix products between two points of a model leave SMs free, forward and backward.

    The setting is torch's, experimental, and holds for the whole process. It acts on cuBLASLt and
    on grouped products, so cuBLASLt is preferred between the points. Outside of them both settings
    are as they were before.

    Args:
        sms: how many; 0: none, and nothing is set.
    """

    def __init__(self, sms: int) -> None:
        if sms and not CAN_FREE:
            raise ValueError(f"sms must be 0 with torch {torch.__version__}, got {sms}")
        self._sms, self._is_backward = sms, False
        self._has_blas = torch.cuda.is_available()
        self._before: tuple[Any, Any] | None = None  # the settings outside, while inside

    def begin(self, x: Tensor) -> Tensor:
        """From here on; the identity.

        Raises:
            ValueError: gradients are recorded and ``x`` requires none: the backward of this point,
                where products stop to leave SMs free, would never run.
        """
        if not self._sms:
            return x
        if torch.is_grad_enabled() and not x.requires_grad:
            raise ValueError(
                "x of FreeSms.begin must require a gradient, got one that requires none: begin "
                "behind a parameter, or under torch.no_grad()"
            )
        return _Turn.apply(x, self, True)

    def end(self, y: Tensor) -> Tensor:
        """Up to here; the identity, of what was computed from the result of ``begin``."""
        return _Turn.apply(y, self, False) if self._sms else y

    def reset(self) -> None:
        """Restore the settings, after a forward or a backward that may have ended in between."""
        self._is_backward = False
        self._set(is_between=False)

    def turn(self, is_begin: bool, is_backward: bool) -> None:
        """Pass one of the points, in either direction."""
        if is_backward:
            self._is_backward = not is_begin
        # a recomputation passes both points in the middle of the backward, which goes on behind it
        self._set(is_between=self._is_backward if is_backward else is_begin or self._is_backward)

    def _set(self, *, is_between: bool) -> None:
        if is_between == (self._before is not None):
            return
        if is_between:
            self._before = torch._C._get_sm_carveout_experimental(), self._prefer("cublaslt")
            torch._C._set_sm_carveout_experimental(self._sms)
        else:
            (sms, blas), self._before = self._before, None
            torch._C._set_sm_carveout_experimental(sms)
            self._prefer(blas)

    def _prefer(self, blas: Any) -> Any:
        """Prefer this library for products; returns the one that was preferred before."""
        if not self._has_blas:
            return None
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(blas)
        return before


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sms: FreeSms, is_begin: bool) -> Tensor:
        ctx.sms, ctx.is_begin = sms, is_begin
        sms.turn(is_begin, is_backward=False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.sms.turn(ctx.is_begin, is_backward=True)
        return grad, None, None
