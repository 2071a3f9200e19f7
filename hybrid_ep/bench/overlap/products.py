"""Matrix products for the stream beside communication, and the SMs that they leave free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hybrid_ep.bench.inputs import NUM_INPUTS


class Products:
    """``gemms`` bf16 products of one shape, one after the other.

    Args:
        gemm: M, K and N of a product.
        gemms: number of products.
        device: of the operands.
    """

    def __init__(self, gemm: tuple[int, int, int], gemms: int, device: torch.device) -> None:
        m, k, n = gemm
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            made = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return made.normal_(generator=generator)

        self._operands = [(draw(m, k), draw(k, n)) for _ in range(NUM_INPUTS)]
        self._out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
        self._gemms = gemms

    def __call__(self) -> None:
        """Launch them on the current stream."""
        for i in range(self._gemms):
            torch.mm(*self._operands[i % NUM_INPUTS], out=self._out)


@contextlib.contextmanager
def leaving_free(sms: int) -> Iterator[None]:
    """Products launched inside leave so many SMs free.

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
