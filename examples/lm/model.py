"""The transformer: attention over bytes, then experts and a shared expert.

    x --norm, attention--> h --norm--> n --router--> top-k
    n --dispatch--> rows --experts--> rows --combine--> routed
    n --shared expert--> shared                          y = h + shared + routed

``halves`` cuts a batch in two inside each layer: while tokens of one half are under way, the other
half computes (docs/overlap.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hybrid_ep
from examples.lanes import FreeSms, Lane, in_turns, recompute_from
from examples.lm.moves import Arrived, Moves
from examples.lm.options import Options, Sizes
from examples.lm.spans import Spans
from examples.lm.text import VOCABULARY
from hybrid_ep.moe import GroupedExperts, Router
from hybrid_ep.saving import save_by_expert


class Routed(NamedTuple):
    """What the routers did.

    Attributes:
        aux_loss: float32 ``[]``, 1 where the load is even.
        counts: int32 ``[layers, E_local]``, rows of each expert of this rank.
        dropped: int32 ``[]``, rows that a bound dropped, of all layers.
    """

    aux_loss: Tensor
    counts: Tensor
    dropped: Tensor


class Norm(nn.RMSNorm):
    """In the dtype of its input, for which torch has one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal attention with rotary positions, whose queries share keys and values in groups."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.width = sizes.hidden // sizes.heads
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads
        projected = (sizes.heads + 2 * sizes.kv_heads) * self.width
        self.qkv = nn.Linear(sizes.hidden, projected, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """``[B, S, H]`` to the same; turn float32 ``[2, S, width / 2]``."""
        heads = self.qkv(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        y = F.scaled_dot_product_attention(
            _turned(q, turn), _turned(k, turn), v, is_causal=True, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    cos, sin = turn
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class SharedExpert(nn.Module):
    """SwiGLU that every token goes through."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_up = nn.Linear(sizes.hidden, 2 * sizes.shared_hidden, bias=False)
        self.down = nn.Linear(sizes.shared_hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """A layer.

    Args:
        options: sizes, overlap, recomputation.
        buffer: says which experts are this rank's.
        moves: dispatch and combine.
        lane: where they run.
        free_sms: around products that run beside them.
        spans: their times.
        seed: of the router and the experts.
    """

    def __init__(
        self,
        options: Options,
        buffer: hybrid_ep.Buffer,
        moves: Moves,
        lane: Lane,
        free_sms: FreeSms,
        spans: Spans,
        seed: int,
    ) -> None:
        super().__init__()
        sizes = options.sizes
        self.halves, self.recompute = options.overlap == "halves", options.recompute
        self.moves, self.lane, self.spans = moves, lane, spans
        self.dtype, self.free_sms = buffer.dtype, free_sms
        self.norm1, self.norm2 = Norm(sizes.hidden), Norm(sizes.hidden)
        self.attention, self.shared = Attention(sizes), SharedExpert(sizes)
        self.router = Router(
            sizes.hidden, sizes.experts, sizes.topk, seed=seed, device=buffer.device
        )
        self.experts = GroupedExperts(
            buffer.num_local_experts, sizes.hidden, sizes.ffn_hidden, device="meta"
        )
        self.experts.to_empty(device=buffer.device)
        _draw(self.experts, buffer, seed, sizes.layers)
        save_by_expert(self.experts, buffer)

    def forward(self, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``[B, S, H]`` to the same, and the fields of ``Routed`` of this layer."""
        if self.halves:
            return self._checkpointed(self._in_halves, x, turn)
        # a plain sum keeps no rows for its backward, so combine need not be made again
        y, rows, arrived, aux_loss = self._checkpointed(self._until_combine, x, turn)
        y = y + self.lane.start(self._combine, rows, arrived).wait().view_as(y)
        return y, aux_loss, *_load_of([arrived])

    def _checkpointed(self, function: Callable[..., Any], *inputs: Any) -> Any:
        if self.recompute:
            return hybrid_ep.checkpoint(function, *inputs)
        return function(*inputs)

    def _until_combine(self, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Arrived, Tensor]:
        mixed, tokens, routing, aux_loss = self._mix(x, turn)
        ready, shared = self.lane.now(), None
        if self.moves.host_waits:  # queued before the host waits, else behind the dispatch
            shared = self._beside(tokens)
        dispatched = self.lane.start(self._dispatch, tokens, *routing, since=ready)
        if shared is None:
            shared = self._beside(tokens)
        arrived = dispatched.wait()
        rows = self._compute(arrived)
        # made last, so that the recomputation begins there and not behind the backward of combine
        y = recompute_from(mixed + shared.view_as(mixed))
        return y, rows, arrived.without_rows(), aux_loss

    def _beside(self, tokens: Tensor) -> Tensor:
        return self.free_sms.end(self.shared(self.free_sms.begin(tokens)))

    def _in_halves(self, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.free_sms.begin(x)
        mixed, inputs, aux_losses, arrivals = [], [], [], []

        def parts() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for half in x.chunk(2):
                one, tokens, routing, aux_loss = self._mix(half, turn)
                mixed.append(one)
                inputs.append(tokens)
                aux_losses.append(aux_loss)
                yield tokens, *routing

        def compute(arrived: Arrived) -> Tensor:
            arrivals.append(arrived.without_rows())
            return self._compute(arrived)

        calls = self._dispatch, compute, self._combine
        combined = in_turns(self.lane, parts(), *calls, host_waits=self.moves.host_waits)
        shared = [self.shared(tokens) for tokens in inputs]
        summed = [
            one + (extra + routed.wait()).view_as(one)
            for one, extra, routed in zip(mixed, shared, combined, strict=True)
        ]
        y = self.free_sms.end(torch.cat(summed))
        return y, torch.stack(aux_losses).mean(), *_load_of(arrivals)

    def _mix(self, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]:
        """The residual, the tokens ``[T, H]`` for the experts, their routing, and its loss."""
        x = x + self.attention(self.norm1(x), turn)
        tokens = self.norm2(x).to(self.dtype).flatten(0, 1)
        topk_idx, topk_weights, aux_loss = self.router(tokens)
        return x, tokens, (topk_idx, topk_weights), aux_loss

    def _dispatch(self, *inputs: Tensor) -> Arrived:
        return self.spans.around(self.moves.dispatch, *inputs)

    def _compute(self, arrived: Arrived) -> Tensor:
        return self.experts(arrived.rows, arrived.offsets, arrived.weights)

    def _combine(self, rows: Tensor, arrived: Arrived) -> Tensor:
        return self.spans.around(lambda rows: self.moves.combine(rows, arrived), rows)


class Model(nn.Module):
    """Bytes in, the loss of the next byte out.

    Attributes:
        free_sms: of all layers; reset it after a step that may have raised.
    """

    def __init__(
        self, options: Options, buffer: hybrid_ep.Buffer, moves: Moves, spans: Spans
    ) -> None:
        super().__init__()
        sizes = options.sizes
        self.dtype = buffer.dtype
        lane = Lane(buffer.device, beside=options.overlap != "none")
        self.free_sms = FreeSms(options.leave_free)
        torch.manual_seed(options.seed)  # what is not the experts' is equal on all ranks
        with buffer.device:
            self.embed = nn.Embedding(VOCABULARY, sizes.hidden)  # of standard deviation 1
            self.blocks = nn.ModuleList(
                Block(options, buffer, moves, lane, self.free_sms, spans, seed)
                for seed in range(options.seed * 1_000, options.seed * 1_000 + sizes.layers)
            )
            self.norm = Norm(sizes.hidden)
            self.head = nn.Linear(sizes.hidden, VOCABULARY, bias=False)
            for name, weight in self.named_parameters():
                if weight.dim() == 2 and not name.endswith(("router.weight", "embed.weight")):
                    adds = name.endswith(("out.weight", "down.weight"))
                    nn.init.normal_(weight, std=_std(sizes.layers, adds=adds))
            half = sizes.hidden // sizes.heads // 2
            angle = torch.outer(torch.arange(sizes.sequence), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("turn", torch.stack([angle.cos(), angle.sin()]), persistent=False)

    def forward(self, text: Tensor) -> tuple[Tensor, Routed]:
        """Mean nats per byte of ``text``, int64 ``[B, S + 1]``; *collective*."""
        x = self.embed(text[:, :-1]).to(self.dtype)
        layers = []
        for block in self.blocks:
            x, *of_layer = block(x, self.turn)
            layers.append(of_layer)
        logits = self.head(self.norm(x)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        aux_losses, counts, dropped = zip(*layers, strict=True)
        routed = Routed(
            torch.stack(aux_losses).mean(), torch.stack(counts), torch.stack(dropped).sum()
        )
        return loss, routed


def _load_of(arrived: list[Arrived]) -> tuple[Tensor, Tensor]:
    """Rows of each expert, and rows dropped, over the parts of a batch."""
    counts = torch.stack([each.offsets.diff() for each in arrived]).sum(dim=0)
    dropped = [each.dropped for each in arrived if each.dropped is not None]
    return counts, torch.stack(dropped).sum() if dropped else counts.new_zeros(())


def _std(layers: int, *, adds: bool) -> float:
    """Of the first weights; smaller for matrices that add to the residual, twice per layer.

    What is added is alike for all tokens at first. If it outweighed the embeddings, routers would
    send all tokens to the same experts.
    """
    return 0.02 / (2 * layers) ** 0.5 if adds else 0.02


@torch.no_grad()
def _draw(experts: GroupedExperts, buffer: hybrid_ep.Buffer, seed: int, layers: int) -> None:
    """Each expert from a seed of its own, on any rank; on the device, which is fast."""
    first = buffer.topology.rank * buffer.num_local_experts
    for expert in range(buffer.num_local_experts):
        number = (seed + 1) * 100_003 + first + expert
        generator = torch.Generator(buffer.device).manual_seed(number)
        for name, weight in experts.named_parameters():
            weight[expert].normal_(std=_std(layers, adds=name == "w2"), generator=generator)
