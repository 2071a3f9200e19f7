"""Recomputation that replays the routing of the forward, whatever the router says then."""

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

from hybrid_ep.ops import verbs

SAC_SAVE_OPS = verbs.ROUTES
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
