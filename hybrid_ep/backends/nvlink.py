"""The nvlink backend: CUDA kernels over the NVLink domain of one host."""

from __future__ import annotations

from typing import Any


def unavailable_reason(buffer: Any) -> str | None:
    """What this rank lacks for the nvlink backend, as a sentence; None if nothing."""
    return "the extension was not built (no nvcc at installation)"


class NvlinkBackend:
    def __init__(self, buffer: Any) -> None:
        raise RuntimeError("not built")
