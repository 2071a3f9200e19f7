"""The verbs over CUDA kernels: what the nvlink and the nvshmem backend have in common.

Python checks and owns the tensors; a runtime of ``csrc/`` gets their addresses, as tuples of the
fields that ``csrc/verbs.h`` lists, and launches the kernels on the current stream. The host waits
only for M, only without ``max_rows``, and while its tokens are being published; with ``max_rows``
route and dispatch are one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, float32, int32

from hybrid_ep.backends import Route
from hybrid_ep.backends.empty import Empty, empty_on, part
from hybrid_ep.backends.streams import StreamOrder
from hybrid_ep.errors import PeerError
from hybrid_ep.limits import MIN_CAPABILITY, ROW_ALIGN, beyond
from hybrid_ep.trace import Event

if TYPE_CHECKING:
    from hybrid_ep.buffer import Buffer

_PHASES = ("route", "dispatch", "combine", "combine")  # Phase in csrc/layout/buffer_layout.h
_TIMEOUT, _OTHER_CALL, _BAD_EXPERT = 1, 2, 3  # FaultKind in csrc/runtime_state.h
_SUM_TYPES = {torch.bfloat16: 0, torch.float16: 1, float32: 2}
_MAIL_LIFETIME = 128  # tickets; half the slots of csrc/call_state.h
_DENSE = (1,)  # stride of a vector
_EMPTY = 16  # the address of an empty tensor that is there: 0 means none
_REQUIRED_ROWS = 2  # its word in a handle's layout, csrc/layout/handle_layout.h

Fields = tuple[int, ...]


def what_is_lacking(backend: str, buffer: Buffer, load: Callable[[], None]) -> str | None:
    """What a backend of CUDA kernels lacks on this rank; ``load`` gets its extension."""
    if buffer.device.type != "cuda":
        return f"it needs a CUDA device, the Buffer is on {buffer.device}"
    try:
        load()
    except ImportError as error:
        return str(error)
    capability = torch.cuda.get_device_capability(buffer.device)
    if capability < MIN_CAPABILITY:
        needed, found = ("{}.{}".format(*version) for version in (MIN_CAPABILITY, capability))
        return f"it needs compute capability {needed} (Hopper) or newer, the GPU has {found}"
    exceeded = beyond(
        backend,
        num_nodes=buffer.topology.num_nodes,
        ranks_per_node=buffer.topology.ranks_per_node,
        max_tokens=buffer.max_tokens,
        topk=buffer.topk,
        num_experts=buffer.num_experts,
        row_bytes=buffer.hidden * buffer.dtype.itemsize,
        scale_bytes=buffer.scale_bytes,
    )
    return "; ".join(exceeded) or None


def num_sms(device: torch.device) -> int:
    """The SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def raise_together(failures: list[str | None]) -> None:
    """Raise the first rank's failure, on all ranks.

    Raises:
        RuntimeError: there is one.
    """
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RuntimeError(f"rank {rank}: {failure}")


