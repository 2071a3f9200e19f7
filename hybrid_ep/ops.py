"""``dispatch``, ``combine`` and ``checkpoint``: what a user calls.

    dispatch(buffer, x, topk_idx, topk_weights)
      route     topk_idx -> layout                             small, no payload; saved by SAC
      dispatch  x, weights, scales, layout -> rows, weights, scales
    combine(buffer, rows, handle, weights)
      combine   rows, weights, layout -> y

The rules are checked here, before anything is sent; how torch comes to know of the three verbs, and
their gradients, is in ``torch_verbs``, and what keeps them in program order under torch.compile in
``torch_ops``. Splitting route off is what makes recomputation exact: a checkpoint that saves the
outputs of ``route`` (``SAC_SAVE_OPS``) replays the forward's layout, whatever the router says then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from hybrid_ep import rules, torch_verbs
from hybrid_ep.buffer import Buffer
from hybrid_ep.handle import Dispatched, Handle


def dispatch(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    handle: Handle | None = None,
    max_rows: int | None = None,
    align: int = 1,
) -> Dispatched:
    """Send every token to the ranks of its experts; differentiable in x and topk_weights.

    Collective: all ranks of the buffer's group call it, each with its own T.

    Args:
        buffer: the group's Buffer.
        x: ``[T, hidden]``, any dtype of 1, 2 or 4 bytes whose rows are a multiple of 16 bytes.
        topk_idx: int16, int32 or int64 ``[T, topk]``, experts in ``[0, num_experts)``; -1 is no
            expert; the same expert twice in a row counts once and its weights add. None with a
            ``handle``.
        topk_weights: float32 ``[T, topk]``, or None.
        scales: ``[T, S]`` of any dtype, moved along with x; not differentiable: scales that
            require a gradient get none.
        handle: replay this layout instead of routing anew (recompute; the peers replay it too).
        max_rows: bound on M. With it nothing waits for the host, rows beyond the bound are dropped
            (the last experts lose theirs first) and ``handle.overflow`` says so. None: M is exact.
            Like align, of any integer type (numpy's too).
        align: each expert's group of rows is padded with zero rows to a multiple of this.

    Returns:
        Dispatched: the rows of this rank's experts and the handle that leads home.

    Raises:
        TypeError: an argument is of another type; nothing was sent.
        ValueError: an argument breaks a rule, or its gradient is wanted and does not fit the
            Buffer; nothing was sent.
        PeerError: a peer died, was too late, or made another call.
    """
    if not isinstance(buffer, Buffer):
        raise rules.wrong_type("buffer", "a hybrid_ep.Buffer", buffer)
    if (handle is None) == (topk_idx is None):
        raise ValueError(
            "dispatch takes either topk_idx or a handle to replay, got "
            + ("neither" if handle is None else "both")
        )
    if handle is None:
        max_rows, align = rules.check_route(buffer, topk_idx, max_rows, align)
        num_tokens = topk_idx.shape[0]
        rules.check_dispatch(buffer, x, topk_weights, scales, num_tokens)
        layout, counts, offsets, required, rows, weights, row_scales = torch_verbs.dispatch_fresh(
            buffer, topk_idx, x, topk_weights, scales, max_rows, align
        )
        num_rows = rows.shape[0]
        handle = Handle(layout, counts, offsets, required, num_tokens, num_rows, max_rows)
        handle = _for_autograd(handle)
    else:
        if max_rows is not None or align != 1:
            raise ValueError("a replayed layout has its max_rows and align, pass neither")
        rules.check_handle(buffer, handle)
        handle = _for_autograd(handle)
        num_tokens = handle.num_tokens
        rules.check_dispatch(buffer, x, topk_weights, scales, num_tokens)
        rows, weights, row_scales = torch_verbs.dispatch(
            buffer, x, topk_weights, scales, handle.layout, num_tokens, handle.num_rows
        )
    return Dispatched(
        rows,
        None if topk_weights is None else weights,
        None if scales is None else row_scales,
        handle.counts,
        handle.offsets,
        handle,
    )


def combine(
    buffer: Buffer, rows: Tensor, handle: Handle, *, weights: Tensor | None = None
) -> Tensor:
    """Bring the experts' rows home and sum them; differentiable in rows and weights.

    Sums are made in float32 in a fixed order: over a rank's experts in expert order, rounded to the
    dtype of rows, then over the ranks in rank order, rounded again (with several nodes: once more).
    A token without experts gets zeros.

    Args:
        buffer: the group's Buffer.
        rows: bfloat16, float16 or float32 ``[M, hidden]``, in the order of the dispatch's rows.
        handle: of that dispatch.
        weights: float32 ``[M]``, to make it a weighted sum; usually ``Dispatched.weights``.

    Returns:
        Tensor: ``[T, hidden]``, dtype of rows.

    Raises:
        TypeError: an argument is of another type; nothing was sent.
        ValueError: an argument breaks a rule, or its gradient is wanted and does not fit the
            Buffer; nothing was sent.
        PeerError: a peer died, was too late, or made another call.
    """
    if not isinstance(buffer, Buffer):
        raise rules.wrong_type("buffer", "a hybrid_ep.Buffer", buffer)
    rules.check_handle(buffer, handle)
    rules.check_combine(buffer, rows, weights)
    if rows.shape[0] != handle.num_rows:
        raise ValueError(
            f"rows must be those of the handle's dispatch, {handle.num_rows}, got {rows.shape[0]}"
        )
    handle = _for_autograd(handle)
    return torch_verbs.combine(buffer, rows, weights, handle.layout, handle.num_tokens)


def _for_autograd(handle: Handle) -> Handle:
    """The handle, with tensors that autograd may save: those of inference mode it may not.

    A graph compiled under inference mode hands out such tensors, and Dynamo traces no question
    about them, so a handle is looked at where it is made and where it is used.
    """
    if is_compiling() or not handle.layout.is_inference():
        return handle
    return handle.outside_inference_mode()


# ---- recomputation

SAC_SAVE_OPS = (torch.ops.hybrid_ep.route.default, torch.ops.hybrid_ep.route.ordered)
"""What a selective-checkpoint policy must save so that recomputation replays the layout: a few MB a
layer, no payload. Add ``torch.ops.aten.topk.default`` if the router is inside the region, so that
the weights stay those of the saved experts. Such a region is eager, or it and its checkpoint are
inside ``torch.compile``: around compiled code ``hybrid_ep.checkpoint`` is right, see there."""

_REPLAYED = frozenset((*SAC_SAVE_OPS, torch.ops.aten.topk.default))


def _save_routing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _REPLAYED else CheckpointPolicy.PREFER_RECOMPUTE


class _SaveRouting(TorchDispatchMode):
    """Torch's mode that saves results, and hands out copies of those.

    Compiled code reuses the memory of a tensor after its last use there, and torch's mode saves the
    tensor itself: ``topk(...).values.sigmoid()`` would be saved with the sigmoid applied.
    """

    def __init__(self, saving: TorchDispatchMode) -> None:
        super().__init__()
        self._saving = saving

    @classmethod
    def ignore_compile_internals(cls) -> bool:  # like torch's: functions are compiled under it
        return True

    def __enter__(self) -> _SaveRouting:
        self._saving.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._saving.__exit__(*error)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        return tree_map_only(Tensor, torch.clone, result) if op in _REPLAYED else result


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    saving, replaying = create_selective_checkpoint_contexts(_save_routing)
    return _SaveRouting(saving), replaying


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = False,
    context_fn: None = None,
    **kwargs: Any,
) -> Any:
    """``torch.utils.checkpoint`` that recomputes everything but the routing.

    A plain checkpoint runs the router again, and a near tie that falls the other way gives other
    rows than the forward saw. Here the choice of experts and the layout are those of the forward.
    In a graph of ``torch.compile`` the results of dispatch and combine are saved as well. A
    ``function`` that is compiled itself may run as anything but CUDA graphs, which show no op.

    Args:
        function: what to checkpoint; it may call dispatch and combine.
        args: passed to it.
        use_reentrant: False; taken so that calls of torch's function need no change.
        context_fn: None: what is saved is decided here.
        kwargs: the other settings of torch's function (``preserve_rng_state``,
            ``determinism_check``, ``debug``), which keep their meaning; the rest is passed to
            ``function``.

    Returns:
        Any: what ``function`` returns.

    Raises:
        ValueError: ``use_reentrant`` is true, or a ``context_fn`` is given.
    """
    if use_reentrant:
        raise ValueError(
            "use_reentrant must be False, got True: torch's reentrant checkpoint recomputes "
            "everything, and here the routing must be saved"
        )
    if context_fn is not None:
        raise ValueError(
            f"context_fn must be left out, got {context_fn!r}: hybrid_ep.checkpoint passes its "
            "own, which saves the routing. For a policy of your own, call torch.utils.checkpoint "
            "with one that saves hybrid_ep.SAC_SAVE_OPS"
        )
    contexts = _contexts
    if is_compiling():  # the compiler saves, by the policy, and knows torch's own modes only
        contexts = functools.partial(create_selective_checkpoint_contexts, _save_routing)
    return _torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
