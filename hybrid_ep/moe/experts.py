"""SwiGLU experts over rows grouped by expert, and their gradients.

    forward   gate, up = rows w1, rows w3       backward   d act = d out w2'
              act = silu(gate) * up (* weight)             d gate, d up, d weight, act (once more)
              out = act w2                                 d w2 = act' d out
                                                           d w1, d w3 = rows' d gate, rows' d up
                                                           d rows = d gate w1' + d up w3'

All of it is one op with one backward op, so that between them only rows, gate and up are kept.
torch.compile sees the two ops and looks into neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_ep.moe.products import grouped_mm, grouped_mm_weight_grad
from hybrid_ep.moe.seeds import draw, generator_of
from hybrid_ep.moe.swiglu import swiglu, swiglu_backward


class GroupedExperts(nn.Module):
    """SwiGLU experts over rows grouped by expert: ``w2(silu(w1 x) * w3 x)``.

    The weights may be of a wider dtype than the rows: they are rounded to the rows' for the product
    and get their gradient in their own.

    Args:
        num_local_experts: E_local.
        hidden: H.
        ffn_hidden: F.
        first_expert: index of the first of them among all experts.
        seed: with the expert's index it determines the expert's weights.
        main_grad: sum the gradients of several backward passes in float32. Each backward adds to
            ``weight.main_grad``, a float32 tensor of the weight's shape, and leaves ``weight.grad``
            None. The first backward makes it; a framework may set one of its own before.
        dtype: of the weights ``w1, w3 [E_local, H, F]`` and ``w2 [E_local, F, H]``.
        device: of the weights; None: torch's default device.
    """

    def __init__(
        self,
        num_local_experts: int,
        hidden: int,
        ffn_hidden: int,
        *,
        first_expert: int = 0,
        seed: int = 0,
        main_grad: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.first_expert, self.seed, self.main_grad = first_expert, seed, main_grad

        def weights(inner: int, outer: int) -> nn.Parameter:
            shape = (num_local_experts, inner, outer)
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        self.w1, self.w3 = weights(hidden, ffn_hidden), weights(hidden, ffn_hidden)
        self.w2 = weights(ffn_hidden, hidden)
        self._sum_in_main_grad()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each expert's weights from the seed; nothing is drawn on the meta device."""
        if self.w1.is_meta:
            return
        for expert in range(self.w1.shape[0]):
            generator = generator_of(self.seed, self.first_expert + expert)
            for weight in (self.w1, self.w3, self.w2):
                drawn = draw(weight.shape[1:], generator)
                weight[expert].copy_(drawn * drawn.shape[0] ** -0.5)

    def forward(self, rows: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Apply each expert to its group of rows.

        Args:
            rows: ``[M, H]``, grouped by expert.
            offsets: int32 ``[E_local + 1]``, first row of each group; rows from ``offsets[-1]`` on
                belong to nobody and their results mean nothing.
            weights: float32 ``[M]``, to multiply the activation of each row by its weight:
                ``w2(weight * silu(w1 x) * w3 x)``. The gradient of a weight is summed in float32.

        Returns:
            Tensor: ``[M, H]``, dtype of rows.
        """
        w1, w3, w2 = (w.to(rows.dtype) for w in (self.w1, self.w3, self.w2))
        out, _, _ = _experts(rows, w1, w3, w2, weights, offsets[1:])
        return out

    # ---- gradients in float32: the hook is the parameter's, and parameters are exchanged by
    # to_empty() and copied without their hooks

    def _sum_in_main_grad(self) -> None:
        for weight in self.parameters() if self.main_grad else ():
            if weight.requires_grad and not hasattr(weight, "main_grad"):
                weight.main_grad = None
                weight.register_post_accumulate_grad_hook(_add_to_main_grad)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> GroupedExperts:
        super()._apply(fn, recurse)
        self._sum_in_main_grad()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._sum_in_main_grad()


@torch.no_grad()
def _add_to_main_grad(weight: Tensor) -> None:
    """Move a backward's ``weight.grad``, so that one gradient of the weight's size stays."""
    if weight.main_grad is None:
        weight.main_grad = weight.grad.float()
    else:
        weight.main_grad.add_(weight.grad)
    weight.grad = None


# ---- the op and its gradient


@torch.library.custom_op(
    "hybrid_ep::swiglu_experts",
    mutates_args=(),
    schema="(Tensor rows, Tensor w1, Tensor w3, Tensor w2, Tensor? weights, Tensor ends)"
    " -> (Tensor out, Tensor gate, Tensor up)",
)
def _experts(
    rows: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weights: Tensor | None, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if rows.shape[0] == 0:
        gate, up = (rows.new_empty(0, w1.shape[2]) for _ in range(2))
        return rows.new_empty(0, w2.shape[2]), gate, up
    gate, up = grouped_mm(rows, w1, ends), grouped_mm(rows, w3, ends)
    return grouped_mm(swiglu(gate, up, weights, ends), w2, ends), gate, up


@_experts.register_fake
def _(rows: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = (rows.new_empty(rows.shape[0], w1.shape[2]) for _ in range(2))
    return rows.new_empty(rows.shape[0], w2.shape[2]), gate, up


@torch.library.custom_op(
    "hybrid_ep::swiglu_experts_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor rows, Tensor gate, Tensor up, Tensor w1, Tensor w3, Tensor w2,"
    " Tensor? weights, Tensor ends, bool of_rows, bool of_experts)"
    " -> (Tensor rows, Tensor w1, Tensor w3, Tensor w2, Tensor weights)",
)
def _experts_backward(
    grad: Tensor,
    rows: Tensor,
    gate: Tensor,
    up: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    weights: Tensor | None,
    ends: Tensor,
    of_rows: bool,
    of_experts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What was not asked for comes back empty."""
    if rows.shape[0] == 0:
        of_weights = rows.new_empty(0) if weights is None else weights.new_empty(0)
        of_experts_weights = (torch.zeros_like(w) for w in (w1, w3, w2))
        return torch.empty_like(rows), *of_experts_weights, of_weights
    grad_act = grouped_mm(grad, w2.transpose(1, 2), ends)
    grad_gate, grad_up, grad_weights, act = swiglu_backward(grad_act, gate, up, weights, ends)
    del grad_act
    grad_w1, grad_w3, grad_w2, grad_rows = (rows.new_empty(0) for _ in range(4))
    if of_experts:
        grad_w2 = grouped_mm_weight_grad(act, grad, ends)
        del act
        grad_w1 = grouped_mm_weight_grad(rows, grad_gate, ends)
        grad_w3 = grouped_mm_weight_grad(rows, grad_up, ends)
    if of_rows:
        grad_rows = grouped_mm(grad_gate, w1.transpose(1, 2), ends)
        grad_rows.add_(grouped_mm(grad_up, w3.transpose(1, 2), ends))
    if grad_weights is None:
        grad_weights = rows.new_empty(0)
    return grad_rows, grad_w1, grad_w3, grad_w2, grad_weights


@_experts_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, rows, _, _, w1, w3, w2, weights, _, of_rows, of_experts = inputs

    def made(like: Tensor | None, wanted: bool) -> Tensor:
        return like.new_empty(like.shape) if wanted and like is not None else rows.new_empty(0)

    of_weights = (made(w, of_experts) for w in (w1, w3, w2))
    return made(rows, of_rows), *of_weights, made(weights, True)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    rows, w1, w3, w2, weights, ends = inputs
    _, gate, up = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(gate, up)
    ctx.save_for_backward(rows, gate, up, w1, w3, w2, weights, ends)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    of_rows, of_experts = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:4])
    grads = _experts_backward(grad.contiguous(), *ctx.saved_tensors, of_rows, of_experts)
    wanted = zip(grads, ctx.needs_input_grad, strict=False)
    return *(each if is_wanted else None for each, is_wanted in wanted), None


def _refuse(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
    raise NotImplementedError(
        "GroupedExperts must be differentiated once, got a second derivative: its backward is an "
        "op without a gradient. Build the experts of hybrid_ep.moe.grouped_mm and torch ops instead"
    )


_experts.register_autograd(_backward, setup_context=_save)
_experts_backward.register_autograd(_refuse)
