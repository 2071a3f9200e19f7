"""The doctor's advice for made-up machines, and that it can look at this one."""

import argparse
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from hybrid_ep import nvidia
from hybrid_ep.cli import doctor
from hybrid_ep.diagnosis import (
    BACKENDS,
    Finding,
    diagnose,
    is_healthy,
    usable_backends,
    version_of,
)
from hybrid_ep.machine import Facts, Gpu, gather_facts, load_error

H200 = Gpu("NVIDIA H200", (9, 0), 132, 150_000_000_000, 0, 0, nvlink_lanes=18)
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80_000_000_000)


def two_h200(**changes: object) -> Facts:
    """Two H200 joined by NVLink with everything that the nvlink backend needs."""
    facts = {
        "system": "Linux",
        "python": "3.12.3",
        "hybrid_ep": "0.1.0",
        "torch": "2.11.0+cu130",
        "distributed": True,
        "gloo": True,
        "nccl": True,
        "torch_cuda": "13.0",
        "driver": "580.65.06",
        "driver_cuda": "13.0",
        "num_driver_gpus": 2,
        "nvcc": "13.0.88",
        "nvshmem": "nvidia-nvshmem-cu13 3.4.5",
        "extension": "hybrid_ep/_nvlink.so",
        "gpus": (H200, H200),
        "peer_access": ((True, True), (True, True)),
    }
    return Facts(**{**facts, **changes})


def without_gpu(**changes: object) -> Facts:
    none = {"driver": None, "driver_cuda": None, "num_driver_gpus": 0, "gpus": ()}
    cpu_torch = {"torch": "2.13.0+cpu", "torch_cuda": None}
    return two_h200(**{**none, **cpu_torch, "peer_access": (), **changes})


def faults(facts: Facts, backend: str) -> list[Finding]:
    return [f for f in diagnose(facts) if f.backend == backend and not f.ok]


def only_fault(facts: Facts, backend: str) -> Finding:
    (fault,) = faults(facts, backend)
    return fault


def remarks(facts: Facts, backend: str) -> list[str]:
    return [f.advice for f in diagnose(facts) if f.backend == backend and f.ok and f.advice]


def usable(facts: Facts) -> list[str]:
    return usable_backends(diagnose(facts))


def healthy(facts: Facts) -> bool:
    return is_healthy(diagnose(facts))


def test_two_h200_have_nothing_to_say() -> None:
    facts = two_h200()
    assert usable(facts) == ["torch", "nvlink"]
    assert healthy(facts)
    assert remarks(facts, "torch") == remarks(facts, "nvlink") == []


def test_no_gpu_is_healthy_and_torch_serves_it() -> None:
    facts = without_gpu()
    assert usable(facts) == ["torch"]
    assert healthy(facts)
    advice = " ".join(f.advice for f in faults(facts, "nvlink"))
    assert "use the torch backend on this machine" in advice
    assert "suits a machine without GPUs" in advice


def test_one_a100_is_too_old() -> None:
    facts = two_h200(gpus=(A100,), peer_access=((True,),), num_driver_gpus=1)
    fault = only_fault(facts, "nvlink")
    assert "GPU 0 (NVIDIA A100-SXM4-80GB, 8.0)" in fault.advice
    assert healthy(facts) and usable(facts) == ["torch"]


def test_an_old_gpu_beside_a_new_one_is_named() -> None:
    fault = only_fault(two_h200(gpus=(H200, A100)), "nvlink")
    assert "GPU 1" in fault.advice and "GPU 0" not in fault.advice
    assert "CUDA_VISIBLE_DEVICES" in fault.advice


def test_one_h200_serves_ranks_that_share_it() -> None:
    facts = two_h200(gpus=(H200,), peer_access=((True,),), num_driver_gpus=1)
    assert "nvlink" in usable(facts)
    assert any("share it" in remark for remark in remarks(facts, "nvlink"))


@pytest.mark.parametrize(
    ("nvcc", "says"), [("13.0.88", "run `make build`"), (None, "install a CUDA toolkit")]
)
def test_missing_extension(nvcc: str | None, says: str) -> None:
    facts = two_h200(extension=None, nvcc=nvcc)
    assert says in only_fault(facts, "nvlink").advice
    assert healthy(facts)


