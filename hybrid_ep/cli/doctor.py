"""What this machine has, what each backend needs of it, and what to do about the difference.

Exit code 0: the torch backend works and nothing that is installed is broken; 1 otherwise.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid_ep._version import __version__

HELP = "what this machine has, what each backend needs, and what to do about it"

MIN_PYTHON = (3, 10)
MIN_TORCH = (2, 6)
MIN_CAPABILITY = (9, 0)
MIN_NVSHMEM = (3, 0)
BACKENDS = ("torch", "nvlink", "nvshmem")
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

# Whether the driver can hand GPU memory to a network card without the nvidia_peermem module.
_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED


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


@dataclass(frozen=True)
class Finding:
    """A need of a backend, whether it is met, and what to do or to know.

    Attributes:
        advice: a sentence where the need is not met, or where it is met but worth a word; else "".
        broken: something that is installed does not work, as opposed to not being there.
    """

    backend: str
    need: str
    ok: bool
    advice: str = ""
    broken: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Examine this machine and print what was found."""
    facts = gather_facts()
    findings = diagnose(facts)
    healthy = is_healthy(findings)
    if args.json:
        report = {
            "healthy": healthy,
            "usable": usable_backends(findings),
            "facts": asdict(facts),
            "findings": [asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(describe(facts, findings)))
    return 0 if healthy else 1


# ---- facts -> findings


def diagnose(facts: Facts) -> list[Finding]:
    """What each backend needs, in the order in which it is worth fixing."""
    return [*_torch_needs(facts), *_nvlink_needs(facts), *_nvshmem_needs(facts)]


def usable_backends(findings: Sequence[Finding]) -> list[str]:
    """The backends whose needs are all met."""
    return [name for name in BACKENDS if all(f.ok for f in findings if f.backend == name)]


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Whether the torch backend works and nothing that is installed is broken."""
    return "torch" in usable_backends(findings) and not any(f.broken for f in findings)


def _torch_needs(facts: Facts) -> Iterator[Finding]:
    def finding(need: str, ok: bool, advice: str) -> Finding:
        return Finding("torch", need, ok, "" if ok else advice)

    yield finding(
        f"Python {_dotted(MIN_PYTHON)} or later",
        version_of(facts.python) >= MIN_PYTHON,
        f"This is Python {facts.python}: use a newer one.",
    )
    yield finding(
        f"torch {_dotted(MIN_TORCH)} or later",
        version_of(facts.torch) >= MIN_TORCH,
        f"This is torch {facts.torch}: pip install --upgrade torch.",
    )
    yield finding(
        "torch.distributed",
        facts.distributed,
        "This torch was built without torch.distributed: install one that has it.",
    )
    yield finding(
        "gloo",
        facts.gloo,
        "This torch was built without gloo, which sets ranks up: install one that has it.",
    )
    if facts.gpus:
        advice = "This torch has no NCCL: rows go through host memory, which is slow."
        need = "NCCL between GPUs (optional)"
        yield Finding("torch", need, True, "" if facts.nccl else advice)


def _nvlink_needs(facts: Facts) -> Iterator[Finding]:
    ok = facts.system == "Linux"
    advice = "" if ok else f"CUDA IPC is used as Linux has it, not {facts.system}."
    yield Finding("nvlink", "Linux", ok, advice)
    yield _torch_with_cuda(facts)
    yield _gpus(facts)
    yield _extension(facts)

    cuda_of_nvcc = version_of(facts.nvcc or "")[:1]
    cuda_of_driver = version_of(facts.driver_cuda or "")[:1]
    if facts.extension and cuda_of_nvcc and cuda_of_driver:
        ok = cuda_of_nvcc <= cuda_of_driver
        advice = (
            f"The driver {facts.driver} serves CUDA {facts.driver_cuda}, nvcc is {facts.nvcc}: "
            "build with an older nvcc or update the driver."
        )
        need = "a driver as new as the extension's CUDA"
        yield Finding("nvlink", need, ok, "" if ok else advice)

    yield _peers(facts)
    yield from _nvlink_remarks(facts)


def _torch_with_cuda(facts: Facts) -> Finding:
    need = "a torch that can use the GPUs"
    if facts.torch_cuda is None:
        advice = f"torch {facts.torch} is built for the CPU" + (
            f" and the driver lists {facts.num_driver_gpus} GPU(s): install a CUDA build of torch."
            if facts.num_driver_gpus
            else ", which suits a machine without GPUs."
        )
        return Finding("nvlink", need, False, advice)
    if facts.torch_cuda_error is None:
        return Finding("nvlink", need, True)
    hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1"):
        advice = f"CUDA_VISIBLE_DEVICES={hidden!r} hides all GPUs: unset it."
        return Finding("nvlink", need, False, advice)
    if not facts.num_driver_gpus:
        return Finding("nvlink", need, False, f"torch says: {facts.torch_cuda_error}.")
    advice = (
        f"The driver lists {facts.num_driver_gpus} GPU(s) and torch cannot use them: "
        f"{facts.torch_cuda_error}. Driver {facts.driver} serves CUDA "
        f"{facts.driver_cuda or 'unknown'}, torch is built for {facts.torch_cuda}."
    )
    return Finding("nvlink", need, False, advice, broken=True)


def _gpus(facts: Facts) -> Finding:
    need = f"GPUs of capability {_dotted(MIN_CAPABILITY)} or later (Hopper)"
    if not facts.gpus:
        return Finding(
            "nvlink", need, False, "torch sees no GPU: use the torch backend on this machine."
        )
    old = [
        f"GPU {i} ({gpu.name}, {_dotted(gpu.capability)})"
        for i, gpu in enumerate(facts.gpus)
        if gpu.capability < MIN_CAPABILITY
    ]
    advice = (
        f"Too old: {', '.join(old)}. The kernels use TMA: choose other GPUs with "
        "CUDA_VISIBLE_DEVICES, or use the torch backend."
    )
    return Finding("nvlink", need, not old, advice if old else "")


def _extension(facts: Facts) -> Finding:
    need = f"the extension module {EXTENSION}"
    if facts.extension is None:
        advice = "Not built. " + (
            f"nvcc {facts.nvcc} is here: run `make build`, or install the package again with "
            "`pip install --no-build-isolation .`."
            if facts.nvcc
            else "No nvcc either: install a CUDA toolkit (nvcc on PATH or in CUDA_HOME), then "
            "install the package again with `pip install --no-build-isolation .`."
        )
        return Finding("nvlink", need, False, advice)
    if facts.extension_error is not None:
        advice = (
            f"{facts.extension} does not load: {facts.extension_error}. Build it again for this "
            f"Python {facts.python} and this host compiler (`make clean build`)."
        )
        return Finding("nvlink", need, False, advice, broken=True)
    return Finding("nvlink", need, True)


def _peers(facts: Facts) -> Finding:
    need = "GPUs that reach each other's memory"
    if len(facts.gpus) < 2:
        one = "There is one GPU: ranks that share it reach each other, for tests; it is slow."
        return Finding("nvlink", need, bool(facts.gpus), one if facts.gpus else "There is no GPU.")
    blocked = [
        f"{i} -> {j}"
        for i, row in enumerate(facts.peer_access)
        for j, reaches in enumerate(row)
        if i != j and not reaches
    ]
    if blocked:
        shown = ", ".join(blocked[:6]) + (", ..." if len(blocked) > 6 else "")
        advice = (
            f"No peer access for {shown}: choose GPUs that have it with CUDA_VISIBLE_DEVICES, and "
            "look at virtualisation, MIG and the IOMMU, which can forbid it."
        )
        return Finding("nvlink", need, False, advice)
    if all(gpu.nvlink_lanes == 0 for gpu in facts.gpus):
        advice = "They do so over PCIe, as no NVLink is up: right results, at PCIe's speed."
        return Finding("nvlink", need, True, advice)
    return Finding("nvlink", need, True)


def _nvlink_remarks(facts: Facts) -> Iterator[Finding]:
    """What looks like a problem and is none, or costs speed only."""
    alloc = " ".join(facts.environment.get(name, "") for name in ENVIRONMENT if "ALLOC" in name)
    if "expandable_segments:true" in alloc.lower().replace(" ", ""):
        advice = "expandable_segments is fine: what peers read is memory of our own, not torch's."
        yield Finding("nvlink", "memory that peers can open", True, advice)
    if facts.environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        advice = "CUDA_LAUNCH_BLOCKING is set: every call waits for all peers on the host."
        yield Finding("nvlink", "asynchronous launches (optional)", True, advice)
    busy = [i for i, gpu in enumerate(facts.gpus) if gpu.num_processes]
    if busy:
        advice = f"Others compute on GPU {', '.join(map(str, busy))}: waits take time slices."
        yield Finding("nvlink", "GPUs to oneself (optional)", True, advice)


def _nvshmem_needs(facts: Facts) -> Iterator[Finding]:
    def finding(need: str, ok: bool, advice: str) -> Finding:
        return Finding("nvshmem", need, ok, "" if ok else advice)

    yield finding(
        "the backend itself",
        False,
        "Not part of this version yet. The rest says whether this machine is ready for it.",
    )
    version = version_of((facts.nvshmem or "").split(" ")[-1])
    yield finding(
        f"NVSHMEM {_dotted(MIN_NVSHMEM)} or later",
        version >= MIN_NVSHMEM,
        (f"Found {facts.nvshmem}. " if facts.nvshmem else "")
        + f"Install {_nvshmem_wheel(facts)}, or set NVSHMEM_HOME.",
    )
    yield finding(
        "an InfiniBand or RoCE card",
        bool(facts.network_cards),
        "None in /sys/class/infiniband: several nodes would need one per GPU, or nearly.",
    )
    yield finding(
        "its device files",
        facts.infiniband_files,
        "No /dev/infiniband/uverbs*: load ib_uverbs; in a container, pass /dev/infiniband and "
        "raise the locked-memory limit (--device /dev/infiniband --ulimit memlock=-1).",
    )
    yield finding(
        "GPU memory open to the card (nvidia_peermem or dma-buf)",
        facts.peer_memory_module or bool(facts.dma_buf),
        "Neither: `modprobe nvidia_peermem`, or use the open kernel driver, which has dma-buf.",
    )
    yield finding(
        "IBGDA: the driver option PeerMappingOverride",
        facts.peer_mapping_override is True,
        'Not set: options nvidia NVreg_RegistryDwords="PeerMappingOverride=1;" in modprobe.d and a '
        "reboot; without it the CPU rings the card's bell, which is slower.",
    )


def _nvshmem_wheel(facts: Facts) -> str:
    major = (version_of(facts.torch_cuda or facts.nvcc or "") or (13,))[0]
    return f"the wheel nvidia-nvshmem-cu{major}"


def version_of(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.11.0+cu130" -> (2, 11, 0); () where there is none."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# ---- text


def describe(facts: Facts, findings: Sequence[Finding]) -> list[str]:
    """The report for people, line by line."""
    cuda = "CPU only" if facts.torch_cuda is None else f"CUDA {facts.torch_cuda}"
    driver = facts.driver and f"{facts.driver} (serves CUDA {facts.driver_cuda or 'unknown'})"
    versions = {
        "hybrid_ep": facts.hybrid_ep,
        EXTENSION.rpartition(".")[2]: _extension_state(facts),
        "Python": f"{facts.python} on {facts.system}",
        "torch": f"{facts.torch} ({cuda})",
        "driver": driver,
        "nvcc": facts.nvcc,
        "NVSHMEM": facts.nvshmem,
        "pybind11": facts.pybind11,
    }
    lines = ["versions"]
    lines += [f"  {name:<10} {version or 'not found'}" for name, version in versions.items()]
    lines += ["", "GPUs", *(_gpu_line(i, gpu) for i, gpu in enumerate(facts.gpus))]
    if not facts.gpus:
        lines.append("  none that torch can use")
    if len(facts.gpus) > 1:
        lines += ["", "peer access (row may load and store the memory of column)"]
        lines.append("      " + " ".join(f"{j:>3}" for j in range(len(facts.gpus))))
        for i, row in enumerate(facts.peer_access):
            cells = ("  -" if i == j else "yes" if ok else " NO" for j, ok in enumerate(row))
            lines.append(f"  {i:>3} " + " ".join(cells))
    if facts.topology:
        lines += ["", "nvidia-smi topo -m", *(f"  {line}" for line in facts.topology.splitlines())]
    lines += ["", "environment", *(f"  {k}={v}" for k, v in sorted(facts.environment.items()))]
    if not facts.environment:
        lines.append("  nothing set that matters")

    usable = usable_backends(findings)
    for backend in BACKENDS:
        lines += ["", f"backend {backend}: {'usable' if backend in usable else 'not usable here'}"]
        for finding in findings:
            if finding.backend == backend:
                mark = "ok" if finding.ok else "BROKEN" if finding.broken else "no"
                lines.append(f"  {mark:<6} {finding.need}")
                lines += [f"         {finding.advice}"] if finding.advice else []
    verdict = "healthy" if is_healthy(findings) else "something to repair, see above"
    return [*lines, "", f"{verdict}; usable backends: {', '.join(usable) or 'none'}"]


def _extension_state(facts: Facts) -> str:
    if facts.extension is None:
        return "not built"
    return "built, loads" if facts.extension_error is None else "built, DOES NOT LOAD"


def _gpu_line(index: int, gpu: Gpu) -> str:
    parts = [
        gpu.name,
        f"capability {_dotted(gpu.capability)}",
        f"{gpu.num_sms} SMs",
        f"{gpu.memory_bytes / 2**30:.0f} GiB",
    ]
    if gpu.used_bytes is not None:
        parts[-1] += f" ({gpu.used_bytes / 2**30:.1f} used)"
    if gpu.nvlink_lanes is not None:
        parts.append(f"{gpu.nvlink_lanes} NVLinks up")
    if gpu.num_processes is not None:
        parts.append(f"{gpu.num_processes} process(es)")
    return f"  {index}  " + ", ".join(parts)


# ---- this machine -> facts


def gather_facts(environment: Mapping[str, str] = os.environ) -> Facts:
    """Look at this machine; what cannot be found out is left open, nothing here raises."""
    smi = _nvidia_smi("--query-gpu=uuid,driver_version,memory.used")
    driver_gpus = _csv(smi)
    extension = _find_extension()
    available = torch.version.cuda is not None and torch.cuda.is_available()
    num_gpus = torch.cuda.device_count() if available else 0
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
        torch_cuda_error=_torch_cuda_error() if torch.version.cuda and not available else None,
        driver=driver_gpus[0][1] if driver_gpus and len(driver_gpus[0]) > 1 else None,
        driver_cuda=_driver_cuda(),
        num_driver_gpus=len(driver_gpus),
        nvcc=_nvcc_version(environment),
        nvshmem=_nvshmem_version(environment),
        extension=extension,
        extension_error=_load_error(extension) if extension else None,
        gpus=tuple(_gpus_of_torch(num_gpus, driver_gpus)),
        peer_access=tuple(
            tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(num_gpus))
            for i in range(num_gpus)
        ),
        topology=topology_matrix(_nvidia_smi("topo", "-m")),
        network_cards=tuple(sorted(p.name for p in _entries("/sys/class/infiniband"))),
        infiniband_files=any(p.name.startswith("uverbs") for p in _entries("/dev/infiniband")),
        peer_memory_module=Path("/sys/module/nvidia_peermem").exists(),
        dma_buf=_dma_buf_supported(),
        peer_mapping_override=_peer_mapping_override(),
        environment={
            name: value
            for name, value in environment.items()
            if name in ENVIRONMENT or name.startswith(PREFIXES)
        },
    )


def _gpus_of_torch(num_gpus: int, driver_gpus: list[list[str]]) -> Iterator[Gpu]:
    """Torch's GPUs, with what nvidia-smi knows about each, matched by UUID."""
    used = {row[0]: row[2] for row in driver_gpus if len(row) == 3 and row[2].isdigit()}
    lanes = nvlink_lanes(_nvidia_smi("nvlink", "-s"))
    processes = [row[0] for row in _csv(_nvidia_smi("--query-compute-apps=gpu_uuid,pid"))]
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


def nvlink_lanes(status: str | None) -> dict[str, int]:
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


def topology_matrix(text: str | None) -> str | None:
    """The matrix of ``nvidia-smi topo -m`` without its legend and its colours."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", text or "")
    rows = [line.rstrip() for line in plain.split("Legend")[0].splitlines() if line.strip()]
    return "\n".join(row.expandtabs(8) for row in rows) or None


def _nvidia_smi(*words: str) -> str | None:
    csv = ["--format=csv,noheader,nounits"] if words[0].startswith("--query") else []
    return _output_of("nvidia-smi", *words, *csv)


def _csv(text: str | None) -> list[list[str]]:
    return [[cell.strip() for cell in row.split(",")] for row in (text or "").splitlines() if row]


def _output_of(*command: str) -> str | None:
    """What a command prints; None where it is not there, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _torch_cuda_error() -> str:
    try:
        torch.cuda.init()
    except Exception as error:  # whatever torch raises is the fact we are after
        return str(error).splitlines()[0].rstrip(".")
    return "torch.cuda.is_available() is False"


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _driver_cuda() -> str | None:
    driver, version = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _dma_buf_supported() -> bool | None:
    driver, answer = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0):
        return None
    if driver.cuDeviceGetAttribute(ctypes.byref(answer), _DMA_BUF_SUPPORTED, 0):
        return None
    return bool(answer.value)