class KernelBackend:
    """The verbs, over whatever ``_runtime`` a backend makes; see the methods of ``Backend``."""

    _runtime: Any = None
    layout_size: int

    def _remember(self, buffer: Buffer) -> None:
        """What the verbs need to know, whatever runtime is under them."""
        self._rank = buffer.topology.rank
        self._num_experts = buffer.num_experts
        self._num_local_experts = buffer.num_local_experts
        self._allocator = empty_on(buffer.device)
        self._topk = buffer.topk
        self._timeout_s = buffer.config.timeout_s
        self._tickets: dict[int, int] = {}  # address of a layout -> where its M arrives
        self._last_ticket = 0
        self._streams = StreamOrder(buffer.device)

    def _raise_together(self, failures: list[str | None]) -> None:
        try:
            raise_together(failures)
        except RuntimeError:
            self.destroy()
            raise

    def destroy(self) -> None:
        if self._runtime is not None:
            self._runtime.destroy()

    def check(self) -> None:
        fault = self._runtime.fault()
        if fault is None:
            return
        if fault.kind == _BAD_EXPERT:
            value = fault.seen - (1 << 64) if fault.seen >> 63 else fault.seen
            raise ValueError(
                f"topk_idx must lie in [-1, num_experts={self._num_experts}), got {value} at token "
                f"{fault.peer}, slot {fault.channel}; this Buffer cannot be used any more"
            )
        peer_call = fault.seen >> 16
        if fault.kind == _OTHER_CALL:
            reason = "the peer makes this call with other sizes or dtypes"
        else:
            reason = f"no signal within {self._timeout_s:g} s, its last was in call {peer_call}"
        raise PeerError(
            rank=self._rank,
            peer=fault.peer,
            phase=_PHASES[fault.phase],
            call=fault.epoch,
            channel=fault.channel,
            reason=reason,
        )

    def take_trace(self) -> list[Event]:
        """What the kernels noted since the last time; waits for the GPU."""
        return [Event(*event) for event in self._runtime.take_trace()]

    # ---- the verbs

    def route(self, topk_idx: Tensor, *, max_rows: int | None, align: int) -> Route:
        stream = self._begin()
        topk_idx, choices = _choices(topk_idx, max_rows, align)
        experts = self._num_local_experts
        empty = self._allocator()
        made = Route(
            empty((self.layout_size,), _DENSE, int32),
            empty((experts,), _DENSE, int32),
            empty((experts + 1,), _DENSE, int32),
            empty((), (), int32),
        )
        new_layout = tuple(map(Tensor.data_ptr, made))
        ticket = self._runtime.route(choices, new_layout, max_rows is None, stream)
        if max_rows is None:
            self._tickets[made.layout.data_ptr()] = self._last_ticket = ticket
        return made

    def dispatch(
        self,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        layout: Tensor,
        *,
        num_rows: int | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        stream = self._begin()
        return self._move(x, weights, scales, layout, num_rows, stream, self._allocator())

    def dispatch_fresh(
        self,
        topk_idx: Tensor,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        *,
        max_rows: int | None,
        align: int,
    ) -> tuple[Tensor | None, ...]:
        stream = self._begin()
        topk_idx, choices = _choices(topk_idx, max_rows, align)
        experts = self._num_local_experts
        empty = self._allocator()
        layout = empty((self.layout_size,), _DENSE, int32)
        sizes = empty((2 * experts + 2,), _DENSE, int32)
        at = sizes.data_ptr()
        new_layout = (layout.data_ptr(), at, at + 4 * experts, at + 4 * (2 * experts + 1))
        rows, row_weights, row_scales = self._move(
            x, weights, scales, layout, max_rows, stream, empty, (choices, new_layout)
        )
        counts = part(sizes, (experts,), _DENSE, 0)
        offsets = part(sizes, (experts + 1,), _DENSE, experts)
        return layout, counts, offsets, sizes, rows, row_weights, row_scales

    def _move(
        self,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        layout: Tensor,
        num_rows: int | None,
        stream: int,
        empty: Empty,
        routing: tuple[Fields, Fields] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A dispatch; with ``routing`` the layout is made first, in the same call."""
        x, address, x_stride = _aligned(x)
        num_tokens, hidden = x.shape
        weights_at = weights_stride = scales_at = num_scales = scale_bytes = 0
        if weights is not None:
            weights_stride, step = weights.stride()
            if step != 1:
                weights = weights.contiguous()
                weights_stride = weights.shape[1]
            weights_at = weights.data_ptr() or _EMPTY
        if scales is not None:
            scales = scales.contiguous()
            num_scales = scales.shape[1]
            scale_bytes = num_scales * scales.element_size()
            scales_at = scales.data_ptr() or _EMPTY
        sent = (
            address,
            x_stride,
            hidden * x.element_size(),
            weights_at,
            weights_stride,
            scales_at,
            scale_bytes,
            scale_bytes,
            num_tokens,
            layout.data_ptr(),
        )
        waits = num_rows is None
        if waits and routing is None:
            self._runtime.publish(sent, stream)
            num_rows = self._required_rows(layout, stream)
        elif waits:
            self._last_ticket = self._runtime.publish_fresh(*routing, sent, stream)
            num_rows = self._await_mail(self._last_ticket, stream)
        row_weights = row_scales = None
        row_weights_at = row_scales_at = 0
        rows = empty((num_rows, hidden), (hidden, 1), x.dtype)
        if weights is not None:
            row_weights = empty((num_rows,), _DENSE, float32)
            row_weights_at = row_weights.data_ptr() or _EMPTY
        if scales is not None:
            row_scales = empty((num_rows, num_scales), (num_scales, 1), scales.dtype)
            row_scales_at = row_scales.data_ptr() or _EMPTY
        received = (rows.data_ptr(), row_weights_at, row_scales_at, num_rows)
        if waits:
            self._runtime.pull(received, stream)
        elif routing is None:
            self._runtime.dispatch(sent, received, stream)
        else:
            self._runtime.dispatch_fresh(*routing, sent, received, stream)
        return rows, row_weights, row_scales

    def combine(
        self,
        rows: Tensor,
        weights: Tensor | None,
        values: Tensor | None,
        layout: Tensor,
        *,
        num_tokens: int,
    ) -> tuple[Tensor, Tensor | None]:
        stream = self._begin()
        rows, address, row_bytes = _aligned(rows.contiguous())
        weights = None if weights is None else weights.contiguous()
        values = None if values is None else values.contiguous()
        empty, hidden = self._allocator(), rows.shape[1]
        y = empty((num_tokens, hidden), (hidden, 1), rows.dtype)
        home_values = None
        if values is not None:
            home_values = empty((num_tokens, self._topk), (self._topk, 1), float32)
        summed = (
            address,
            _SUM_TYPES[rows.dtype],
            row_bytes,
            _address(weights),
            _address(values),
            y.data_ptr(),
            _address(home_values),
            num_tokens,
            layout.data_ptr(),
        )
        self._runtime.combine(summed, stream)
        return y, home_values

    # ---- shared by the verbs

    def _begin(self) -> int:
        """Raise what an earlier call left; order this call behind the last, whatever its stream."""
        self.check()
        return self._streams.current()

    def _required_rows(self, layout: Tensor, stream: int) -> int:
        ticket = self._tickets.pop(layout.data_ptr(), None)
        # a replayed layout has no mail, and one that was routed long ago has lost its own
        if ticket is None or self._last_ticket - ticket >= _MAIL_LIFETIME:
            return int(layout[_REQUIRED_ROWS])
        return self._await_mail(ticket, stream)

    def _await_mail(self, ticket: int, stream: int) -> int:
        num_rows = self._runtime.required_rows(ticket, stream)
        if num_rows is None:
            self.check()
            raise RuntimeError("the GPU made no progress within the deadline of the Buffer")
        return num_rows


def _choices(topk_idx: Tensor, max_rows: int | None, align: int) -> tuple[Tensor, Fields]:
    """The fields of a Choices, and the tensor whose address is among them: keep it until the call.

    Raises:
        ValueError: the size is to be exact in a CUDA graph.
    """
    if max_rows is None and torch.cuda.is_current_stream_capturing():
        raise ValueError("a CUDA graph needs max_rows: without it the host waits for M")
    stride, step = topk_idx.stride()
    if step != 1:
        topk_idx = topk_idx.contiguous()
        stride = topk_idx.shape[1]
    bound = -1 if max_rows is None else max_rows
    size, count = topk_idx.element_size(), topk_idx.shape[0]
    return topk_idx, (topk_idx.data_ptr(), size, stride, count, align, bound)


def _address(tensor: Tensor | None) -> int:
    """0 means none, so an empty tensor, which has no address, gets one that nobody looks at."""
    return 0 if tensor is None else tensor.data_ptr() or _EMPTY


def _aligned(x: Tensor) -> tuple[Tensor, int, int]:
    """Rows whose bytes follow each other and begin where a bulk copy can: x itself if they do.

    Returns:
        tuple: the rows, their address, and the bytes from one to the next.
    """
    stride, step = x.stride()
    stride, address = stride * x.element_size(), x.data_ptr()
    if step == 1 and (stride | address) % ROW_ALIGN == 0:
        return x, address, stride
    x = x.clone(memory_format=torch.contiguous_format)
    return x, x.data_ptr(), x.shape[1] * x.element_size()