def test_broken_extension_is_not_healthy() -> None:
    facts = two_h200(extension_error="undefined symbol: cudaFoo")
    fault = only_fault(facts, "nvlink")
    assert fault.broken and "undefined symbol: cudaFoo" in fault.advice
    assert usable(facts) == ["torch"]
    assert not healthy(facts)


def test_missing_peer_access_names_the_pairs() -> None:
    fault = only_fault(two_h200(peer_access=((True, False), (True, True))), "nvlink")
    assert "No peer access for 0 -> 1:" in fault.advice


def test_pcie_works_and_is_said() -> None:
    gpu = Gpu("NVIDIA H100 PCIe", (9, 0), 114, 80_000_000_000, nvlink_lanes=0)
    facts = two_h200(gpus=(gpu, gpu))
    assert "nvlink" in usable(facts)
    assert any("PCIe" in remark for remark in remarks(facts, "nvlink"))


def test_driver_older_than_the_toolkit() -> None:
    facts = two_h200(driver="550.54", driver_cuda="12.4", torch_cuda="12.4")
    assert "serves CUDA 12.4, nvcc is 13.0.88" in only_fault(facts, "nvlink").advice


def test_cpu_torch_on_a_gpu_machine() -> None:
    facts = without_gpu(num_driver_gpus=8, driver="580.65.06")
    assert "install a CUDA build of torch" in faults(facts, "nvlink")[0].advice
    assert healthy(facts)


def test_torch_that_cannot_use_the_driver_is_broken() -> None:
    facts = two_h200(gpus=(), torch_cuda_error="driver too old (found version 12040)")
    fault = faults(facts, "nvlink")[0]
    assert fault.broken and "driver too old (found version 12040)" in fault.advice
    assert not healthy(facts)


def test_hidden_gpus_are_no_breakage() -> None:
    facts = two_h200(
        gpus=(), torch_cuda_error="No CUDA GPUs", environment={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert "unset it" in faults(facts, "nvlink")[0].advice
    assert healthy(facts)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"python": "3.9.18"}, "This is Python 3.9.18"),
        ({"torch": "2.5.1+cu124"}, "This is torch 2.5.1+cu124"),
        ({"distributed": False}, "without torch.distributed"),
        ({"gloo": False}, "without gloo"),
    ],
)
def test_without_the_torch_backend_nothing_works(changes: dict, says: str) -> None:
    facts = two_h200(**changes)
    assert says in only_fault(facts, "torch").advice
    assert not healthy(facts)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_fine(name: str) -> None:
    facts = two_h200(environment={name: "max_split_size_mb:128,expandable_segments:True"})
    assert "nvlink" in usable(facts)
    assert any("expandable_segments is fine" in remark for remark in remarks(facts, "nvlink"))


def test_what_costs_speed_is_a_remark() -> None:
    busy = Gpu("NVIDIA H200", (9, 0), 132, 150_000_000_000, num_processes=3)
    facts = two_h200(gpus=(H200, busy), nccl=False, environment={"CUDA_LAUNCH_BLOCKING": "1"})
    assert usable(facts) == ["torch", "nvlink"]
    text = " ".join(remarks(facts, "torch") + remarks(facts, "nvlink"))
    assert "no NCCL" in text and "CUDA_LAUNCH_BLOCKING" in text and "compute on GPU 1" in text


def test_nvshmem_is_announced_with_its_checks() -> None:
    facts = two_h200()
    first, *rest = faults(facts, "nvshmem")
    assert "Not part of this version yet" in first.advice
    advice = " ".join(fault.advice for fault in rest)
    for cure in ("/sys/class/infiniband", "modprobe nvidia_peermem", "PeerMappingOverride"):
        assert cure in advice
    ready = two_h200(
        network_cards=("mlx5_0",), infiniband_files=True, dma_buf=True, peer_mapping_override=True
    )
    assert only_fault(ready, "nvshmem").need == "the backend itself"


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        (None, False),
        ("nvidia-nvshmem-cu12 2.11.0", False),
        ("NVSHMEM_HOME of unknown version", False),
        ("NVSHMEM_HOME 3.2.5", True),
    ],
)
def test_nvshmem_version(found: str | None, ok: bool) -> None:
    needs = {f.need: f for f in diagnose(two_h200(nvshmem=found)) if f.backend == "nvshmem"}
    assert needs["NVSHMEM 3.0 or later"].ok == ok


MACHINES = [
    pytest.param(two_h200(), id="two-h200"),
    pytest.param(without_gpu(), id="no-gpu"),
    pytest.param(two_h200(extension=None, nvcc=None), id="no-extension"),
    pytest.param(two_h200(system="Darwin", gloo=False), id="elsewhere"),
]


