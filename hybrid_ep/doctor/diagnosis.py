"""What each backend needs, whether a machine has it, and what to do where it does not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybrid_ep.backends.cuda import nvshmem_library
from hybrid_ep.backends.cuda.fabric import GID_INDEX, Fabric, choose_fabric
from hybrid_ep.backends.cuda.settings import MIN_CAPABILITY
from hybrid_ep.doctor.machine import EXTENSION, NETWORK_EXTENSION, Facts

MIN_PYTHON = (3, 10)
MIN_TORCH = (2, 6)
LOCKED_MEMORY = 1 << 30  # less does not hold what the cards read
BACKENDS = ("torch", "nvlink", "nvshmem")


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


def diagnose(facts: Facts) -> list[Finding]:
    """What each backend needs, in the order in which it is worth fixing."""
    return [
        *_torch_needs(facts),
        *_nvlink_needs(facts),
        *_nvlink_remarks(facts),
        *_nvshmem_needs(facts),
    ]


def usable_backends(findings: Sequence[Finding]) -> list[str]:
    """The backends whose needs are all met."""
    return [name for name in BACKENDS if all(f.ok for f in findings if f.backend == name)]


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Whether the torch backend works and nothing that is installed is broken."""
    return "torch" in usable_backends(findings) and not any(f.broken for f in findings)


def version_of(text: str | None) -> tuple[int, ...]:
    """Leading numbers of a version: "2.11.0+cu130" -> (2, 11, 0); () where there is none."""
    match = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def dotted(version: tuple[int, ...]) -> str:
    """(9, 0) -> "9.0"."""
    return ".".join(map(str, version))


def fabric_of(facts: Facts) -> Fabric:
    """What the network backend tells NVSHMEM; ValueError where a variable cannot be read."""
    return choose_fabric({**facts.nccl_files, **facts.environment}, facts.ports)


def _need(backend: str, need: str, ok: bool, advice: str) -> Finding:
    return Finding(backend, need, ok, "" if ok else advice)


# ---- torch


def _torch_needs(facts: Facts) -> Iterator[Finding]:
    yield _need(
        "torch",
        f"Python {dotted(MIN_PYTHON)} or later",
        version_of(facts.python) >= MIN_PYTHON,
        f"This is Python {facts.python}: use a newer one.",
    )
    yield _need(
        "torch",
        f"torch {dotted(MIN_TORCH)} or later",
        version_of(facts.torch) >= MIN_TORCH,
        f"This is torch {facts.torch}: pip install --upgrade torch.",
    )
    yield _need(
        "torch",
        "torch.distributed",
        facts.distributed,
        "This torch was built without torch.distributed: install one that has it.",
    )
    yield _need(
        "torch",
        "gloo",
        facts.gloo,
        "This torch was built without gloo, which sets ranks up: install one that has it.",
    )
    if facts.gpus:
        slow = "This torch has no NCCL: rows go through host memory, which is slow."
        yield Finding("torch", "NCCL between GPUs (optional)", True, "" if facts.nccl else slow)


# ---- nvlink


def _nvlink_needs(facts: Facts) -> Iterator[Finding]:
    yield _need(
        "nvlink",
        "Linux",
        facts.system == "Linux",
        f"CUDA IPC is used as Linux has it, not {facts.system}.",
    )
    yield _torch_with_cuda(facts)
    yield _gpus(facts)
    yield _extension(facts)
    nvcc, driver = version_of(facts.nvcc)[:1], version_of(facts.driver_cuda)[:1]
    if facts.extension and nvcc and driver:
        yield _need(
            "nvlink",
            "a driver as new as the extension's CUDA",
            nvcc <= driver,
            f"The driver {facts.driver} serves CUDA {facts.driver_cuda}, nvcc is {facts.nvcc}: "
            "build with an older nvcc or update the driver.",
        )
    yield _peers(facts)


