"""A layer of two halves that take turns: one is under way while the other computes.

    torchrun --nproc-per-node 2 -m examples.overlap

Runs the layer on one stream and with its communication on a lane (examples/lanes.py), checks that
results and gradients are the same bits, and prints the times. docs/overlap.md explains the recipe.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hybrid_ep
from examples.lanes import Lane, in_turns
from hybrid_ep.moe import GroupedExperts, Router
from hybrid_ep.saving import save_by_expert


class Layer(nn.Module):
    """A dense part, then experts.

    Args:
        buffer: of the experts.
        ffn_hidden: inner size of an expert.
        lane: where the calls of the Buffer run.
        num_parts: the batch is cut into so many.
        num_sms: SMs of a dispatch or a combine; None: as the Buffer's Config says.
        max_rows: bound on the rows of a part; None: exact.
    """

    def __init__(
        self,
        buffer: hybrid_ep.Buffer,
        ffn_hidden: int,
        lane: Lane,
        num_parts: int = 2,
        num_sms: int | None = None,
        max_rows: int | None = None,
    ) -> None:
        super().__init__()
        self.buffer, self.lane, self.num_parts = buffer, lane, num_parts
        self.num_sms, self.max_rows = num_sms, max_rows
        generator = torch.Generator().manual_seed(0)
        dense = torch.randn(buffer.hidden, buffer.hidden, generator=generator)
        self.dense = nn.Parameter((dense / buffer.hidden**0.5).to(buffer.device, buffer.dtype))
        self.router = Router(buffer.hidden, buffer.num_experts, buffer.topk, device=buffer.device)
        sizes = buffer.num_local_experts, buffer.hidden, ffn_hidden
        first = buffer.topology.rank * buffer.num_local_experts
        self.experts = GroupedExperts(
            *sizes, first_expert=first, dtype=buffer.dtype, device=buffer.device
        )
        save_by_expert(self.experts, buffer)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, H]`` to the same."""
        mixed: list[Tensor] = []

        def routed() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for part in x.chunk(self.num_parts):
                mixed.append(part + F.silu(part @ self.dense))
                topk_idx, topk_weights, _ = self.router(mixed[-1])
                yield mixed[-1], topk_idx, topk_weights

        calls = self._dispatch, self._compute, self._combine
        combined = in_turns(self.lane, routed(), *calls, host_waits=self.max_rows is None)
        return torch.cat([part + y.wait() for part, y in zip(mixed, combined, strict=True)])

    def _dispatch(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> hybrid_ep.Dispatched:
        bounds = {"max_rows": self.max_rows, "num_sms": self.num_sms}
        return hybrid_ep.dispatch(self.buffer, x, topk_idx, weights, **bounds)

    def _compute(self, arrived: hybrid_ep.Dispatched) -> Tensor:
        return self.experts(arrived.rows, arrived.offsets, arrived.weights)

    def _combine(self, rows: Tensor, arrived: hybrid_ep.Dispatched) -> Tensor:
        return hybrid_ep.combine(self.buffer, rows, arrived.handle, num_sms=self.num_sms)


def step(layer: Layer, x: Tensor, recompute: bool) -> dict[str, Tensor]:
    """A forward and a backward; the result and the gradients."""
    x = x.detach().requires_grad_()
    y = hybrid_ep.checkpoint(layer, x) if recompute else layer(x)
    y.float().square().mean().backward()
    found = {"y": y.detach(), "x": x.grad}
    for name, parameter in layer.named_parameters():
        found[name], parameter.grad = parameter.grad, None
    return found


def milliseconds(call: Callable[[], Any], device: torch.device, times: int) -> float:
    """Mean of some calls, the slowest rank's."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(3):
        call()
    synchronize()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        call()
    synchronize()
    taken = torch.tensor((time.perf_counter() - began) / times * 1e3)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="per rank")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn-hidden", type=int, default=768)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--num-sms", type=int, help="of a dispatch or a combine")
    parser.add_argument("--recompute", action="store_true", help="with an activation checkpoint")
    parser.add_argument("--times", type=int, default=20)
    options = parser.parse_args()
    device, dtype = torch.device("cpu"), torch.float32
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    dist.init_process_group("gloo")  # sets up any machine
    buffer = hybrid_ep.Buffer(
        hidden=options.hidden,
        num_experts=options.experts,
        max_tokens=options.tokens,
        topk=options.topk,
        dtype=dtype,
        device=device,
    )
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(options.tokens, options.hidden, generator=generator, device=device).to(dtype)
    found, times = [], []
    for beside in (False, True):
        layer = Layer(
            buffer, options.ffn_hidden, Lane(device, beside=beside), num_sms=options.num_sms
        )
        found.append(step(layer, x, options.recompute))
        call = lambda layer=layer: step(layer, x, options.recompute)  # noqa: E731
        times.append(milliseconds(call, device, options.times))
    for name, tensor in found[0].items():
        if not torch.equal(tensor, found[1][name]):
            raise RuntimeError(f"{name} must not depend on the streams, and differs between them")
    if dist.get_rank() == 0:
        print(buffer.describe())
        print("results and gradients are the same bits")
        print(f"forward and backward, two halves: one stream {times[0]:.2f} ms, ", end="")
        print(f"communication beside the caller's stream {times[1]:.2f} ms")
    dist.barrier()  # peers may still read this rank's memory
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