@pytest.mark.parametrize("facts", MACHINES)
def test_every_unmet_need_has_advice_and_is_printed(facts: Facts) -> None:
    findings = diagnose(facts)
    text = "\n".join(doctor.describe(facts, findings))
    for finding in findings:
        assert finding.backend in BACKENDS
        assert finding.ok or finding.advice.endswith("."), finding
        assert finding.need in text and finding.advice in text


# ---- what other programs print


def test_nvlink_lanes_of_nvidia_smi() -> None:
    text = (
        "GPU 0: NVIDIA H200 (UUID: GPU-aaa)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-bbb)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
        "GPU 2: NVIDIA L4 (UUID: GPU-ccc)\n"
    )
    assert nvidia.parse_lanes(text) == {"GPU-aaa": 2, "GPU-bbb": 1, "GPU-ccc": 0}
    assert nvidia.parse_lanes(None) == {}


def test_topology_of_nvidia_smi() -> None:
    text = "\t\x1b[4mGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n\nLegend:\n\n  X = Self\n"
    assert nvidia.parse_topology(text) == (
        "        GPU0    GPU1\nGPU0     X      NV18\nGPU1    NV18     X"
    )
    assert nvidia.parse_topology(None) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.11.0+cu130", (2, 11, 0)), ("2.12.0a0+git1", (2, 12, 0)), ("13.0", (13, 0)), ("?", ())],
)
def test_version_of(text: str, version: tuple) -> None:
    assert version_of(text) == version


# ---- this machine


@pytest.fixture(scope="module")
def here() -> Facts:
    return gather_facts({"NCCL_DEBUG": "INFO", "PATH": "/usr/bin", "SECRET": "hidden"})


def test_facts_of_this_machine(here: Facts) -> None:
    assert here.python == ".".join(map(str, sys.version_info[:3]))
    assert here.environment == {"NCCL_DEBUG": "INFO"}
    assert len(here.peer_access) == len(here.gpus)
    assert "torch" in usable(here)


NVIDIA_SMI = """#!/bin/sh
case "$1" in
    --query-gpu=*) echo "GPU-aaa, 580.65.06, 512"; echo "GPU-bbb, 580.65.06, [N/A]" ;;
    --query-compute-apps=*) echo "GPU-aaa, 4242" ;;
    nvlink) echo "GPU 0: X (UUID: GPU-aaa)"; echo "  Link 0: 26.562 GB/s" ;;
    *) printf '\\377'; exit 3 ;;
esac
"""


def test_facts_of_two_gpus(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that sees two GPUs, and an nvidia-smi that knows little of the second."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def properties(index: int) -> SimpleNamespace:
        sizes = {"multi_processor_count": 132, "total_memory": 1 << 30}
        return SimpleNamespace(name="X", major=9, minor=0, uuid=("aaa", "bbb")[index], **sizes)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: i < j)
    facts = gather_facts({})
    assert facts.gpus == (
        Gpu("X", (9, 0), 132, 1 << 30, used_bytes=512 << 20, num_processes=1, nvlink_lanes=1),
        Gpu("X", (9, 0), 132, 1 << 30),
    )
    assert facts.peer_access == ((True, True), (False, True))
    assert (facts.driver, facts.num_driver_gpus, facts.topology) == ("580.65.06", 2, None)


def test_torch_that_raises_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The driver is too old.\nPlease update.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    facts = gather_facts({})
    assert facts.torch_cuda_error == "The driver is too old"
    assert facts.gpus == facts.peer_access == ()


def test_an_extension_that_crashes_is_reported(tmp_path) -> None:
    path = tmp_path / "_nvlink.so"
    path.write_bytes(b"not a library")
    assert "_nvlink.so" in load_error(str(path))


@pytest.mark.parametrize(("error", "code"), [(None, 0), ("no such symbol", 1)])
def test_command(
    error: str | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(doctor, "gather_facts", lambda: two_h200(extension_error=error))
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args(["--json"])) == code
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] == (code == 0)
    assert report["facts"]["gpus"][1]["name"] == "NVIDIA H200"
    assert {finding["backend"] for finding in report["findings"]} == set(BACKENDS)

    assert doctor.run(parser.parse_args([])) == code
    assert "usable backends: torch" in capsys.readouterr().out