def _torch_with_cuda(facts: Facts) -> Finding:
    there, hidden = facts.num_driver_gpus, facts.environment.get("CUDA_VISIBLE_DEVICES")
    broken = False
    if facts.torch_cuda is None:
        advice = f"torch {facts.torch} is built for the CPU" + (
            f" and the driver lists {there} GPU(s): install a CUDA build of torch."
            if there
            else ", which suits a machine without GPUs."
        )
    elif facts.torch_cuda_error is None:
        advice = ""
    elif hidden in ("", "-1"):
        advice = f"CUDA_VISIBLE_DEVICES={hidden!r} hides all GPUs: unset it."
    elif not there:
        advice = f"torch says: {facts.torch_cuda_error}."
    else:
        broken = True
        advice = (
            f"The driver lists {there} GPU(s) and torch cannot use them: "
            f"{facts.torch_cuda_error}. Driver {facts.driver} serves CUDA "
            f"{facts.driver_cuda or 'unknown'}, torch is built for {facts.torch_cuda}."
        )
    return Finding("nvlink", "a torch that can use the GPUs", not advice, advice, broken)


def _gpus(facts: Facts) -> Finding:
    old = [
        f"GPU {i} ({gpu.name}, {dotted(gpu.capability)})"
        for i, gpu in enumerate(facts.gpus)
        if gpu.capability < MIN_CAPABILITY
    ]
    advice = ""
    if not facts.gpus:
        advice = "torch sees no GPU: use the torch backend on this machine."
    elif old:
        advice = (
            f"Too old: {', '.join(old)}. The kernels use TMA: choose other GPUs with "
            "CUDA_VISIBLE_DEVICES, or use the torch backend."
        )
    need = f"GPUs of capability {dotted(MIN_CAPABILITY)} or later (Hopper)"
    return Finding("nvlink", need, not advice, advice)


def _not_built(facts: Facts, extension: str) -> str:
    """That an extension was not built, and what its build said about that."""
    reason = facts.left_out.get(extension)
    return f"Not built: when the package was built, there was {reason}." if reason else "Not built."


def _extension(facts: Facts) -> Finding:
    advice = ""
    if facts.extension is None and facts.nvcc:
        advice = (
            f"{_not_built(facts, EXTENSION)} nvcc {facts.nvcc} is here: in a clone of the "
            "repository, run `make build`, or install the package again with `pip install .`."
        )
    elif facts.extension is None:
        advice = (
            f"{_not_built(facts, EXTENSION)} No nvcc is here: install a CUDA toolkit (nvcc on PATH "
            "or in CUDA_HOME), then install the package again with `pip install .` from a clone."
        )
    elif facts.extension_error is not None:
        advice = (
            f"{facts.extension} does not load: {facts.extension_error}. Build it again for this "
            f"Python {facts.python} and this host compiler (`make clean build`)."
        )
    broken = bool(advice) and facts.extension is not None
    return Finding("nvlink", f"the extension module {EXTENSION}", not advice, advice, broken)


def _peers(facts: Facts) -> Finding:
    blocked = [
        f"{i} -> {j}"
        for i, row in enumerate(facts.peer_access)
        for j, reaches in enumerate(row)
        if not reaches
    ]
    advice = ""
    if not facts.gpus:
        advice = "There is no GPU."
    elif len(facts.gpus) == 1:
        advice = "There is one GPU: ranks that share it reach each other, for tests; it is slow."
    elif blocked:
        shown = ", ".join(blocked[:6]) + (", ..." if len(blocked) > 6 else "")
        advice = (
            f"No peer access for {shown}: choose GPUs that have it with CUDA_VISIBLE_DEVICES, and "
            "look at virtualisation, MIG and the IOMMU, which can forbid it."
        )
    elif all(gpu.nvlink_lanes == 0 for gpu in facts.gpus):
        advice = "They do so over PCIe, as no NVLink is up: right results, at PCIe's speed."
    ok = bool(facts.gpus) and not blocked
    return Finding("nvlink", "GPUs that reach each other's memory", ok, advice)


