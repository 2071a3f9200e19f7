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

from hybrid_ep._version import __version__
from hybrid_ep.backends.cuda import build
from hybrid_ep.backends.cuda.fabric import Port, nccl_files, read_ports
from hybrid_ep.doctor import nvidia

EXTENSION = "hybrid_ep._nvlink"
NETWORK_EXTENSION = "hybrid_ep._nvshmem"

# Variables that change what the library, or what carries it, does; other NCCL_ ones are shown too.
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CXX",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
PREFIXES = ("HYBRID_EP_", "NVSHMEM_", "NCCL_", "GLOO_")

# Where NVSHMEM looks for the kernel module that gives cards access to GPU memory.
PEER_MEMORY_FILES = (
    "sys/module/nvidia_peermem/version",
    "sys/kernel/mm/memory_peers/nvidia-peermem/version",
    "sys/kernel/mm/memory_peers/nv_mem/version",
)
_CAP_IPC_LOCK = 14


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
        network_extension: path of the built extension module of several nodes.
        network_extension_error: why it does not load.
        left_out: extension modules that the build of this package left out, and why.
        peer_access: ``[i][j]``, GPU i may load and store the memory of GPU j.
        topology: the matrix of ``nvidia-smi topo -m``.
        network_cards: InfiniBand and RoCE devices; ports: what they have.
        infiniband_files: their device files are there (/dev/infiniband/uverbs*).
        infiniband_error: why the first of them that does not open does not.
        locked_memory: bytes that this process may lock, where that is limited.
        peer_memory_module: nvidia_peermem is loaded.
        dma_buf: the driver exports GPU memory as dma-buf.
        peer_mapping_override: the driver option that lets the GPU ring a network card's bell.
        gdrcopy: the device file of GDRCopy is there, by which the CPU reaches GPU memory.
        imex: this process may use an IMEX channel, which memory handles for NVLink between hosts
            need; None where the driver knows no such channels.
        environment: variables that matter and are set.
        nccl_files: variables that NCCL takes from nccl.conf.
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
    network_extension: str | None = None
    network_extension_error: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    peer_access: tuple[tuple[bool, ...], ...] = ()
    topology: str | None = None
    network_cards: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()
    infiniband_files: bool = False
    infiniband_error: str | None = None
    locked_memory: int | None = None
    peer_memory_module: bool = False
    dma_buf: bool | None = None
    peer_mapping_override: bool | None = None
    gdrcopy: bool = False
    imex: bool | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    nccl_files: Mapping[str, str] = field(default_factory=dict)


def gather_facts(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Facts:
    """Look at this machine; what cannot be found out is left open, nothing here raises.

    Args:
        environment: of the process.
        root: where /sys, /dev, /proc and /etc are.

    Returns:
        Facts: what was found.
    """
    driver_gpus = nvidia.query_gpus("uuid,driver_version,memory.used")
    cuda_error = _torch_cuda_error()
    usable = torch.version.cuda is not None and cuda_error is None
    num_gpus = torch.cuda.device_count() if usable else 0
    extension, network_extension = map(_find_extension, (EXTENSION, NETWORK_EXTENSION))
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
        network_extension=network_extension,
        network_extension_error=network_load_error() if network_extension else None,
        left_out=build.left_out(),
        gpus=tuple(_gpus_of_torch(num_gpus, driver_gpus)),
        peer_access=tuple(
            tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(num_gpus))
            for i in range(num_gpus)
        ),
        topology=nvidia.topology(),
        network_cards=tuple(_names_in(root / "sys/class/infiniband")),
        ports=read_ports(root),
        infiniband_files=bool(_device_files(root)),
        infiniband_error=next(filter(None, map(_open_error, _device_files(root))), None),
        locked_memory=locked_memory(root),
        peer_memory_module=any((root / path).exists() for path in PEER_MEMORY_FILES),
        dma_buf=nvidia.dma_buf_supported(),
        peer_mapping_override=nvidia.peer_mapping_override(root),
        gdrcopy=(root / "dev/gdrdrv").exists(),
        imex=imex_usable(root),
        environment={
            name: value
            for name, value in environment.items()
            if name in ENVIRONMENT or name.startswith(PREFIXES)
        },
        nccl_files=nccl_files(environment, root),
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


def _find_extension(name: str) -> str | None:
    found = importlib.util.find_spec(name)
    return found.origin if found else None


def load_error(path: str) -> str | None:
    """Load the extension in a process of its own, which a crash may take down."""
    name = EXTENSION.rpartition(".")[2]
    program = (
        "import importlib.util as u, sys\n"
        "def load(name, path):\n"
        "    s = u.spec_from_file_location(name, path); m = u.module_from_spec(s)\n"
        "    s.loader.exec_module(m); return m\n"
        "load('build', sys.argv[3]).refuse_other_build(load(*sys.argv[1:3]))"
    )
    return _error_of(program, name, path, build.__file__)


def network_load_error() -> str | None:
    """The same with NVSHMEM under it, whose version must fit."""
    return _error_of("from hybrid_ep.backends.cuda import nvshmem; nvshmem.load_extension()")


def _error_of(program: str, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return last or f"the process that loaded it ended with code {done.returncode}"


# ---- what this process may do


def locked_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may lock; None where it may lock any."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text_of(root / "proc/self/status"), re.MULTILINE)
    if match and int(match[1], 16) >> _CAP_IPC_LOCK & 1:
        return None
    match = re.search(
        r"^Max locked memory\s+(\d+)\s", _text_of(root / "proc/self/limits"), re.MULTILINE
    )
    return int(match[1]) if match else None


def imex_usable(root: Path = Path("/")) -> bool | None:
    """Whether a channel of NVIDIA's IMEX service opens; None where the driver has none."""
    if "nvidia-caps-imex-channels" not in _text_of(root / "proc/devices"):
        return None
    channels = root / "dev/nvidia-caps-imex-channels"
    return any(_open_error(channels / name) is None for name in _names_in(channels))


def _device_files(root: Path) -> list[Path]:
    folder = root / "dev/infiniband"
    return [folder / name for name in _names_in(folder) if name.startswith("uverbs")]


def _open_error(path: Path) -> str | None:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
