"""Runs ``hybrid-ep doctor``; ``hybrid_ep_cli.doctor`` has its options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from hybrid_ep.doctor.diagnosis import (
    BACKENDS,
    Finding,
    diagnose,
    dotted,
    fabric_of,
    is_healthy,
    usable_backends,
)
from hybrid_ep.doctor.machine import EXTENSION, Facts, Gpu, gather_facts
from hybrid_ep.output.files import check_report, tell


def run(args: argparse.Namespace) -> int:
    """Examine this machine and print what was found."""
    check_report(args.json)
    facts = gather_facts()
    findings = diagnose(facts)
    healthy = is_healthy(findings)
    report = {
        "healthy": healthy,
        "usable": usable_backends(findings),
        "facts": asdict(facts),
        "network": _network_settings(facts),
        "findings": [asdict(finding) for finding in findings],
    }
    tell(args.json, report, lambda: print("\n".join(describe(facts, findings))))
    return 0 if healthy else 1


def describe(facts: Facts, findings: Sequence[Finding]) -> list[str]:
    """The report for people, line by line."""
    lines = ["versions", *_versions(facts), "", "GPUs", *_gpus(facts)]
    if len(facts.gpus) > 1:
        lines += ["", "peer access (row may load and store the memory of column)"]
        lines += _peer_matrix(facts)
    if facts.topology:
        lines += ["", "nvidia-smi topo -m", *(f"  {line}" for line in facts.topology.splitlines())]
    variables = [f"  {name}={value}" for name, value in sorted(facts.environment.items())]
    variables += [f"  {name}={value} (nccl.conf)" for name, value in facts.nccl_files.items()]
    lines += ["", "environment", *(variables or ["  nothing set that matters"])]
    lines += ["", "network", *_network(facts)]

    usable = usable_backends(findings)
    for backend in BACKENDS:
        lines += ["", f"backend {backend}: {'usable' if backend in usable else 'not usable here'}"]
        lines += _needs(finding for finding in findings if finding.backend == backend)
    verdict = "healthy" if is_healthy(findings) else "something to repair, see above"
    return [*lines, "", f"{verdict}; usable backends: {', '.join(usable) or 'none'}"]


def _versions(facts: Facts) -> list[str]:
    extension = "built, loads" if facts.extension_error is None else "built, DOES NOT LOAD"
    cuda = "CPU only" if facts.torch_cuda is None else f"CUDA {facts.torch_cuda}"
    driver = facts.driver and f"{facts.driver} (serves CUDA {facts.driver_cuda or 'unknown'})"
    versions = {
        "hybrid_ep": facts.hybrid_ep,
        EXTENSION.rpartition(".")[2]: extension if facts.extension else "not built",
        "Python": f"{facts.python} on {facts.system}",
        "torch": f"{facts.torch} ({cuda})",
        "driver": driver,
        "nvcc": facts.nvcc,
        "NVSHMEM": facts.nvshmem,
        "pybind11": facts.pybind11,
    }
    return [f"  {name:<10} {version or 'not found'}" for name, version in versions.items()]


def _gpus(facts: Facts) -> list[str]:
    lines = [f"  {i}  {_gpu(gpu)}" for i, gpu in enumerate(facts.gpus)]
    return lines or ["  none that torch can use"]


def _gpu(gpu: Gpu) -> str:
    memory = f"{gpu.memory_bytes / 2**30:.0f} GiB"
    if gpu.used_bytes is not None:
        memory += f" ({gpu.used_bytes / 2**30:.1f} used)"
    parts = [gpu.name, f"capability {dotted(gpu.capability)}", f"{gpu.num_sms} SMs", memory]
    if gpu.nvlink_lanes is not None:
        parts.append(f"{gpu.nvlink_lanes} NVLinks up")
    if gpu.num_processes is not None:
        parts.append(f"{gpu.num_processes} process(es)")
    return ", ".join(parts)


def _peer_matrix(facts: Facts) -> Iterator[str]:
    yield "      " + " ".join(f"{j:>3}" for j in range(len(facts.gpus)))
    for i, row in enumerate(facts.peer_access):
        cells = ("  -" if i == j else "yes" if ok else " NO" for j, ok in enumerate(row))
        yield f"  {i:>3} " + " ".join(cells)


def _network(facts: Facts) -> Iterator[str]:
    """The ports, then what NVSHMEM is told."""
    for port in facts.ports:
        state = "active" if port.active else "DOWN"
        kind = "RoCE" if port.link_layer == "Ethernet" else port.link_layer
        yield f"  {port}  {kind}, {state}"
    if not facts.ports:
        yield "  no InfiniBand or RoCE card"
    settings = _network_settings(facts)
    for variable, setting in settings.items():
        source = setting["source"]
        origin = "as it is set" if source == variable else f"from {source}"
        yield f"  {variable}={setting['value']} ({origin})"
    if not settings:
        yield "  NVSHMEM is told nothing: its own defaults"


def _network_settings(facts: Facts) -> dict[str, dict[str, str]]:
    """By variable of NVSHMEM; empty where a value cannot be read, which is a finding."""
    try:
        settings = fabric_of(facts).settings
    except ValueError:
        return {}
    return {s.variable: {"value": s.value, "source": s.source} for s in settings}


def _needs(findings: Iterator[Finding]) -> Iterator[str]:
    for finding in findings:
        mark = "ok" if finding.ok else "BROKEN" if finding.broken else "no"
        yield f"  {mark:<6} {finding.need}"
        if finding.advice:
            yield f"         {finding.advice}"
