"""The verbs over CUDA kernels: what the nvlink and the nvshmem backend have in common.

Python checks and owns the tensors; a runtime of ``csrc/`` gets their addresses, as tuples of the
fields that ``csrc/kernels/verbs.h`` lists, and launches the kernels on the current stream. The host
waits only for M, only without ``max_rows``, and while its tokens are being published; with
``max_rows`` route and dispatch are one call.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, float32, int32

from hybrid_ep.backends import Route, endings
from hybrid_ep.backends.empty import Empty, empty_on, part
from hybrid_ep.backends.streams import StreamOrder
from hybrid_ep.backends.trace import Event
from hybrid_ep.backends.turns import Turn
from hybrid_ep.errors import GIVE_UP_REASONS, PeerError, give_up_reason
from hybrid_ep.limits import MIN_CAPABILITY, ROW_ALIGN, beyond

if TYPE_CHECKING:
    from hybrid_ep.buffer import Buffer

_PHASES = ("route", "dispatch", "combine", "combine")  # Phase in csrc/layout/buffer_layout.h
# FaultKind in csrc/layout/runtime_state.h
_OTHER_CALL, _BAD_EXPERT, _PEER_GAVE_UP, _IN_VAIN = 2, 3, 4, 5
_DTYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)
_NUMBER_OF_DTYPE = {dtype: number for number, dtype in enumerate(_DTYPES, start=1)}
_SUM_TYPES = {torch.bfloat16: 0, torch.float16: 1, float32: 2}
_MAIL_LIFETIME = 128  # tickets; half the slots of csrc/call_state.h
_DENSE = (1,)  # stride of a vector
_WORD = 4  # bytes
_EMPTY = 16  # the address of an empty tensor that is there: 0 means none
_NO_ROWS = (0, 0, 0, 0)  # a Received
_ROUTES = (1 << 22) - 1  # the bits of a route's number in an announcement
_REQUIRED_ROWS = 2  # its word in a handle's layout, csrc/layout/handle_layout.h

Fields = tuple[int, ...]


def what_is_lacking(backend: str, buffer: Buffer, load: Callable[[], Any]) -> str | None:
    """What a backend of CUDA kernels lacks on this rank; ``load`` gets its extension."""
    if buffer.device.type != "cuda":
        return f"it needs a CUDA device, the Buffer is on {buffer.device}"
    try:
        extension = load()
    except ImportError as error:
        return str(error)
    capability = torch.cuda.get_device_capability(buffer.device)
    if capability < MIN_CAPABILITY:
        needed, found = ("{}.{}".format(*version) for version in (MIN_CAPABILITY, capability))
        return f"it needs compute capability {needed} (Hopper) or newer, the GPU has {found}"
    shared = extension.shared_memory_per_block(buffer.device.index or 0)
    if shared < extension.SHARED_MEMORY:
        return (
            f"it needs {extension.SHARED_MEMORY} bytes of shared memory per block, the GPU has "
            f"{shared}"
        )
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


def layout_base(number: int) -> int:
    """What the layouts of a Buffer are numbered from, so that those of two are told apart."""
    return number % 64 << 16


def num_sms(device: torch.device) -> int:
    """The SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def runtime_settings(buffer: Buffer, most_sms: int) -> dict[str, Any]:
    """What a runtime is told, by the names of ``csrc/config.h``: the Config and the sizes.

    Args:
        buffer: whose runtime it is.
        most_sms: the SMs of the GPU that has the fewest; channels are counted by flags, so all
            ranks have as many.
    """
    topology = buffer.topology
    settings = vars(buffer.config) | {
        name: min(getattr(buffer.config, name), most_sms)
        for name in ("num_sms_publish", "num_sms_dispatch", "num_sms_combine")
    }
    return settings | {
        "device": buffer.device.index or 0,
        "rank": topology.rank,
        "num_ranks": topology.num_ranks,
        "num_nodes": topology.num_nodes,
        "ranks_per_node": topology.ranks_per_node,
        "num_experts": buffer.num_experts,
        "max_tokens": buffer.max_tokens,
        "topk": buffer.topk,
        "row_capacity": buffer.row_capacity,
        "inbox_row_bytes": buffer.inbox_row_bytes,
        "num_routes": buffer.last_call,
        "layout_base": layout_base(buffer.number),
    }


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

    _alive: ClassVar[weakref.WeakSet[KernelBackend]] = weakref.WeakSet()  # of this process
    _runtime: Any = None
    _end: weakref.finalize | None = None
    _broken: str | None = None  # why no call can be made any more, if it is this rank's doing
    layout_size: int

    def _remember(self, buffer: Buffer) -> None:
        """What the verbs need to know, whatever runtime is under them."""
        endings.finish_kept()
        self._alive.add(self)
        self._rank = buffer.topology.rank
        self._num_nodes = buffer.topology.num_nodes
        self._number = buffer.number
        self._num_experts = buffer.num_experts
        self._num_local_experts = buffer.num_local_experts
        self._allocator = empty_on(buffer.device)
        self._topk = buffer.topk
        self._timeout_s = buffer.config.timeout_s
        self._tickets: dict[int, int] = {}  # address of a layout -> where its M arrives
        self._last_ticket = 0
        self._streams = StreamOrder(buffer.device)
        self._turn = Turn()

    def _raise_together(self, failures: list[str | None]) -> None:
        try:
            raise_together(failures)
        except RuntimeError:
            self.destroy()
            raise

    def _ends_with(self, give_back: Callable[[], None]) -> None:
        """What is done once, when the backend is destroyed or dropped; not at the program's end."""
        self._end = weakref.finalize(self, endings.finish, give_back)
        self._end.atexit = False

    def destroy(self) -> None:
        if self._end is not None:
            self._end()

    @property
    def last_call(self) -> int:
        return self._runtime.num_routes()

    def check(self) -> None:
        if self._broken is not None:
            raise RuntimeError(self._broken)
        fault = self._runtime.fault()
        if fault is None:
            return
        if fault.kind == _BAD_EXPERT:
            value = fault.seen - (1 << 64) if fault.seen >> 63 else fault.seen
            raise ValueError(
                f"topk_idx must lie in [-1, num_experts={self._num_experts}), got {value} at token "
                f"{fault.peer}, slot {fault.channel}; this Buffer cannot be used any more"
            )
        if fault.kind == _OTHER_CALL:
            reason = _difference(fault.seen, fault.mine, layout_base(self._number))
        elif fault.kind == _PEER_GAVE_UP:
            reason = f"the peer makes no more calls, {GIVE_UP_REASONS[fault.seen]}"
        elif fault.kind == _IN_VAIN:
            reason = "no signal: another rank has given up waiting for it"
        else:
            last = fault.seen >> 16
            reason = f"no signal within {self._timeout_s:g} s, its last was in call {last}"
            if self._num_nodes > 1 and len(self._alive) > 1:
                reason += (
                    "; across nodes, calls of several Buffers at once must have the same order on "
                    "all ranks"
                )
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
        with self._turn:
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
            wants_mail = max_rows is None
            ticket = self._launch(self._runtime.route, choices, new_layout, wants_mail, stream)
            if wants_mail:
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
        with self._turn:
            stream = self._begin(layout)
            sent = _Sent(x, weights, scales, layout)
            if num_rows is None:
                return self._move_exactly(sent, layout, stream)
            moved, received = sent.make_rows(self._allocator(), num_rows)
            self._launch(self._runtime.dispatch, sent.fields, received, stream)
            return moved

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
        with self._turn:
            stream = self._begin()
            topk_idx, choices = _choices(topk_idx, max_rows, align)
            experts = self._num_local_experts
            empty = self._allocator()
            layout = empty((self.layout_size,), _DENSE, int32)
            sizes = empty((2 * experts + 2,), _DENSE, int32)
            at = sizes.data_ptr()
            new_layout = (layout.data_ptr(), at, at + 4 * experts, at + 4 * (2 * experts + 1))
            sent = _Sent(x, weights, scales, layout)
            if max_rows is None:
                moved = self._move_exactly(sent, layout, stream, (choices, new_layout))
            else:
                moved, received = sent.make_rows(empty, max_rows)
                verb = self._runtime.dispatch_fresh
                self._launch(verb, choices, new_layout, sent.fields, received, stream)
            counts = part(sizes, (experts,), _DENSE, 0)
            offsets = part(sizes, (experts + 1,), _DENSE, experts)
            return layout, counts, offsets, sizes, *moved

    def _move_exactly(
        self,
        sent: _Sent,
        layout: Tensor,
        stream: int,
        routing: tuple[Fields, Fields] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A dispatch in two launches, with the host's wait for the number of rows between them.

        With ``routing`` the layout is made first, in the same call. If the rank gets no memory for
        the rows, or is interrupted, it ends the call without rows: the peers need not know.
        """
        try:
            if routing is None:
                self._launch(self._runtime.publish, sent.fields, stream)
                num_rows = self._required_rows(layout, stream)
            else:
                verb = self._runtime.publish_fresh
                self._last_ticket = self._launch(verb, *routing, sent.fields, stream)
                num_rows = self._await_mail(self._last_ticket, stream)
            moved, received = sent.make_rows(self._allocator(), num_rows)
            self._launch(self._runtime.pull, received, stream)
        except BaseException:  # an interrupt may come anywhere, so the runtime is asked
            if self._broken is None and self._runtime.is_half_made:
                self._launch(self._runtime.pull, _NO_ROWS, stream)
            raise
        return moved

    def combine(
        self,
        rows: Tensor,
        weights: Tensor | None,
        values: Tensor | None,
        layout: Tensor,
        *,
        num_tokens: int,
    ) -> tuple[Tensor, Tensor | None]:
        with self._turn:
            stream = self._begin(layout)
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
                rows.shape[0],
                _SUM_TYPES[rows.dtype],
                row_bytes,
                _address(weights),
                _address(values),
                y.data_ptr(),
                _address(home_values),
                num_tokens,
                layout.data_ptr(),
            )
            self._launch(self._runtime.combine, summed, stream)
            return y, home_values

    # ---- shared by the verbs

    def _begin(self, layout: Tensor | None = None) -> int:
        """Raise what an earlier call left; order this call behind the last, whatever its stream."""
        if self._broken is None and self._runtime.is_half_made:  # and nothing could end it
            self._give_up(RuntimeError("an interrupt between the parts of an exact dispatch"))
        self.check()
        endings.finish_kept()
        stream = self._streams.current()
        if layout is not None and self._streams.are_several:
            # made on another stream, perhaps, whose work may get its memory when it is dropped
            layout.record_stream(self._streams.last)
        return stream

    def _launch(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        """Call the runtime. If it fails half way, no other call may follow, and peers are told.

        Raises:
            ValueError: it refused the arguments; nothing was sent.
            RuntimeError: what CUDA says.
        """
        try:
            return verb(*arguments)
        except ValueError:
            raise
        except Exception as error:
            self._give_up(error)
            raise

    def _give_up(self, error: Exception) -> None:
        with contextlib.suppress(RuntimeError):  # CUDA answers nothing any more
            if torch.cuda.is_current_stream_capturing():
                return  # nothing has run
        self._broken = (
            f"an earlier call failed half way ({type(error).__name__}: {error}), so this Buffer "
            "cannot be used any more; destroy() it on every rank"
        )
        with contextlib.suppress(RuntimeError):
            self._runtime.give_up(give_up_reason(error))

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


class _Sent:
    """What a dispatch sends: the fields of a ``Sent``, and the tensors whose addresses they hold.

    Keep it until the call, and make the rows by it.
    """

    __slots__ = ("_kept", "_scales", "_weighted", "_x", "fields")

    def __init__(
        self, x: Tensor, weights: Tensor | None, scales: Tensor | None, layout: Tensor
    ) -> None:
        x, address, x_stride = _aligned(x)
        num_tokens, hidden = x.shape
        weights_at = weights_stride = scales_at = scale_bytes = 0
        dtypes = _NUMBER_OF_DTYPE[x.dtype]
        if weights is not None:
            weights_stride, step = weights.stride()
            if step != 1:
                weights = weights.contiguous()
                weights_stride = weights.shape[1]
            weights_at = weights.data_ptr() or _EMPTY
        if scales is not None:
            scales = _in_words(scales)
            scale_bytes = scales.shape[1] * scales.element_size()
            scales_at = scales.data_ptr() or _EMPTY
            dtypes |= _NUMBER_OF_DTYPE[scales.dtype] << 8
        self._x, self._weighted, self._scales = x, weights is not None, scales
        self._kept = weights
        self.fields = (
            address,
            x_stride,
            hidden * x.element_size(),
            weights_at,
            weights_stride,
            scales_at,
            scale_bytes,
            scale_bytes,
            dtypes,
            num_tokens,
            layout.data_ptr(),
        )

    def make_rows(
        self, empty: Empty, num_rows: int
    ) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], Fields]:
        """Rows, their weights and scales, and the fields of their ``Received``."""
        hidden = self._x.shape[1]
        row_weights = row_scales = None
        row_weights_at = row_scales_at = 0
        rows = empty((num_rows, hidden), (hidden, 1), self._x.dtype)
        if self._weighted:
            row_weights = empty((num_rows,), _DENSE, float32)
            row_weights_at = row_weights.data_ptr() or _EMPTY
        if self._scales is not None:
            num_scales = self._scales.shape[1]
            row_scales = empty((num_rows, num_scales), (num_scales, 1), self._scales.dtype)
            row_scales_at = row_scales.data_ptr() or _EMPTY
        received = (rows.data_ptr(), row_weights_at, row_scales_at, num_rows)
        return (rows, row_weights, row_scales), received


def _difference(theirs: int, mine: int, base: int) -> str:
    """In words, what two announcements of one verb say (csrc/layout/announcement.h)."""
    if mine == 0:  # a flag tells less
        return "the peer makes this call with other sizes or dtypes"
    phases = [_PHASES[word >> 16 & 3] for word in (theirs, mine)]
    routes = [(word >> 18) - base & _ROUTES for word in (theirs, mine)]
    if phases[0] != phases[1]:
        return f"the peer makes another call: {phases[0]}, and here it is {phases[1]}"
    if routes[0] != routes[1]:
        return (
            f"the peer makes this call with another layout: that of route {routes[0]}, and here "
            f"it is that of route {routes[1]}"
        )
    return "the peer makes this call with other sizes or dtypes"


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


def _in_words(scales: Tensor) -> Tensor:
    """Dense scales, at an address from which 4 bytes can be read at once."""
    scales = scales.contiguous()
    return scales.clone() if scales.data_ptr() % _WORD else scales


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
