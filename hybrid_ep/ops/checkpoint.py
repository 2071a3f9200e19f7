"""Recomputation that replays the routing of the forward, whatever the router says then."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch._C import _are_functorch_transforms_active
from torch.compiler import is_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from hybrid_ep.ops import replay, topk, verbs

SAC_SAVE_OPS = verbs.ROUTES
"""What a selective-checkpoint policy must save so that recomputation replays the layout: a few MB a
layer, no payload. Add ``torch.ops.aten.topk.default`` if the router is inside the region, so that
the weights stay those of the saved experts. Such a region is eager, or it and its checkpoint are
inside ``torch.compile``: around compiled code ``hybrid_ep.checkpoint`` is right, see there."""


class _Region(TorchFunctionMode):
    """One run of a region, whose calls of topk are kept or replayed.

    A mode for functions sees the calls of Python alone; one for ops would cost the host several
    times more. Dynamo traces through it, so compiled code asks as well.
    """

    def __init__(self, kept: replay.Kept, *, is_forward: bool) -> None:
        super().__init__()
        self._kept, self._is_forward = kept, is_forward

    def __enter__(self) -> _Region:
        replay.enter(self._kept, is_forward=self._is_forward)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        replay.leave()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # vmap and its like run topk as it is: what they pass is no tensor to keep
        if func in topk.CAUGHT and "out" not in kwargs:
            if is_compiling() or not _are_functorch_transforms_active():
                func = topk.topk
        return func(*args, **kwargs)


def _regions() -> tuple[_Region, _Region]:
    kept: replay.Kept = defaultdict(list)
    return _Region(kept, is_forward=True), _Region(kept, is_forward=False)


def _save_routing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = op in SAC_SAVE_OPS or op in topk.OPS
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = False,
    context_fn: None = None,
    **kwargs: Any,
) -> Any:
    """``torch.utils.checkpoint`` that recomputes everything but the routing.

    A plain checkpoint runs the router again, and a near tie that falls the other way gives other
    rows than the forward saw. Here the layouts of dispatch and the results of ``torch.topk`` and
    ``Tensor.topk`` are those of the forward. A choice of experts that is made otherwise belongs
    outside of ``function``: it would be made again. In a graph of ``torch.compile`` the results of
    dispatch and combine are saved as well. A ``function`` that is compiled itself may run as
    anything but CUDA graphs, which ask nothing when they are replayed.

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
        RuntimeError: in the backward: the recomputation made more such calls than the forward, or
            a tensor of a handle was written to, other than ``counts``.
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
    contexts = _regions
    if is_compiling() or get_proxy_mode() is not None:  # who makes the graph saves, by a policy
        contexts = functools.partial(create_selective_checkpoint_contexts, _save_routing)
    return _torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
