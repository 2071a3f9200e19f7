"""The Buffer: what a user holds of the memory of a group, and the calls that are made on it."""

from __future__ import annotations

import itertools
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import ops
from hybrid_ep.backends.choose import BACKENDS
from hybrid_ep.backends.cuda.trace import chrome_trace
from hybrid_ep.backends.endings import refuse_in_capture
from hybrid_ep.communicator import Communicator
from hybrid_ep.config import Config, as_config
from hybrid_ep.group import Group, Topology, find_device, ranks_of_a_host
from hybrid_ep.handle import Dispatched, Handle
from hybrid_ep.ops import round_trip
from hybrid_ep.shape import Shape

_log = logging.getLogger("hybrid_ep")
_next_number = itertools.count()


class Buffer:
    """The symmetric memory and the metadata of one expert-parallel group.

    Built once, by all ranks of the group together; sizes are fixed for its life. One Buffer serves
    any number of layers, micro-batches and handles; a process may hold several, on several groups.

    Args:
        group: the ``torch.distributed`` group, None for the default one; without
            ``torch.distributed`` initialised, a world of one rank.
        hidden: H, elements of a token.
        num_experts: E, over all ranks; rank r owns experts ``[r * E / R, (r + 1) * E / R)``.
        max_tokens: most tokens that a rank may dispatch in one call; T may differ between ranks.
        topk: K, columns of ``topk_idx``; at most ``num_experts``.
        dtype: the widest payload; together with ``scale_bytes`` it sizes the outbox.
        scale_bytes: bytes of scales per token that the outbox holds besides a row of ``dtype``; 0
            suffices where a narrower payload leaves the room (fp8 rows in a bf16 buffer).
        device: where the tensors live; default: the current CUDA device where there is one, else
            the CPU.
        backend: ``"torch"``, ``"nvlink"`` (one host), ``"nvshmem"`` (several nodes), or ``"auto"``:
            nvlink on one host, nvshmem on several, where every rank can, else torch.
        ranks_per_node: ranks that reach each other's memory, a divisor of their number; default:
            those of a host where all have as many and they follow each other, else all. Sums are
            rounded once more per node.
        config: tuning, equal on all ranks: a Config, or the path of a file that holds one, which
            every rank reads.

    Sizes may be of any integer type (numpy's too) and are kept as ints.

    As a context manager (``with hybrid_ep.Buffer(...) as buffer:``) it ends with a barrier of the
    group, which raises what an earlier call left behind, and ``destroy``; after an exception with
    ``destroy`` alone.

    A copy of a Buffer (``copy.copy``, ``copy.deepcopy``) is the Buffer itself, so a copied model
    shares it with the original. A Buffer cannot be pickled.

    An exception on one rank is one on all ranks, of the same kind: the others name that rank.

    Raises:
        TypeError: ``dtype`` is no torch.dtype on some rank.
        ValueError: an argument breaks a rule on some rank, ranks disagree on one, or this process
            is not a member of the group (then on this rank alone).
        OSError: some rank cannot read the file of the config.
        RuntimeError: the backend asked for cannot run here; the text says what is missing. Or data
            between two ranks are not what was sent: nvshmem tries every pair of ranks when the
            first Buffer of these ranks is made.
        PeerError: a rank did not answer then.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        hidden: int,
        num_experts: int,
        max_tokens: int,
        topk: int,
        dtype: torch.dtype = torch.bfloat16,
        scale_bytes: int = 0,
        device: torch.device | str | None = None,
        backend: str = "auto",
        ranks_per_node: int | None = None,
        config: Config | str | os.PathLike[str] | None = None,
    ) -> None:
        self._group = Group(group)
        self.group, self.dtype = self._group.process_group, dtype
        with self._group.together():
            shape = Shape(
                num_ranks=self._group.num_ranks,
                ranks_per_node=ranks_per_node,
                num_experts=num_experts,
                max_tokens=max_tokens,
                hidden=hidden,
                topk=topk,
                dtype=dtype,
                scale_bytes=scale_bytes,
            )
            if backend not in BACKENDS:
                raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
            self.config = as_config(config)
            self.device = self._group.device = find_device(device)
            refuse_in_capture("made")
            # rank 0's: ranks may be in Buffers of other groups
            self.number = self._group.meet(next(_next_number))[0]
            if ranks_per_node is None:
                shape = replace(shape, ranks_per_node=ranks_of_a_host(self._group.hosts))
            settings = {"device type": self.device.type, "backend": backend}
            self._group.agree_on({**vars(shape), **settings, "config": repr(self.config)})
            self.communicator = Communicator(backend, shape, self._group, self.config, self.number)
            ops.prepare_order(self.device)
        self.shape, self.backend_reason = shape, self.communicator.reason
        self.topology = Topology(self._group.rank, shape.num_ranks, shape.ranks_per_node)
        self.hidden, self.topk, self.max_tokens = shape.hidden, shape.topk, shape.max_tokens
        self.num_experts, self.num_local_experts = shape.num_experts, shape.num_local_experts
        self.scale_bytes = shape.scale_bytes
        self.id, self.layout_size = self.communicator.id, self.communicator.layout_size
        try:
            with self._group.together():
                _log.info("%s", self.describe())
                if self.backend == "nvshmem":
                    round_trip.verify_once(self.communicator)
        except BaseException:
            self.destroy()
            raise

    # ---- the calls

    def dispatch(
        buffer: Buffer,  # as of ``hybrid_ep.dispatch``, which is this function
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        scales: Tensor | None = None,
        handle: Handle | None = None,
        most: Tensor | None = None,
        max_rows: int | None = None,
        align: int = 1,
        num_sms: int | None = None,
    ) -> Dispatched:
        """Send every token to the ranks of its experts; differentiable in x and topk_weights.

        Collective: all ranks of the buffer's group call it, each with its own T.

        Args:
            buffer: the group's Buffer.
            x: ``[T, hidden]``, any dtype of 1, 2 or 4 bytes whose rows are a multiple of 16 bytes.
            topk_idx: int16, int32 or int64 ``[T, topk]``, experts in ``[0, num_experts)``; -1 is no
                expert; the same expert twice in a row counts once and its weights add. None with a
                ``handle``. It may have fewer columns than the Buffer's topk, which cost a copy.
            topk_weights: float32, of the shape of topk_idx, or None.
            scales: ``[T, S]`` of any dtype, moved along with x; not differentiable: scales that
                require a gradient get none.
            handle: replay this layout instead of routing anew (recompute; the peers replay it too).
            most: of ``map_to_topk``, on the device: int32, with the most experts of a token among
                its elements. If a token has more than topk_idx has columns, on any rank, the call
                is a ValueError on every rank; on a GPU for good, and with ``max_rows`` it is raised
                by a later call or by ``Buffer.check``. Nothing waits for it. None: nobody looks.
            max_rows: bound on M. With it nothing waits for the host, rows beyond the bound are
                dropped (the last experts lose theirs first) and ``handle.overflow`` says so. None:
                M is exact. Like align, of any integer type (numpy's too).
            align: each expert's group of rows is padded with zero rows to a multiple of this.
            num_sms: SMs that the call may take, equal on all ranks, and its backward: few where
                something else computes meanwhile, many where all wait. None: those of the Config.
                The torch backend takes none.

        Returns:
            Dispatched: the rows of this rank's experts and the handle that leads home.

        Raises:
            TypeError: an argument is of another type; nothing was sent.
            ValueError: an argument breaks a rule, or its gradient is wanted and does not fit the
                Buffer; nothing was sent.
            PeerError: a peer died, was too late, or made another call.
        """
        if not isinstance(buffer, Buffer):
            raise ops.wrong_type("buffer", "a hybrid_ep.Buffer", buffer)
        return ops.dispatch(
            buffer.communicator,
            x,
            topk_idx,
            topk_weights,
            scales,
            handle,
            most,
            max_rows,
            align,
            num_sms,
        )

    def combine(
        buffer: Buffer,  # as of ``hybrid_ep.combine``
        rows: Tensor,
        handle: Handle,
        *,
        weights: Tensor | None = None,
        num_sms: int | None = None,
    ) -> Tensor:
        """Bring the experts' rows home and sum them; differentiable in rows and weights.

        Sums are made in float32 in a fixed order: over a rank's experts in expert order, rounded to
        the dtype of rows, then over the ranks in rank order, rounded again (with several nodes:
        once more). A token without experts gets zeros.

        Args:
            buffer: the group's Buffer.
            rows: bfloat16, float16 or float32 ``[M, hidden]``, in the order of the dispatch's rows.
            handle: of that dispatch.
            weights: float32 ``[M]``, to make it a weighted sum; usually ``Dispatched.weights``.
            num_sms: as of ``dispatch``.

        Returns:
            Tensor: ``[T, hidden]``, dtype of rows.

        Raises:
            TypeError, ValueError, PeerError: as of ``dispatch``.
        """
        if not isinstance(buffer, Buffer):
            raise ops.wrong_type("buffer", "a hybrid_ep.Buffer", buffer)
        return ops.combine(buffer.communicator, rows, weights, None, handle, num_sms)[0]

    def combine_values(
        buffer: Buffer,  # as of ``hybrid_ep.combine_values``
        rows: Tensor,
        values: Tensor,
        handle: Handle,
        *,
        num_sms: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Combine rows, and bring one value of each row home beside them, unsummed.

        The transpose of a dispatch with weights, for those who write its backward themselves: rows
        are the gradients of its rows, values those of its weights. Differentiable in both.

        Args:
            buffer: the group's Buffer.
            rows: as of ``combine``.
            values: float32 ``[M]``, one for each row.
            handle: of the dispatch.
            num_sms: as of ``combine``.

        Returns:
            tuple: ``[T, hidden]``, the sums that ``combine`` returns, and float32 ``[T, topk]`` of
            the Buffer, the value of each slot's row; 0 where the slot has none. An expert named
            twice has its row's value in each of its slots.

        Raises:
            TypeError, ValueError, PeerError: as of ``dispatch``.
        """
        if not isinstance(buffer, Buffer):
            raise ops.wrong_type("buffer", "a hybrid_ep.Buffer", buffer)
        return ops.combine(buffer.communicator, rows, None, values, handle, num_sms)

    # ---- what a user asks a Buffer

    @property
    def backend(self) -> str:
        """Name of the backend that was picked, the same on all ranks."""
        return self.communicator.backend.name

    def describe(self) -> str:
        """What was picked and why, in a few lines for people."""
        t, released = self.topology, ", released" if self.communicator.state == "released" else ""
        return (
            f"hybrid_ep.Buffer: rank {t.rank} of {t.num_ranks}, {t.num_nodes} node(s) of "
            f"{t.ranks_per_node}, {self.device}\n"
            f"  {self.num_experts} experts ({self.num_local_experts} per rank), top-{self.topk}, "
            f"hidden {self.hidden}, at most {self.max_tokens} tokens of {self.dtype}\n"
            f"  {self.communicator.backend.describe()}{released}\n"
            f"  because {self.backend_reason}"
        )

    def check(self) -> None:
        """Raise the error that an earlier call left behind, if one did; waits for nothing.

        With ``max_rows`` the host never waits for the GPU, so a peer that died is found by the next
        call on the buffer; this is how to ask at any other time (after a synchronisation, say).

        Raises:
            PeerError: a call waited for a peer in vain.
        """
        self.communicator.verbs.check()

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what the kernels did since the last time as a Chrome trace.

        Collective; waits for the GPU. Rank 0 writes the file, in which each rank is a process and
        each CUDA block a few threads: open it in chrome://tracing or Perfetto. A rank keeps
        131,072 events at most, the first ones.

        Args:
            path: the file, JSON; it is overwritten.

        Raises:
            RuntimeError: the Buffer was made without ``Config(trace=True)``, or its backend is
                not nvlink.
            OSError: rank 0 cannot write the file; on all ranks.
        """
        if not self.config.trace:
            raise RuntimeError("a trace needs a Buffer with Config(trace=True)")
        if self.backend == "torch":
            raise RuntimeError(
                "the torch backend has no kernels to trace, only nvlink and nvshmem have"
            )
        with self._group.together():  # afterwards the file exists for every rank
            refuse_in_capture("asked for a trace")
            events = self._group.gather(self.communicator.verbs.take_trace())
            if self.topology.rank == 0:
                Path(path).write_text(json.dumps(chrome_trace(events)))

    def release(self) -> None:
        """Give the memory back until ``restore``, so that the GPU can serve something else.

        Collective. When it returns, every rank has freed its part; calls raise RuntimeError until
        ``restore``. Handles stay valid: they own their metadata. Does nothing on a Buffer that is
        released already. A CUDA graph that was captured before holds addresses of the memory that
        is gone: capture it again after ``restore``, and never replay the old one.

        Raises:
            RuntimeError: the buffer was destroyed, or an earlier call on some rank failed (then on
                all of them: destroy it).
        """
        self.communicator.release()

    def restore(self) -> None:
        """Take the memory again after ``release``: the same backend, sizes and id as before.

        Collective. Does nothing on a Buffer that is not released.

        Raises:
            RuntimeError: the buffer was destroyed, or a rank has no memory for it; then it stays
                released on all ranks, and may be restored later.
        """
        self.communicator.restore()

    def destroy(self) -> None:
        """Give the memory back. Idempotent, waits for no peer, safe after a PeerError.

        While a CUDA graph is captured nothing may wait for the GPU, so the memory is kept until a
        Buffer is called, made or ended after the capture. The same holds for a Buffer that is
        dropped.

        Peers that still read this rank's outbox are not harmed: the memory is kept aside until
        every peer has destroyed its Buffer as well.
        """
        self.communicator.destroy()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the Buffer: with a barrier, or after an exception at once, as peers may be gone."""
        try:
            if kind is None:
                with self._group.together():
                    refuse_in_capture("ended")
                    self.communicator.raise_failures()
        finally:
            self.destroy()

    def __repr__(self) -> str:
        """One line that waits for nothing, also of a Buffer whose construction failed."""
        if not hasattr(self, "layout_size"):
            return "Buffer(not made)"
        t, state = self.topology, self.communicator.state
        return (
            f"Buffer(rank {t.rank} of {t.num_ranks}, hidden={self.hidden}, "
            f"num_experts={self.num_experts}, max_tokens={self.max_tokens}, topk={self.topk}, "
            f"dtype={self.dtype}, device='{self.device}', backend='{self.backend}', {state})"
        )

    # A copied model (an average of weights, a frozen teacher) must go on calling with the peers of
    # this Buffer. A second one could only be made by all ranks together.

    def __deepcopy__(self, memo: Any = None) -> Buffer:
        return self

    __copy__ = __deepcopy__

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a hybrid_ep.Buffer must not be pickled: it holds memory and the process group of this "
            "process. Save model.state_dict() in place of the model, and make the Buffer and the "
            "model in the process that loads it; in a child process, make a Buffer of its own"
        )


dispatch, combine, combine_values = Buffer.dispatch, Buffer.combine, Buffer.combine_values
"""The same as functions: ``dispatch(buffer, x, topk_idx)``."""
