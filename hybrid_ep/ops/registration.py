"""How a verb becomes a torch op, and what keeps the ops of a compiled graph in program order.

Every verb has two overloads that run the same code:

    hybrid_ep::dispatch           functional; export, dispatch modes, make_fx, the profiler see it
    hybrid_ep::dispatch.ordered   declares that it writes a tensor ``order``; torch.compile sees it

A verb is collective: all ranks must make the same calls in the same order. A compiler takes a
functional op for a pure function: inductor sorts such ops by size, merges equal ones and removes
unused ones, differently on each rank. Ops that write the same tensor keep their order, and none is
removed. No kernel reads or writes ``order``; only the declaration counts.

The forward's verbs share a tensor of the process, one per device, so that the verbs of two Buffers
keep their order as well. The backward's verbs share a tensor that is made in the traced backward.
The forward's would be saved for the backward, and the next forward would make it stale ("modified
by an inplace operation").

The compile caches of torch identify a graph by its ops and their arguments, not by the code behind
an op. A change of a fake implementation or of a gradient needs another schema or overload name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

_library = torch.library.Library("hybrid_ep", "FRAGMENT")
_orders: dict[torch.device, Tensor] = {}


def prepare_order(device: torch.device) -> None:
    """Make the tensor that orders the verbs on a device; not possible while a graph is traced."""
    if device not in _orders:
        with torch.inference_mode(False):
            order = torch.zeros(1, dtype=torch.int64, device=device)
        # torch._dynamo.mark_static_address(order) without importing torch._dynamo: CUDA graphs are
        # skipped where a graph writes an input whose address may change
        order._dynamo_static_input_type = "unguarded"
        _orders[device] = order


def forward_order(device: torch.device) -> Tensor | None:
    """What orders a verb of the forward: a tensor while Dynamo traces, else None.

    An exported program may not write a tensor of the process, and keeps its ops in order.
    """
    # the flag itself: Dynamo of torch 2.11 takes is_exporting() for True, torch 2.6 has neither
    if is_dynamo_compiling() and not getattr(torch.compiler, "_is_exporting_flag", False):
        return _orders[device]
    return None


def backward_order(ctx: Any, grad: Tensor) -> Tensor | None:
    """What orders a verb of a backward, where its forward was ordered and the backward is traced.

    Outside a trace the verbs run as the autograd engine calls them.
    """
    mode = get_proxy_mode() if getattr(ctx, "ordered", False) else None
    if mode is None:
        return None
    orders = mode.tracer.__dict__.setdefault("hybrid_ep_orders", {})
    if grad.device not in orders:
        # from the gradient: a new tensor of any other origin is unknown to functionalization
        orders[grad.device] = grad.new_zeros(1, dtype=torch.int64)
    return orders[grad.device]


def define(
    name: str, arguments: str, returns: str, *, run: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define both overloads of a verb.

    Args:
        name: of the op, in the namespace ``hybrid_ep``.
        arguments: of the schema, without ``order``.
        returns: of the schema.
        run: the verb.
        fake: the shapes of what ``run`` returns, from the arguments alone: the compile caches of
            torch do not know what it reads elsewhere.

    Returns:
        Callable: the op, ``op(*arguments, order)``; ``order`` None means the functional overload.
    """
    functional = define_unordered(name, arguments, returns, run=run, fake=fake)
    torch.fx.node.has_side_effect(functional)  # no pass over an FX graph removes it
    ordered = define_unordered(
        f"{name}.ordered",
        f"{arguments}, Tensor(a!) order",
        returns,
        run=lambda *args: run(*args[:-1]),
        fake=lambda *args: fake(*args[:-1]),
    )

    def op(*args: Any) -> Any:
        return functional(*args[:-1]) if args[-1] is None else ordered(*args)

    return op


def define_unordered(
    name: str, arguments: str, returns: str, *, run: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload:
    """Define one op, a pure function unless its arguments say otherwise; see ``define``."""
    schema = f"{name}({arguments}) -> {returns}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, torch._disable_dynamo(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"hybrid_ep::{name}", fake, lib=_library)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.hybrid_ep, packet), overload or "default")


def register_without_gradient(name: str) -> None:
    """Register a verb whose results have no gradient with autograd."""
    for overload, qualified in _overloads(name):
        _library.impl(qualified, _below_autograd(overload), "Autograd")


def register_gradient(
    name: str,
    *,
    save: Callable[..., None],
    backward: Callable[..., tuple[Any, ...]],
    refuse: Callable[..., None],
) -> None:
    """Register the gradient of a verb; ``torch.library.register_autograd`` refuses ops that write.

    Args:
        name: of the verb.
        save: ``save(ctx, inputs, output)``.
        backward: ``backward(ctx, *grads)``, a gradient or None for each argument of the schema.
        refuse: raises for arguments whose gradient the Buffer cannot carry; called before anything
            is sent, where a gradient is wanted.
    """
    for overload, qualified in _overloads(name):
        kernel = _autograd_of(overload, save, backward, refuse)
        _library.impl(qualified, kernel, "Autograd")


def _overloads(name: str) -> tuple[tuple[torch._ops.OpOverload, str], ...]:
    packet = getattr(torch.ops.hybrid_ep, name)
    return (packet.default, name), (packet.ordered, f"{name}.ordered")


def _below_autograd(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    ordered = overload._overloadname == "ordered"

    def below(*args: Any) -> Any:
        mode = get_proxy_mode() if ordered else None
        known = 0 if mode is None else len(mode.tracer.graph.nodes)
        with torch._C._AutoDispatchBelowAutograd():
            output = overload(*args)
        if mode is not None:
            _never_recompute(mode.tracer.graph, known)
        return output

    return below


def _autograd_of(
    overload: torch._ops.OpOverload,
    save: Callable[..., None],
    backward: Callable[..., tuple[Any, ...]],
    refuse: Callable[..., None],
) -> Callable[..., Any]:
    ordered = overload._overloadname == "ordered"
    count = len(overload._schema.arguments) - ordered
    below = _below_autograd(overload)

    class Verb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = below(*args)
            save(ctx, args[:count], output)
            ctx.ordered = ordered
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            found = backward(ctx, *grads)
            return (*found, None) if ordered else found

    def run(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(arg, Tensor) and arg.requires_grad for arg in args
        ):
            refuse(*args[:count])
            return Verb.apply(*args)
        return below(*args)

    return run


def _never_recompute(graph: torch.fx.Graph, known: int) -> None:
    """Mark a verb of a checkpointed region as saved, whatever the policy says.

    A recomputed copy would be a node of the backward graph that hangs on the forward's order: it
    could run before or after any verb of the backward, by size. The checkpoint has tagged the nodes
    by now: all of ``graph`` beyond the first ``known``.
    """
    for node in itertools.islice(reversed(graph.nodes), len(graph.nodes) - known):
        if "recompute" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
