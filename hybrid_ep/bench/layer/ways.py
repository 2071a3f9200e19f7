"""The ways of running a layer: on a Buffer, in plain torch, without communication."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.bench.clock import Call
from hybrid_ep.bench.inputs import NUM_INPUTS
from hybrid_ep.bench.layer.options import LayerShape
from hybrid_ep.bench.layer.plain import PlainLayer
from hybrid_ep.buffer import Buffer, dispatch
from hybrid_ep.moe import GroupedExperts, MoELayer, Router
from hybrid_ep.moe.products import grouped_mm, grouped_mm_weight_grad
from hybrid_ep.shape import DTYPES

PASSES = ("forward", "backward", "step")


class Parts:
    """What all ways share: router, experts, their optimizer, tokens and gradients of the result.

    Args:
        shape: sizes.
        num_ranks: R.
        rank: draws its own tokens.
        device: of this rank.
    """

    def __init__(self, shape: LayerShape, num_ranks: int, rank: int, device: torch.device) -> None:
        self.shape, self.dtype = shape, DTYPES[shape.dtype]
        generator = torch.Generator(device).manual_seed(rank)
        self.router = Router(shape.hidden, shape.experts, shape.topk, device=device)
        # the experts are drawn on the device: by the seed of each, on the host, takes minutes
        sizes = (shape.experts // num_ranks, shape.hidden, shape.ffn_hidden)
        self.experts = GroupedExperts(*sizes, dtype=self.dtype, device="meta")
        self.experts.to_empty(device=device)
        with torch.no_grad():
            for weight in self.experts.parameters():
                weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)

        def draw() -> Tensor:
            made = torch.randn(shape.tokens, shape.hidden, generator=generator, device=device)
            return made.to(self.dtype)

        self.tokens = [draw().requires_grad_() for _ in range(NUM_INPUTS)]
        self.grads = [draw() for _ in range(NUM_INPUTS)]
        parameters = [*self.router.parameters(), *self.experts.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.0)
        self._leaves: list[Tensor] = [*parameters, *self.tokens]

    def add_leaves(self, leaves: list[Tensor]) -> None:
        """More tensors that get gradients."""
        self._leaves += leaves

    def clear(self) -> None:
        """Forget all gradients."""
        for leaf in self._leaves:
            leaf.grad = None


@dataclass
class Way:
    """A way of running the layer.

    Attributes:
        name: the backend, the carrier of plain torch, ``"experts"`` or ``"products"``.
        parts: what it shares with the others.
        forward: ``forward(i)``, the result of input set i.
        grads: gradients of the results, by input set.
        sizing: of ``hybrid_ep.bench.options.SIZINGS``.
        max_rows: the bound, where there is one.
        host_waits: whether the host waits for the GPU in a forward.
        passes: what can be timed.
        backward: ``backward(i)`` where it is not autograd's.
        peak_bytes: of a forward and its backward, beyond what was allocated before; the largest
            rank's. None without a GPU.
    """

    name: str
    parts: Parts
    forward: Callable[[int], Tensor]
    grads: list[Tensor]
    sizing: str = "exact"
    max_rows: int | None = None
    host_waits: bool = False
    passes: tuple[str, ...] = PASSES
    backward: Callable[[int], Any] | None = None
    peak_bytes: int | None = field(default=None, compare=False)

    def call(self, pass_name: str) -> Call:
        """One pass, for the clock."""
        begin = {"forward": self._forward, "backward": self._backward, "step": self._step}
        return Call(
            self.name,
            pass_name,
            "fresh",
            begin[pass_name],
            0,
            sizing=self.sizing,
            max_rows=self.max_rows,
            host_waits=self.host_waits and pass_name != "backward",
        )

    def both(self, i: int) -> None:
        """Forward and backward."""
        self._backward(i)()

    def _forward(self, i: int) -> Callable[[], Any]:
        return functools.partial(self.forward, i)

    def _backward(self, i: int) -> Callable[[], Any]:
        self.parts.clear()
        if self.backward is not None:
            return functools.partial(self.backward, i)
        return functools.partial(self.forward(i).backward, self.grads[i])

    def _step(self, i: int) -> Callable[[], Any]:
        self.parts.clear()

        def step() -> None:
            self.forward(i).backward(self.grads[i])
            self.parts.optimizer.step()

        return step


def on_buffer(parts: Parts, buffer: Buffer, max_rows: int | None, weight_at: str) -> Way:
    """MoELayer, with the router and the experts of all ways."""
    ffn_hidden = parts.shape.ffn_hidden
    layer = MoELayer(buffer, ffn_hidden, max_rows=max_rows, weight_at=weight_at, device="meta")
    layer.router, layer.experts = parts.router, parts.experts
    return Way(
        buffer.backend,
        parts,
        lambda i: layer(parts.tokens[i]).y,
        parts.grads,
        sizing="exact" if max_rows is None else "max_rows",
        max_rows=max_rows,
        host_waits=max_rows is None,
    )


def in_plain_torch(parts: Parts, layer: PlainLayer, carrier: str) -> Way:
    """The same by sort and all_to_all_single."""
    forward = lambda i: layer(parts.tokens[i])  # noqa: E731
    return Way(carrier, parts, forward, parts.grads, host_waits=True)


@dataclass(frozen=True)
class Rows:
    """What a dispatch brought: ``rows [M, H]``, ``offsets [E_local + 1]``, ``weights [M]``."""

    rows: Tensor
    offsets: Tensor
    weights: Tensor
    required: int


def rows_of(parts: Parts, buffer: Buffer) -> list[Rows]:
    """Of each input set; collective."""
    found = []
    for tokens in parts.tokens:
        with torch.no_grad():
            topk_idx, topk_weights, _ = parts.router(tokens)
            out = dispatch(buffer, tokens, topk_idx, topk_weights)
        required = int(out.handle.required_rows)
        found.append(Rows(out.rows, out.offsets, out.weights, required))
    return found


def without_communication(parts: Parts, rows: list[Rows], weight_at: str) -> Iterator[Way]:
    """The experts, and their products alone, on rows that are there."""
    leaves = [each.rows.detach().requires_grad_() for each in rows]
    weights = [each.weights.detach().requires_grad_() for each in rows]
    parts.add_leaves([*leaves, *weights])
    # of each row its token's, as combine's backward brings them; any values would do
    grads = [torch.randn_like(each.rows) for each in rows]

    def experts(i: int) -> Tensor:
        given = weights[i] if weight_at == "activation" else None
        return parts.experts(leaves[i], rows[i].offsets, given)

    yield Way("experts", parts, experts, grads)
    w1, w3, w2 = (w.detach() for w in (parts.experts.w1, parts.experts.w3, parts.experts.w2))
    wide = [leaf.detach().new_empty(len(leaf), w1.shape[2]).normal_() for leaf in leaves]

    def products(i: int) -> Tensor:
        x, ends = rows[i].rows, rows[i].offsets[1:]
        grouped_mm(x, w1, ends)
        grouped_mm(x, w3, ends)
        return grouped_mm(wide[i], w2, ends)

    def products_backward(i: int) -> None:
        x, ends, grad = rows[i].rows, rows[i].offsets[1:], grads[i]
        grouped_mm(grad, w2.transpose(1, 2), ends)
        grouped_mm_weight_grad(wide[i], grad, ends)
        for weight in (w1, w3):
            grouped_mm_weight_grad(x, wide[i], ends)
            grouped_mm(wide[i], weight.transpose(1, 2), ends)

    yield Way(
        "products",
        parts,
        products,
        grads,
        passes=("forward", "backward"),
        backward=products_backward,
    )
