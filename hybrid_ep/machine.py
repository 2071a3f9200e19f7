"""What this machine has that matters to the library, found out without crashing anywhere."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid_ep import nvidia
from hybrid_ep._version import __version__

EXTENSION = "hybrid_ep._nvlink"

# Variables that change what the library, or what carries it, does; other NCCL_ ones are shown too.
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MPS_PIPE_DIRECTORY",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
PREFIXES = ("HYBRID_EP_", "NVSHMEM_", "NCCL_", "GLOO_")


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees; None is unknown.

    Attributes:
        nvlink_lanes: links that are up.
        num_processes: processes that compute on it.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    used_bytes: int | None = None
    num_processes: int | None = None
    nvlink_lanes: int | None = None


@dataclass(frozen=True)
class Facts:
    """What was found; None is "not there" for a version and "unknown" for the rest.

    Attributes:
        system: kernel name as ``platform.system`` has it.
        distributed: torch has torch.distributed; gloo, nccl: and these in it.
        torch_cuda: CUDA version that torch was built for.
        torch_cuda_error: why torch cannot use the GPUs of the driver.
        driver: version of the kernel driver; driver_cuda: newest CUDA version that it serves.
        num_driver_gpus: GPUs that the driver lists, visible to torch or not.
        nvshmem: wheel and version, or NVSHMEM_HOME and version.
        extension: path of the built extension module.
        extension_error: why it does not load.
        peer_access: ``[i][j]``, GPU i may load and store the memory of GPU j.
        topology: the matrix of ``nvidia-smi topo -m``.
        network_cards: InfiniBand and RoCE devices.
        infiniband_files: their device files are there (/dev/infiniband/uverbs*).
        peer_memory_module: nvidia_peermem is loaded.
        dma_buf: the driver exports GPU memory as dma-buf.
        peer_mapping_override: the driver option that lets the GPU ring a network card's bell.
        environment: variables that matter and are set.
    """

    system: str
    python: str
    hybrid_ep: str
    torch: str
    distributed: bool
    gloo: bool
    nccl: bool
    pybind11: str | None = None
    torch_cuda: str | None = None
    torch_cuda_error: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    num_driver_gpus: int = 0
    nvcc: str | None = None
    nvshmem: str | None = None
    extension: str | None = None
    extension_error: str | None = None
    gpus: tuple[Gpu, ...] = ()
    peer_access: tuple[tuple[bool, ...], ...] = ()
    topology: str | None = None
    network_cards: tuple[str, ...] = ()
    infiniband_files: bool = False
    peer_memory_module: bool = False
    dma_buf: bool | None = None
    peer_mapping_override: bool | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def gather_facts(environment: Mapping[str, str] = os.environ) -> Facts:
    """Look at this machine; what cannot be found out is left open, nothing here raises."""
    driver_gpus = nvidia.query_gpus("uuid,driver_version,memory.used")
    cuda_error = _torch_cuda_error()
    usable = torch.version.cuda is not None and cuda_error is None
    num_gpus = torch.cuda.device_count() if usable else 0
    extension = _find_extension()
    distributed = dist.is_available()
    return Facts(
        system=platform.system(),
        python=platform.python_version(),
        hybrid_ep=__version__,
        torch=torch.__version__,
        pybind11=_package_version("pybind11"),
        distributed=distributed,
        gloo=distributed and dist.is_gloo_available(),
        nccl=distributed and dist.is_nccl_available(),
        torch_cuda=torch.version.cuda,
        torch_cuda_error=cuda_error,
        driver=next((row[1] for row in driver_gpus if len(row) > 1), None),
        driver_cuda=nvidia.driver_cuda(),
        num_driver_gpus=len(driver_gpus),
        nvcc=nvidia.nvcc_version(environment),
        nvshmem=_nvshmem_version(environment),
        extension=extension,
        extension_error=load_error(extension) if extension else None,
        gpus=tuple(_gpus_of_torch(num_gpus, driver_gpus)),
        peer_access=tuple(
            tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(num_gpus))
            for i in range(num_gpus)
        ),
        topology=nvidia.topology(),
        network_cards=tuple(sorted(_names_in("/sys/class/infiniband"))),
        infiniband_files=any(name.startswith("uverbs") for name in _names_in("/dev/infiniband")),
        peer_memory_module=os.path.exists("/sys/module/nvidia_peermem"),
        dma_buf=nvidia.dma_buf_supported(),
        peer_mapping_override=nvidia.peer_mapping_override(),
        environment={
            name: value
            for name, value in environment.items()
            if name in ENVIRONMENT or name.startswith(PREFIXES)
        },
    )


def _torch_cuda_error() -> str | None:
    """Why a torch that is built for CUDA cannot use the GPUs."""
    if torch.version.cuda is None:
        return None
    try:
        torch.cuda.init()
    except Exception as error:  # whatever torch raises is the fact we are after
        return str(error).partition("\n")[0].rstrip(".")
    return None


def _gpus_of_torch(num_gpus: int, driver_gpus: list[list[str]]) -> Iterator[Gpu]:
    """Torch's GPUs, with what nvidia-smi knows about each, matched by UUID."""
    used = {row[0]: row[2] for row in driver_gpus if len(row) == 3 and row[2].isdigit()}
    lanes = nvidia.nvlink_lanes()
    processes = [row[0] for row in nvidia.query_processes("gpu_uuid,pid")]
    for index in range(num_gpus):
        gpu = torch.cuda.get_device_properties(index)
        uuid = f"GPU-{getattr(gpu, 'uuid', '')}"
        yield Gpu(
            name=gpu.name,
            capability=(gpu.major, gpu.minor),
            num_sms=gpu.multi_processor_count,
            memory_bytes=gpu.total_memory,
            used_bytes=int(used[uuid]) * 2**20 if uuid in used else None,
            num_processes=processes.count(uuid) if uuid in used else None,
            nvlink_lanes=lanes.get(uuid),
        )


# ---- what is installed


def _nvshmem_version(environment: Mapping[str, str]) -> str | None:
    if home := environment.get("NVSHMEM_HOME"):
        return f"NVSHMEM_HOME {_version_in_header(home) or 'of unknown version'}"
    for wheel in ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"):
        if version := _package_version(wheel):
            return f"{wheel} {version}"
    return None


def _version_in_header(home: str) -> str | None:
    try:
        text = Path(home, "include/non_abi/nvshmem_version.h").read_text(errors="replace")
    except OSError:
        return None
    numbers = re.findall(r"define NVSHMEM_VENDOR_(?:MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", text)
    return ".".join(numbers)


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_extension() -> str | None:
    found = importlib.util.find_spec(EXTENSION)
    return found.origin if found else None


def load_error(path: str) -> str | None:
    """Load the extension in a process of its own, which a crash may take down."""
    name = EXTENSION.rpartition(".")[2]
    program = (
        "import importlib.util as u, sys; s = u.spec_from_file_location(*sys.argv[1:]); "
        "s.loader.exec_module(u.module_from_spec(s))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, name, path], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return last or f"the process that loaded it ended with code {done.returncode}"


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
