"""A dropless mixture-of-experts layer on dispatch and combine, made to be copied and changed.

    x [T, H] --Router--> topk_idx, topk_weights [T, K]
      --dispatch--> rows [M, H] --GroupedExperts--> rows [M, H] --combine, weighted--> y [T, H]

Every rank calls the layer with its own tokens and holds the experts that the Buffer gives it. An
expert is drawn from a seed of its own, so the ranks' experts together are those of one process that
holds them all, whatever the number of ranks.

Gradients: an expert sees the tokens of all ranks and so gets the sum of all ranks' gradients with
nothing to reduce. For a loss that is the mean over R ranks, call ``(loss / R).backward()`` and
all-reduce (sum) the gradients of ``replicated_parameters(model)``.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_ep.buffer import Buffer
from hybrid_ep.limits import as_integer
from hybrid_ep.ops import combine, dispatch
from hybrid_ep.saving import owners, save_by_expert


class MoEOutput(NamedTuple):
    """What ``MoELayer`` returns.

    Attributes:
        y: shape and dtype of x.
        aux_loss: float32 ``[]``, 1 where the load is even; add a small multiple (0.01) to the loss.
        counts: int32 ``[E_local]``, rows that each expert of this rank got from all ranks.
        overflow: bool ``[]``, true where ``max_rows`` was too small and rows were dropped.
    """

    y: Tensor
    aux_loss: Tensor
    counts: Tensor
    overflow: Tensor


class Router(nn.Module):
    """Softmax over the experts in float32, then the K largest.

    Args:
        hidden: H.
        num_experts: E, over all ranks.
        topk: K.
        renormalise: make the K weights of a token sum to 1.
        seed: of the weight, which is equal on all ranks.
        device: of the weight, which is float32; None: torch's default device.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        *,
        renormalise: bool = True,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.topk, self.renormalise, self.seed = topk, renormalise, seed
        weight = torch.empty(num_experts, hidden, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(weight)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight from the seed; nothing is drawn on the meta device."""
        if not self.weight.is_meta:
            self.weight.copy_(_draw(self.weight.shape, _generator(self.seed, -1)) * 0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the experts.

        Args:
            x: ``[T, H]``.

        Returns:
            tuple: topk_idx int64 ``[T, K]``, topk_weights float32 ``[T, K]``, aux_loss float32
            ``[]``: E * sum over experts of (share of the slots) * (mean probability), of this
            rank's tokens.
        """
        with torch.autocast(x.device.type, enabled=False):  # near ties are decided in float32
            probs = F.linear(x.float(), self.weight.float()).softmax(dim=-1)
        weights, idx = probs.topk(self.topk, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)

        num_tokens, num_experts = max(1, probs.shape[0]), probs.shape[1]  # T may be 0
        slots = idx.flatten()
        load = probs.new_zeros(num_experts).scatter_add(0, slots, probs.new_ones(slots.shape))
        share = load / (num_tokens * self.topk)
        aux_loss = num_experts * (share * probs.sum(dim=0) / num_tokens).sum()
        return idx, weights, aux_loss


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
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.first_expert, self.seed = first_expert, seed

        def weights(inner: int, outer: int) -> nn.Parameter:
            shape = (num_local_experts, inner, outer)
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        self.w1, self.w3 = weights(hidden, ffn_hidden), weights(hidden, ffn_hidden)
        self.w2 = weights(ffn_hidden, hidden)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each expert's weights from the seed; nothing is drawn on the meta device."""
        if self.w1.is_meta:
            return
        for expert in range(self.w1.shape[0]):
            generator = _generator(self.seed, self.first_expert + expert)
            for weight in (self.w1, self.w3, self.w2):
                drawn = _draw(weight.shape[1:], generator)
                weight[expert].copy_(drawn * drawn.shape[0] ** -0.5)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Apply each expert to its group of rows.

        Args:
            rows: ``[M, H]``, grouped by expert.
            offsets: int32 ``[E_local + 1]``, first row of each group; rows from ``offsets[-1]`` on
                belong to nobody and their results mean nothing.

        Returns:
            Tensor: ``[M, H]``, dtype of rows.
        """
        ends = offsets[1:]
        w1, w3, w2 = (w.to(rows.dtype) for w in (self.w1, self.w3, self.w2))
        gate = F.silu(grouped_mm(rows, w1, ends))
        return grouped_mm(gate * grouped_mm(rows, w3, ends), w2, ends)


class MoELayer(nn.Module):
    """Router, dispatch, experts, combine.

    Args:
        buffer: says how many experts there are, which are mine, top-k and where tensors live; any
            number of layers may share one.
        ffn_hidden: F, inner size of an expert.
        renormalise: make the K weights of a token sum to 1.
        max_rows: bound on the rows a rank receives. With it shapes are static and nothing waits for
            the host (CUDA graphs, ``torch.compile``), rows beyond it are dropped and ``overflow``
            says so. None: exact, nothing is dropped.
        seed: give every layer another one.
        dtype: of the experts' weights.
        device: of the weights. None: the meta device where it is torch's default device, else the
            Buffer's, as the layer runs on no other. For weights on the meta device call
            ``to_empty(device=...)`` and then ``reset_parameters()``, or load a checkpoint.
    """

    def __init__(
        self,
        buffer: Buffer,
        ffn_hidden: int,
        *,
        renormalise: bool = True,
        max_rows: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if device is None:
            is_deferred = torch.empty(0).is_meta
            device = torch.device("meta") if is_deferred else buffer.device
        if max_rows is not None:  # a compiler takes numpy's integers for tensors
            max_rows = as_integer("max_rows", max_rows, 0)
        self.buffer, self.max_rows = buffer, max_rows
        self.router = Router(
            buffer.hidden,
            buffer.num_experts,
            buffer.topk,
            renormalise=renormalise,
            seed=seed,
            device=device,
        )
        self.experts = GroupedExperts(
            buffer.num_local_experts,
            buffer.hidden,
            ffn_hidden,
            first_expert=buffer.topology.rank * buffer.num_local_experts,
            seed=seed,
            dtype=dtype,
            device=device,
        )
        save_by_expert(self.experts, buffer)

    def reset_parameters(self) -> None:
        """Draw the router and the experts from the seed, as they were when the layer was built."""
        self.router.reset_parameters()
        self.experts.reset_parameters()

    def forward(self, x: Tensor) -> MoEOutput:
        """Collective: all ranks call it, each with its own tokens (none is fine).

        Args:
            x: ``[..., H]`` of float32, float16 or bfloat16; its dtype is what travels.

        Returns:
            MoEOutput: y of x's shape and dtype, and what the router did.
        """
        tokens = x.reshape(-1, x.shape[-1])
        topk_idx, topk_weights, aux_loss = self.router(tokens)
        out = dispatch(self.buffer, tokens, topk_idx, topk_weights, max_rows=self.max_rows)
        rows = self.experts(out.rows, out.offsets)
        y = combine(self.buffer, rows, out.handle, weights=out.weights)
        return MoEOutput(y.view(x.shape), aux_loss, out.counts, out.handle.overflow)


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that each rank has for itself, by name: ``GroupedExperts``, ``save_by_expert``."""
    experts = set(owners())
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            experts.update(module.parameters())
    return {name: weight for name, weight in model.named_parameters() if weight in experts}


def replicated_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that all ranks hold alike: everything but the experts."""
    experts = set(expert_parameters(model).values())
    return [parameter for parameter in model.parameters() if parameter not in experts]


# ---- one matrix product per group of rows


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix; differentiable.

    Args:
        rows: ``[M, I]``; group e is ``rows[ends[e - 1]:ends[e]]``.
        weight: ``[E, I, O]``, dtype of rows.
        ends: int32 ``[E]``, ascending; rows after the last belong to no group, and what becomes of
            them is undefined (the kernel leaves them unwritten, NaN may be among them). That is
            harmless between dispatch and combine, which look at no such row in either direction.

    Returns:
        Tensor: ``[M, O]``.
    """
    if _has_kernel(rows, weight):
        return F.grouped_mm(rows, weight, offs=ends)
    return _loop_mm(rows, weight, ends)


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """One kernel for all groups, ends never leave the GPU: bf16 on Hopper and later, torch >= 2.10.

    It wants strides of 16 bytes. torch also takes fp32 and the CPU, but there it loops as we do,
    leaves the tail uninitialised, and its fake implementation refuses fp32, so that
    ``torch.compile`` fails (torch 2.13).
    """
    return (
        rows.is_cuda
        and rows.dtype == weight.dtype == torch.bfloat16
        and rows.shape[1] % 8 == weight.shape[2] % 8 == 0
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    )


# Elsewhere a loop over the experts. It is an op, because the loop's bounds are data: torch.compile
# sees one node of static shape in place of a graph break. Reading the ends waits for a GPU.


@torch.library.custom_op("hybrid_ep::loop_mm", mutates_args=())
def _loop_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    groups = _groups(ends)
    for expert, group in enumerate(groups):
        torch.mm(rows[group], weight[expert], out=out[group])
    out[groups[-1].stop :] = 0
    return out


@_loop_mm.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.custom_op("hybrid_ep::loop_mm_weight_grad", mutates_args=())
def _loop_mm_weight_grad(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])
    for expert, group in enumerate(_groups(ends)):
        torch.mm(rows[group].t(), grad[group], out=out[expert])
    return out


@_loop_mm_weight_grad.register_fake
def _(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])


def _groups(ends: Tensor) -> list[slice]:
    bounds = [0, *ends.tolist()]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def _save_loop_mm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _loop_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_rows = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_rows = _loop_mm(grad, weight.transpose(1, 2), ends)
    if ctx.needs_input_grad[1]:
        grad_weight = _loop_mm_weight_grad(rows, grad, ends)
    return grad_rows, grad_weight, None


_loop_mm.register_autograd(_loop_mm_backward, setup_context=_save_loop_mm)


def _generator(seed: int, expert: int) -> torch.Generator:
    """Of one expert (-1: of the router), on the CPU so that every device draws alike."""
    return torch.Generator("cpu").manual_seed(seed * 1_000_003 + expert + 1)


def _draw(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Float32 of the normal distribution, on the CPU; the defaults of torch do not matter."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