def _nvlink_remarks(facts: Facts) -> Iterator[Finding]:
    """What looks like a problem and is none, or costs speed only."""
    set_to = facts.environment.get
    alloc = f"{set_to('PYTORCH_ALLOC_CONF')} {set_to('PYTORCH_CUDA_ALLOC_CONF')}"
    if "expandable_segments:true" in alloc.lower().replace(" ", ""):
        advice = "expandable_segments is fine: what peers read is memory of our own, not torch's."
        yield Finding("nvlink", "memory that peers can open", True, advice)
    if set_to("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        advice = "CUDA_LAUNCH_BLOCKING is set: every call waits for all peers on the host."
        yield Finding("nvlink", "asynchronous launches (optional)", True, advice)
    if facts.imex is False:
        advice = (
            "The driver knows IMEX channels and this process may use none, so memory handles for "
            "NVLink between hosts (FABRIC) are not permitted, whatever the GPU's attributes say. "
            "The nvlink backend uses CUDA IPC, which needs none; for NVSHMEM set "
            "NVSHMEM_DISABLE_MNNVL=1 or pass /dev/nvidia-caps-imex-channels into the container."
        )
        yield Finding("nvlink", "IMEX channels (optional)", True, advice)
    busy = [i for i, gpu in enumerate(facts.gpus) if gpu.num_processes]
    if busy:
        advice = f"Others compute on GPU {', '.join(map(str, busy))}: waits take time slices."
        yield Finding("nvlink", "GPUs to oneself (optional)", True, advice)


# ---- nvshmem


def _nvshmem_needs(facts: Facts) -> Iterator[Finding]:
    yield _network_extension(facts)
    cuda = version_of(facts.torch_cuda or facts.nvcc) or (13,)
    found = version_of((facts.nvshmem or "").split(" ")[-1])
    upgrade = f"pip install --upgrade nvidia-nvshmem-cu{cuda[0]}"
    yield _need(
        "nvshmem",
        f"NVSHMEM {dotted(nvshmem_library.MIN_VERSION)} or later",
        found >= nvshmem_library.MIN_VERSION,
        (f"Found {facts.nvshmem}. " if facts.nvshmem else "")
        + f"Install the wheel nvidia-nvshmem-cu{cuda[0]}, or set NVSHMEM_HOME.",
    )
    yield _cards(facts)
    yield _device_files(facts)
    yield _locked_memory(facts)
    yield _need(
        "nvshmem",
        "GPU memory open to the card (nvidia_peermem or dma-buf)",
        facts.peer_memory_module or bool(facts.dma_buf),
        'Neither, so NVSHMEM says "neither nv_peer_mem, or nvidia_peermem detected" and has no '
        "transport: `modprobe nvidia_peermem` on the host (a container sees its modules), or use "
        "the open kernel driver, which has dma-buf.",
    )
    if any(port.link_layer == "Ethernet" for port in facts.ports):
        yield _need(
            "nvshmem",
            f"NVSHMEM {dotted(nvshmem_library.ROCE_VERSION)} or later for RoCE",
            not found or found >= nvshmem_library.ROCE_VERSION,
            f"Found {facts.nvshmem}. Up to 3.4.5, IBGDA passes a struct to the card that it has "
            f'not initialised, and may end with "Unable to create ah": {upgrade}.',
        )
    yield _bell(facts, found, upgrade)
    yield from _settings(facts)


def _network_extension(facts: Facts) -> Finding:
    advice = ""
    if facts.network_extension is None:
        advice = (
            f"{_not_built(facts, NETWORK_EXTENSION)} It needs nvcc and NVSHMEM: with both here, in "
            "a clone of the repository, run `make build`, or install the package again with `pip "
            "install .`."
        )
    elif facts.network_extension_error is not None:
        advice = f"{facts.network_extension} does not load: {facts.network_extension_error}."
    # a wheel has the extension also on a machine that needs no NVSHMEM
    broken = bool(advice) and facts.network_extension is not None and facts.nvshmem is not None
    need = f"the extension module {NETWORK_EXTENSION}"
    return Finding("nvshmem", need, not advice, advice, broken)


def _cards(facts: Facts) -> Finding:
    advice = ""
    if not facts.network_cards:
        advice = "None in /sys/class/infiniband: several nodes would need one per GPU, or nearly."
    elif facts.ports and not any(port.active for port in facts.ports):
        advice = (
            f"No port is active ({', '.join(map(str, facts.ports))}): look at cables, switch and, "
            "on InfiniBand, subnet manager (ibstat shows the states)."
        )
    return Finding("nvshmem", "an InfiniBand or RoCE card with a link", not advice, advice)


def _device_files(facts: Facts) -> Finding:
    advice = ""
    if not facts.infiniband_files:
        advice = (
            "No /dev/infiniband/uverbs*: load ib_uverbs; in a container, pass /dev/infiniband and "
            "raise the locked-memory limit (--device /dev/infiniband --ulimit memlock=-1)."
        )
    elif facts.infiniband_error:
        advice = (
            f"{facts.infiniband_error}. The file is there and this process may not use it, as in a "
            'container without privileges, where IBGDA ends with "cannot allocate '
            'mlx5dv_devx_uar": start it with --device /dev/infiniband (in Kubernetes by an RDMA '
            "device plugin) or --privileged."
        )
    return Finding("nvshmem", "its device files", not advice, advice)


def _locked_memory(facts: Facts) -> Finding:
    limit = facts.locked_memory
    return _need(
        "nvshmem",
        "memory that may be locked",
        limit is None or limit >= LOCKED_MEMORY,
        f"The limit is {0 if limit is None else limit // 1024:,} kB and the process lacks "
        "CAP_IPC_LOCK, so the card cannot register memory (ibv_reg_mr: Cannot allocate memory): "
        "--ulimit memlock=-1 for a container, LimitMEMLOCK=infinity for what starts it.",
    )


def _bell(facts: Facts, found: tuple[int, ...], upgrade: str) -> Finding:
    """IBGDA tells the card of new work by a register that the GPU must be allowed to write."""
    advice = ""
    by_cpu = facts.gdrcopy or found >= nvshmem_library.MIN_VERSION
    if facts.peer_mapping_override is not True:
        consequence = (
            "the CPU rings the card's bell, which is slower"
            if by_cpu
            else 'IBGDA does not start ("cudaHostRegister with IoMemory failed with error=800"), '
            "unless there is GDRCopy (no /dev/gdrdrv here) or NVSHMEM "
            f"{dotted(nvshmem_library.MIN_VERSION)} or later ({upgrade})"
        )
        advice = (
            'Not set: options nvidia NVreg_RegistryDwords="PeerMappingOverride=1;" in modprobe.d '
            f"and a reboot; without it {consequence}."
        )
    optional = " (optional)" if by_cpu else ""
    need = f"IBGDA: the driver option PeerMappingOverride{optional}"
    return Finding("nvshmem", need, by_cpu or not advice, advice)


def _settings(facts: Facts) -> Iterator[Finding]:
    """What was set for NCCL and NVSHMEM, and whether this machine has it."""
    need = "settings of the network that can be followed"
    try:
        fabric = fabric_of(facts)
    except ValueError as error:
        yield Finding("nvshmem", need, False, f"{error}.")
        return
    index = next((s for s in fabric.settings if s.variable == GID_INDEX), None)
    empty = [
        str(port)
        for port in facts.ports
        if index and index.value.isdigit() and port.active and port.link_layer == "Ethernet"
        if int(index.value) not in port.gids
    ]
    yield _need(
        "nvshmem",
        need,
        not empty,
        f"{index and index.source}={index and index.value}, and that entry of the GID table is "
        f'empty on {", ".join(empty)}, so IBGDA ends with "Unable to create ah": show_gids lists '
        "the entries; in a container its network must be the host's.",
    )
    for sentence in fabric.unheard:
        yield Finding(
            "nvshmem", "settings of NCCL without a counterpart (optional)", True, f"{sentence}."
        )
