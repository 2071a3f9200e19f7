"""The verbs over CUDA kernels, whatever memory is under them: ``nvlink`` or ``nvshmem``.

Python checks and owns the tensors; a runtime of ``csrc/`` gets their addresses (``arguments``) and
launches the kernels on the current stream. The host waits only for the offsets of the rows, the
last of which is M, only without ``max_rows``, and while its tokens are being published; with
``max_rows`` route and dispatch are one call.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, float32, int32

from hybrid_ep.backends import Moved, Route, endings
from hybrid_ep.backends.cuda import settings
from hybrid_ep.backends.cuda.arguments import (
    DENSE,
    NO_ROWS,
    SUM_TYPES,
    Fields,
    Sent,
    address_of,
    aligned,
    choices_of,
)
from hybrid_ep.backends.cuda.faults import error_of
from hybrid_ep.backends.cuda.trace import Event
from hybrid_ep.backends.empty import empty_on, part
from hybrid_ep.backends.row_dots import scale_rows
from hybrid_ep.backends.streams import StreamOrder
from hybrid_ep.backends.turns import Turn
from hybrid_ep.config import Config
from hybrid_ep.errors import UnknownExpert, give_up_reason
from hybrid_ep.group import Group
from hybrid_ep.layout.handle_layout import find_padding
from hybrid_ep.shape import MAX_SCALED_ROW_BYTES, Shape

_MAIL_LIFETIME = 128  # tickets; half of kMails in csrc/call_state.h
_REQUIRED_ROWS = 2  # its word in a handle's layout, csrc/layout/handle_layout.h


class CudaBackend:
    """See the module; the methods are those of ``Backend``.

    Args:
        make_memory: makes the runtime and the symmetric memory that its kernels know, on all ranks
            or on none: ``nvlink.Memory`` or ``nvshmem.Memory``.
        number: of the Buffer, equal on all ranks.
        last_call: routes of the Buffer that another backend made.

    Raises:
        RuntimeError: the memory of a rank could not be made; on all ranks.
    """

    _alive: ClassVar[weakref.WeakSet[CudaBackend]] = weakref.WeakSet()  # of this process
    _broken: str | None = None  # why no call can be made any more, if it is this rank's doing
    _has_told = False  # peers of an unknown expert

    def __init__(
        self,
        make_memory: Callable[..., Any],
        shape: Shape,
        group: Group,
        config: Config,
        *,
        number: int,
        last_call: int = 0,
    ) -> None:
        endings.finish_kept()
        most_sms = min(group.gather(settings.num_sms(group.device)))
        numbers = {"number": number, "last_call": last_call, "most_sms": most_sms}
        told = settings.runtime_settings(shape, group, config, **numbers)
        self._memory = make_memory(shape, group, config, told)
        self.name = self._memory.name
        self.sms_of_a_call = self._memory.least_sms, most_sms
        self._runtime = self._memory.runtime
        self.layout_size = self._runtime.handle_words
        # done once, when the backend is destroyed or dropped; not at the program's end
        self._end = weakref.finalize(self, endings.finish, self._memory.give_back)
        self._end.atexit = False
        self._alive.add(self)
        self._shape, self._rank, self._timeout_s = shape, group.rank, config.timeout_s
        self._num_local_experts, self._topk = shape.num_local_experts, shape.topk
        self._layout_base = settings.layout_base(number)
        self._allocator = empty_on(group.device)
        self._tickets: dict[int, int] = {}  # address of a layout -> where its offsets arrive
        self._last_ticket = 0
        self._streams = StreamOrder(group.device)
        self._turn = Turn()

    def describe(self) -> str:
        megabytes = self._runtime.symmetric_bytes / 1e6
        return f"{self.name}: CUDA kernels, {megabytes:.1f} MB of {self._memory.describe()}"

    def destroy(self) -> None:
        self._end()

    def reclaim(self) -> None:
        self._memory.reclaim()

    @property
    def last_call(self) -> int:
        return self._runtime.num_routes()

    def check(self) -> None:
        if self._broken is not None:
            raise RuntimeError(self._broken)
        fault = self._runtime.fault()
        if fault is None:
            return
        # no local holds it: with its traceback it would keep the frames of the callers alive
        raise self._error_of(fault)

    def _error_of(self, fault: Any) -> Exception:
        """Of an expert that does not exist, peers are told: they wait for this rank."""
        buffer = self._shape, self._rank, self._timeout_s, self._layout_base
        error = error_of(fault, *buffer, is_alone=len(self._alive) == 1)
        if isinstance(error, UnknownExpert) and not (self._has_told or endings.is_capturing()):
            self._has_told = True
            self._tell_peers(error)
        return error

    def take_trace(self) -> list[Event]:
        """What the kernels noted since the last time; waits for the GPU."""
        return [Event(*event) for event in self._runtime.take_trace()]

    # ---- the verbs

    def route(
        self,
        topk_idx: Tensor,
        *,
        max_rows: int | None,
        align: int,
        most: Tensor | None = None,
        slots: int = 0,
    ) -> Route:
        with self._turn:
            stream = self._begin()
            topk_idx, choices = choices_of(topk_idx, max_rows, align, most, slots)
            experts = self._num_local_experts
            empty = self._allocator()
            made = Route(
                empty((self.layout_size,), DENSE, int32),
                empty((experts,), DENSE, int32),
                empty((experts + 1,), DENSE, int32),
                empty((2 + 2 * experts,), DENSE, int32),
            )
            at = made.sizes.data_ptr()
            new_layout = (*map(Tensor.data_ptr, made[:3]), at, at + 4, at + 8)
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
        num_sms: int = 0,
    ) -> Moved:
        with self._turn:
            stream = self._begin(layout)
            sent = Sent(x, weights, scales, layout, num_sms)
            if num_rows is None:
                return self._move_exactly(sent, layout, stream)[0]
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
        most: Tensor | None = None,
        slots: int = 0,
        num_sms: int = 0,
    ) -> tuple[Route, Moved]:
        with self._turn:
            stream = self._begin()
            topk_idx, choices = choices_of(topk_idx, max_rows, align, most, slots)
            experts = self._num_local_experts
            empty = self._allocator()
            layout = empty((self.layout_size,), DENSE, int32)
            # counts, offsets, a word between, and from an address of 8 bytes on those of Route
            sizes = empty((4 * experts + 4,), DENSE, int32)
            at = sizes.data_ptr()
            told = at + 8 * (experts + 1)
            new_layout = (layout.data_ptr(), at, at + 4 * experts, told, told + 4, told + 8)
            sent = Sent(x, weights, scales, layout, num_sms)
            on_host = None
            if max_rows is None:
                moved, on_host = self._move_exactly(sent, layout, stream, (choices, new_layout))
            else:
                moved, received = sent.make_rows(empty, max_rows)
                verb = self._runtime.dispatch_fresh
                self._launch(verb, choices, new_layout, sent.fields, received, stream)
            counts = part(sizes, (experts,), DENSE, 0)
            offsets = part(sizes, (experts + 1,), DENSE, experts)
            return Route(layout, counts, offsets, sizes, on_host), moved

    def _move_exactly(
        self,
        sent: Sent,
        layout: Tensor,
        stream: int,
        routing: tuple[Fields, Fields] | None = None,
    ) -> tuple[Moved, Sequence[int] | None]:
        """A dispatch in two launches, with the host's wait for the offsets of rows between them.

        They are returned where that is what came. With ``routing`` the layout is made first, in
        the same call. If the rank gets no memory for the rows, or is interrupted, it ends the call
        without rows: the peers need not know.
        """
        try:
            if routing is None:
                self._launch(self._runtime.publish, sent.fields, stream)
                num_rows, offsets = self._required_rows(layout, stream), None
            else:
                verb = self._runtime.publish_fresh
                self._last_ticket = self._launch(verb, *routing, sent.fields, stream)
                offsets = self._await_offsets(self._last_ticket, stream)
                num_rows = offsets[-1]
            moved, received = sent.make_rows(self._allocator(), num_rows)
            self._launch(self._runtime.pull, received, stream)
        except BaseException:  # an interrupt may come anywhere, so the runtime is asked
            if self._broken is None and self._runtime.is_half_made:
                self._launch(self._runtime.pull, NO_ROWS, stream)
            raise
        return moved, offsets

    def combine(
        self,
        rows: Tensor,
        weights: Tensor | None,
        values: Tensor | None,
        layout: Tensor,
        *,
        num_tokens: int,
        num_sms: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        with self._turn:
            stream = self._begin(layout)
            rows, address, row_bytes = aligned(rows.contiguous())
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
                SUM_TYPES[rows.dtype],
                row_bytes,
                address_of(weights),
                address_of(values),
                y.data_ptr(),
                address_of(home_values),
                num_tokens,
                layout.data_ptr(),
                num_sms,
            )
            self._launch(self._runtime.combine, summed, stream)
            return y, home_values

    def combine_backward(
        self, grad_y: Tensor, rows: Tensor, weights: Tensor, layout: Tensor, *, num_sms: int = 0
    ) -> tuple[Tensor, Tensor]:
        if rows.shape[1] * rows.element_size() > MAX_SCALED_ROW_BYTES:
            sizes = {"num_rows": rows.shape[0], "num_sms": num_sms}
            grads = self.dispatch(grad_y, None, None, layout, **sizes)[0]
            is_padding = find_padding(layout, self._shape, rows.shape[0])
            return grads, scale_rows(grads, rows, weights, is_padding)
        with self._turn:
            stream = self._begin(layout)
            rows, rows_at, _ = aligned(rows.contiguous())
            weights = weights.contiguous()
            num_rows, empty = rows.shape[0], self._allocator()
            sent = Sent(grad_y, None, None, layout, num_sms)
            (grads, _, _), received = sent.make_rows(empty, num_rows)
            dots = empty((num_rows,), DENSE, float32)
            received = received[0], address_of(dots), 0, num_rows
            weighted = rows_at, address_of(weights), SUM_TYPES[rows.dtype]
            self._launch(self._runtime.combine_backward, sent.fields, received, weighted, stream)
            return grads, dots

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
        self._tell_peers(error)

    def _tell_peers(self, error: Exception) -> None:
        with contextlib.suppress(RuntimeError):
            self._runtime.give_up(give_up_reason(error))

    def _required_rows(self, layout: Tensor, stream: int) -> int:
        ticket = self._tickets.pop(layout.data_ptr(), None)
        # a replayed layout has no mail, and one that was routed long ago has lost its own
        if ticket is None or self._last_ticket - ticket >= _MAIL_LIFETIME:
            required = int(layout[_REQUIRED_ROWS])
            self.check()  # after a fault it is no number of rows
            return required
        return self._await_offsets(ticket, stream)[-1]

    def _await_offsets(self, ticket: int, stream: int) -> Sequence[int]:
        offsets = self._runtime.await_offsets(ticket, stream)
        if offsets is None:
            self.check()
            raise RuntimeError("the GPU made no progress within the deadline of the Buffer")
        return offsets
