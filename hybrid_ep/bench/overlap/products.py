"""Matrix products for the stream beside communication, and the SMs that they leave free."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hybrid_ep.bench.inputs import NUM_INPUTS

CAN_LEAVE_FREE = hasattr(torch._C, "_set_sm_carveout_experimental")
"""Whether products of this torch can leave SMs free."""

_SLOWER_BESIDE = 1.2  # communication beside products takes so much longer, about


def gemms_beside(communication_us: float, products_us: float, gemms: int) -> int:
    """How many of the products are launched while communication lasts."""
    return min(gemms, math.ceil(_SLOWER_BESIDE * communication_us * gemms / products_us))


class Products:
    """Matrix products, one after the other on the current stream.

    Args:
        product: ``product(i)`` launches the i-th.
        count: number of products.
    """

    def __init__(self, product: Callable[[int], Any], count: int) -> None:
        self._product, self._count = product, count

    def __call__(self, *, free_sms: int = 0, beside: int = 0) -> None:
        """Launch them; the first ``beside`` of them leave ``free_sms`` SMs free."""
        with leaving_free(free_sms) if beside else contextlib.nullcontext():
            for i in range(beside):
                self._product(i)
        for i in range(beside, self._count):
            self._product(i)


def dense(gemm: tuple[int, int, int], count: int, device: torch.device) -> Products:
    """``count`` bf16 products of M, K and N."""
    m, k, n = gemm
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return made.normal_(generator=generator)

    operands = [(draw(m, k), draw(k, n)) for _ in range(NUM_INPUTS)]
    out = draw(m, n)
    return Products(lambda i: torch.mm(*operands[i % NUM_INPUTS], out=out), count)


@contextlib.contextmanager
def leaving_free(sms: int) -> Iterator[None]:
    """Products launched inside leave so many SMs free; for a torch that ``CAN_LEAVE_FREE``.

    torch sets a target for cuBLASLt and for its grouped products (CUTLASS); its calls of plain
    cuBLAS know none, so that cuBLASLt is preferred inside.
    """
    preferred = torch.backends.cuda.preferred_blas_library()
    before = torch._C._get_sm_carveout_experimental()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch._C._set_sm_carveout_experimental(sms)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)
        torch.backends.cuda.preferred_blas_library(preferred)
