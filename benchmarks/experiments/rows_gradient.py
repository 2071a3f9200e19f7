#!/usr/bin/env python3
"""The gradient of the rows of SwiGLU experts, d gate w1' + d up w3', as one product.

    PYTHONPATH=. python benchmarks/experiments/rows_gradient.py              times on a GPU
    PYTHONPATH=. TRITON_INTERPRET=1 python benchmarks/experiments/rows_gradient.py    checks alone

w1 and w3 are two contiguous parameters [E, H, F], and torch.nn.functional.grouped_mm takes one
strided matrix per group, so hybrid_ep.moe makes two products and adds them: one [M, H] is written,
read and written again. Question: does a Triton product that walks both weights for one tile of
the result beat two CUTLASS products and the sum? Prediction for M 32768, H 7168, F 2048 on an H200:
the sum is 0.34 ms of 3.27, so Triton must reach 590 TFLOP/s.

A persistent program per SM walks tiles of (expert, rows, columns). A tile's rows may reach into the
next group, whose results are not stored, so rows of no group may hold anything.
"""

from __future__ import annotations

import itertools
import os
import statistics

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hybrid_ep.moe.products import grouped_mm


@triton.jit
def _rows_gradient(
    gate,
    up,
    w1,
    w3,
    ends,
    out,
    num_experts,
    H,
    F,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_TURNS: tl.constexpr,
):
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(H, BLOCK_N)
    first = 0  # tile of the expert
    begin = 0  # row of the expert
    for expert in range(num_experts):
        end = tl.load(ends + expert)
        tiles_m = tl.cdiv(end - begin, BLOCK_M)
        while tile < first + tiles_m * tiles_n:
            row = begin + (tile - first) % tiles_m * BLOCK_M
            column = (tile - first) // tiles_m * BLOCK_N
            weight = expert * H + column
            acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            if IN_TURNS:
                for k in range(0, F, BLOCK_K):
                    acc = tl.dot(gate.load([row, k]), w1.load([weight, k]).T, acc)
                    acc = tl.dot(up.load([row, k]), w3.load([weight, k]).T, acc)
            else:
                for k in range(0, F, BLOCK_K):
                    acc = tl.dot(gate.load([row, k]), w1.load([weight, k]).T, acc)
                for k in range(0, F, BLOCK_K):
                    acc = tl.dot(up.load([row, k]), w3.load([weight, k]).T, acc)
            rows = row + tl.arange(0, BLOCK_M)
            columns = column + tl.arange(0, BLOCK_N)
            places = out + rows.to(tl.int64)[:, None] * H + columns[None, :]
            inside = (rows < end)[:, None] & (columns < H)[None, :]
            tl.store(places, acc.to(out.dtype.element_ty), mask=inside)
            tile += tl.num_programs(0)
        first += tiles_m * tiles_n
        begin = end


def one_product(
    grads: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    ends: Tensor,
    block: tuple[int, int, int],
    **options: int,
) -> Tensor:
    """``[M, H]`` of grads ``[M, F]`` and weights ``[E, H, F]``."""
    (num_experts, hidden, ffn_hidden), rows = weights[0].shape, len(grads[0])
    out = grads[0].new_empty(rows, hidden)
    sms = 3
    if out.is_cuda:
        sms = torch.cuda.get_device_properties(out.device).multi_processor_count
    block_m, block_n, block_k = block
    described = [
        TensorDescriptor.from_tensor(each.view(-1, ffn_hidden), [height, block_k])
        for each, height in ((*((g, block_m) for g in grads), *((w, block_n) for w in weights)))
    ]
    _rows_gradient[(sms,)](
        *described, ends, out, num_experts, hidden, ffn_hidden, *block, **options
    )
    return out


def two_products(
    grads: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], ends: Tensor
) -> Tensor:
    """As hybrid_ep.moe makes it."""
    first, second = (
        grouped_mm(grad, weight.transpose(1, 2), ends)
        for grad, weight in zip(grads, weights, strict=True)
    )
    return first.add_(second)


def inputs(
    groups: list[int], tail: int, hidden: int, ffn_hidden: int, device: str
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    rows = sum(groups) + tail
    grads = tuple(torch.randn(rows, ffn_hidden, device=device).to(dtype) for _ in range(2))
    for grad in grads:
        grad[sum(groups) :] = float("nan")
    shape = (len(groups), hidden, ffn_hidden)
    weights = tuple(
        (torch.randn(shape, device=device) * ffn_hidden**-0.5).to(dtype) for _ in range(2)
    )
    return grads, weights, torch.tensor(groups, device=device).cumsum(0).int()


def check(device: str) -> None:
    """Against two products, with uneven groups, an empty one and a tail of NaN."""
    for block, in_turns in itertools.product([(16, 32, 16), (32, 16, 16)], [0, 1]):
        if device == "cuda":
            block = (128, 128, 64) if in_turns else (128, 256, 64)
        grads, weights, ends = inputs([5, 0, 40, 3], 7, 48, 40, device)
        found = one_product(grads, weights, ends, block, IN_TURNS=in_turns)[:48]
        wanted = two_products(grads, weights, ends)[:48]
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    print("right")


def time_us(call: object, number: int = 20) -> float:
    times = []
    for _ in range(5 + number):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[5:])


def main() -> None:
    """Check, then time each setting."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check(device)
    if device == "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        return
    for rows, experts, hidden, ffn_hidden in ((32768, 32, 7168, 2048), (32768, 16, 4096, 1536)):
        groups = torch.multinomial(torch.ones(experts), rows, replacement=True).bincount(
            minlength=experts
        )
        made = inputs(groups.tolist(), rows // 8, hidden, ffn_hidden, device)
        flops = 4 * rows * hidden * ffn_hidden
        told = [("two products and a sum", time_us(lambda made=made: two_products(*made)))]
        for block_n, in_turns, stages in ((256, 0, 3), (256, 0, 4), (128, 1, 3), (256, 1, 2)):
            options = {"IN_TURNS": in_turns, "num_stages": stages, "num_warps": 8}
            block = (128, block_n, 64)
            name = f"one product, {block}, {options}"
            try:
                us = time_us(lambda b=block, o=options, m=made: one_product(*m, b, **o))
            except triton.runtime.errors.OutOfResources as error:
                print(f"{name}: {error}")
                continue
            told.append((name, us))
        print(f"M {rows}, E {experts}, H {hidden}, F {ffn_hidden}")
        for name, us in told:
            print(f"  {us:8.0f} us  {flops / us / 1e6:6.0f} TFLOP/s  {name}")


if __name__ == "__main__":
    main()