def _peer_mapping_override() -> bool | None:
    try:
        return "PeerMappingOverride=1" in Path("/proc/driver/nvidia/params").read_text()
    except OSError:
        return None


def _nvcc_version(environment: Mapping[str, str]) -> str | None:
    home = environment.get("CUDA_HOME")
    nvcc = (home and shutil.which("nvcc", path=f"{home}/bin")) or shutil.which("nvcc")
    match = re.search(r"release [\d.]+, V([\d.]+)", (nvcc and _output_of(nvcc, "--version")) or "")
    return match[1] if match else None


def _nvshmem_version(environment: Mapping[str, str]) -> str | None:
    if home := environment.get("NVSHMEM_HOME"):
        header = Path(home, "include", "non_abi", "nvshmem_version.h")
        text = header.read_text(errors="replace") if header.is_file() else ""
        numbers = re.findall(r"define NVSHMEM_VENDOR_(?:MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", text)
        return f"NVSHMEM_HOME {'.'.join(numbers) or 'of unknown version'}"
    for wheel in ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"):
        if version := _package_version(wheel):
            return f"{wheel} {version}"
    return None


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_extension() -> str | None:
    found = importlib.util.find_spec(EXTENSION)
    return found.origin if found else None


def _load_error(path: str) -> str | None:
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


def _entries(folder: str) -> list[Path]:
    try:
        return list(Path(folder).iterdir())
    except OSError:
        return []
