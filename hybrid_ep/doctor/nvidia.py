"""What NVIDIA's tools and driver say about this machine; None where they are not there to ask."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

# Whether the driver can hand GPU memory to a network card without the nvidia_peermem module.
_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED


# ---- nvidia-smi


def query_gpus(fields: str) -> list[list[str]]:
    """The comma-separated fields of each GPU that the driver lists."""
    return _csv(_nvidia_smi(f"--query-gpu={fields}"))


def query_processes(fields: str) -> list[list[str]]:
    """The comma-separated fields of each process that computes on a GPU."""
    return _csv(_nvidia_smi(f"--query-compute-apps={fields}"))


def nvlink_lanes() -> dict[str, int]:
    """Links that are up, for each GPU's UUID."""
    return parse_lanes(_output_of("nvidia-smi", "nvlink", "-s"))


def topology() -> str | None:
    """How GPUs and network cards are joined, as a matrix."""
    return parse_topology(_output_of("nvidia-smi", "topo", "-m"))


def parse_lanes(status: str | None) -> dict[str, int]:
    """Links that are up for each GPU's UUID, from the text of ``nvidia-smi nvlink -s``."""
    lanes: dict[str, int] = {}
    uuid = None
    for line in (status or "").splitlines():
        if match := re.match(r"GPU \d+:.*UUID: ([^)]+)\)", line):
            uuid = match[1]
            lanes[uuid] = 0
        elif uuid and re.match(r"\s*Link \d+: [\d.]+ GB/s", line):
            lanes[uuid] += 1
    return lanes


def parse_topology(text: str | None) -> str | None:
    """The matrix of ``nvidia-smi topo -m`` without its legend and its colours."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", text or "")
    rows = [line.rstrip() for line in plain.split("Legend")[0].splitlines() if line.strip()]
    return "\n".join(row.expandtabs(8) for row in rows) or None


def _nvidia_smi(query: str) -> str | None:
    return _output_of("nvidia-smi", query, "--format=csv,noheader,nounits")


def _csv(text: str | None) -> list[list[str]]:
    return [[cell.strip() for cell in row.split(",")] for row in (text or "").splitlines() if row]


def _output_of(*command: str) -> str | None:
    """What a command prints; None where it is not there, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# ---- the compiler


def nvcc_version(environment: Mapping[str, str]) -> str | None:
    """Version of the nvcc in CUDA_HOME, or else on the PATH."""
    home = environment.get("CUDA_HOME")
    nvcc = (home and shutil.which("nvcc", path=f"{home}/bin")) or shutil.which("nvcc")
    match = re.search(r"release [\d.]+, V([\d.]+)", (nvcc and _output_of(nvcc, "--version")) or "")
    return match[1] if match else None


# ---- the driver


def driver_cuda() -> str | None:
    """The newest CUDA version that the driver serves."""
    driver, version = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def dma_buf_supported() -> bool | None:
    """Whether the driver exports the memory of the first GPU as dma-buf."""
    driver, answer = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0):
        return None
    if driver.cuDeviceGetAttribute(ctypes.byref(answer), _DMA_BUF_SUPPORTED, 0):
        return None
    return bool(answer.value)


def peer_mapping_override(root: Path = Path("/")) -> bool | None:
    """Whether the driver lets a GPU ring a network card's bell."""
    try:
        return "PeerMappingOverride=1" in (root / "proc/driver/nvidia/params").read_text()
    except OSError:
        return None


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
