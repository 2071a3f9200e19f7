"""The doctor's advice for made-up machines, and that it can look at this one."""

import functools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid_ep.backends.cuda.fabric import Port
from hybrid_ep.doctor import command as doctor
from hybrid_ep.doctor import machine, nvidia
from hybrid_ep.doctor.diagnosis import (
    BACKENDS,
    Finding,
    diagnose,
    is_healthy,
    usable_backends,
    version_of,
)
from hybrid_ep.doctor.machine import Facts, Gpu, gather_facts, load_error, network_load_error
from hybrid_ep_cli.main import main

LOADED_ONCE = {  # a process that loads an extension takes seconds
    look.__name__: functools.cache(look) for look in (load_error, network_load_error)
}


@pytest.fixture(autouse=True)
def extensions_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, look in LOADED_ONCE.items():
        monkeypatch.setattr(machine, name, look)


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
        "network_extension": "hybrid_ep/_nvshmem.so",
        "gpus": (H200, H200),
        "peer_access": ((True, True), (True, True)),
    }
    return Facts(**{**facts, **changes})


def with_cards(**changes: object) -> Facts:
    """Two H200 and an InfiniBand card with everything that several nodes would need."""
    card = {"network_cards": ("mlx5_0",), "ports": (Port("mlx5_0", 1),), "infiniband_files": True}
    return two_h200(**{**card, "dma_buf": True, "peer_mapping_override": True, **changes})


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
    advice = " ".join(fault.advice for fault in faults(facts, "nvshmem"))
    for cure in ("/sys/class/infiniband", "/dev/infiniband", "modprobe nvidia_peermem"):
        assert cure in advice
    assert usable(with_cards()) == ["torch", "nvlink", "nvshmem"]
    missing = only_fault(with_cards(network_extension=None), "nvshmem")
    assert "It needs nvcc and NVSHMEM" in missing.advice
    broken = only_fault(with_cards(network_extension_error="built with 3.4"), "nvshmem")
    assert "does not load: built with 3.4" in broken.advice
    assert remarks(with_cards(), "nvshmem") == []


def test_a_wheel_with_the_network_extension_is_not_broken_where_nvshmem_is_missing():
    facts = with_cards(network_extension_error="NVSHMEM is not here", nvshmem=None)
    assert not any(fault.broken for fault in faults(facts, "nvshmem"))


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        (None, False),
        ("nvidia-nvshmem-cu12 2.11.0", False),
        ("NVSHMEM_HOME of unknown version", False),
        ("NVSHMEM_HOME 3.2.5", False),
        ("NVSHMEM_HOME 3.4.5", True),
    ],
)
def test_nvshmem_version(found: str | None, ok: bool) -> None:
    needs = {f.need: f for f in diagnose(two_h200(nvshmem=found)) if f.backend == "nvshmem"}
    assert needs["NVSHMEM 3.4.5 or later"].ok == ok


# ---- reports of a network that did not start: each has its cause and what to do


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param(
            {"infiniband_error": "/dev/infiniband/uverbs0: Operation not permitted"},
            [
                "/dev/infiniband/uverbs0: Operation not permitted.",
                "cannot allocate mlx5dv_devx_uar",
                "--device /dev/infiniband",
            ],
            id="device-files",
        ),
        pytest.param(
            {"locked_memory": 65536},
            ["64 kB", "CAP_IPC_LOCK", "--ulimit memlock=-1"],
            id="locked-memory",
        ),
        pytest.param(
            {"infiniband_files": False},
            ["No /dev/infiniband/uverbs*", "load ib_uverbs", "pass /dev/infiniband"],
            id="no-device-files",
        ),
    ],
)
def test_sglang_12533_container_without_privileges(changes: dict, says: list[str]) -> None:
    fault = only_fault_of_the_network(with_cards(**changes))
    for words in says:
        assert words in fault.advice


def test_sglang_12533_fabric_handles_without_a_channel() -> None:
    (remark,) = remarks(with_cards(imex=False), "nvlink")
    for words in ("not permitted", "CUDA IPC", "NVSHMEM_DISABLE_MNNVL=1"):
        assert words in remark
    assert "nvlink" in usable(with_cards(imex=False))
    assert remarks(with_cards(imex=True), "nvlink") == []


ROCE = Port("mlx5_0", 1, "Ethernet", gids=(0, 1, 2, 3))


def test_Megatron_Bridge_5050_create_ah_of_an_old_nvshmem() -> None:
    fault = only_fault_of_the_network(with_cards(ports=(ROCE,)))
    assert "Found nvidia-nvshmem-cu13 3.4.5" in fault.advice
    assert '"Unable to create ah"' in fault.advice
    assert "pip install --upgrade nvidia-nvshmem-cu13" in fault.advice
    newer = with_cards(ports=(ROCE,), nvshmem="nvidia-nvshmem-cu13 3.5.19")
    assert faults(newer, "nvshmem") == []


@pytest.mark.parametrize("variable", ["NCCL_IB_GID_INDEX", "NVSHMEM_IB_GID_INDEX"])
def test_Megatron_Bridge_5050_create_ah_of_an_empty_gid(variable: str) -> None:
    network = {"ports": (ROCE, Port("mlx5_1", 1, "Ethernet", gids=(0, 1)))}
    network |= {"nvshmem": "nvidia-nvshmem-cu13 3.5.19", "environment": {variable: "3"}}
    fault = only_fault_of_the_network(with_cards(**network))
    assert f"{variable}=3, and that entry of the GID table is empty on mlx5_1:1" in fault.advice
    assert '"Unable to create ah"' in fault.advice and "show_gids" in fault.advice
    network["environment"] = {variable: "1"}
    assert faults(with_cards(**network), "nvshmem") == []


def test_DeepEP_128_no_way_from_the_card_to_gpu_memory() -> None:
    fault = only_fault_of_the_network(with_cards(dma_buf=False))
    assert '"neither nv_peer_mem, or nvidia_peermem detected"' in fault.advice
    assert "modprobe nvidia_peermem" in fault.advice
    ready = with_cards(dma_buf=False, peer_memory_module=True)
    assert faults(ready, "nvshmem") == []


def test_DeepEP_128_the_gpu_may_not_ring_the_bell() -> None:
    """Fatal with an old NVSHMEM, slower with GDRCopy or a newer one."""
    network = {"peer_mapping_override": False, "nvshmem": "nvidia-nvshmem-cu12 3.2.5"}
    old, fault = faults(with_cards(**network), "nvshmem")
    assert old.need == "NVSHMEM 3.4.5 or later"
    for words in ("PeerMappingOverride=1", "error=800", "/dev/gdrdrv", "3.4.5 or later"):
        assert words in fault.advice
    for cure in ({"gdrcopy": True}, {"nvshmem": "nvidia-nvshmem-cu13 3.4.5"}):
        (remark,) = remarks(with_cards(**{**network, **cure}), "nvshmem")
        assert "PeerMappingOverride=1" in remark and "slower" in remark


def test_ports_without_a_link() -> None:
    down = with_cards(ports=(Port("mlx5_0", 1, active=False), Port("mlx5_1", 1, active=False)))
    assert "No port is active (mlx5_0:1, mlx5_1:1)" in only_fault_of_the_network(down).advice


def only_fault_of_the_network(facts: Facts) -> Finding:
    return only_fault(facts, "nvshmem")


def test_DeepEP_724_settings_are_shown_and_what_is_not_followed_is_said() -> None:
    facts = with_cards(
        environment={"NCCL_IB_TC": "106", "NCCL_IB_TIMEOUT": "22", "NVSHMEM_IB_SL": "3"},
        nccl_files={"NCCL_IB_HCA": "=mlx5_0:1"},
    )
    text = "\n".join(doctor.describe(facts, diagnose(facts)))
    for line in (
        "  NCCL_IB_HCA==mlx5_0:1 (nccl.conf)",
        "  mlx5_0:1  InfiniBand, active",
        "  NVSHMEM_IB_TRAFFIC_CLASS=106 (from NCCL_IB_TC)",
        "  NVSHMEM_IB_SL=3 (as it is set)",
        "  NVSHMEM_HCA_LIST=mlx5_0:1 (from NCCL_IB_HCA)",
    ):
        assert line in text
    (remark,) = remarks(facts, "nvshmem")
    assert remark.startswith("NCCL_IB_TIMEOUT=22, but NVSHMEM has no variable for it")


def test_DeepEP_724_a_setting_that_cannot_be_read_is_a_fault_and_no_crash() -> None:
    facts = with_cards(environment={"NCCL_IB_TC": "high"})
    fault = only_fault_of_the_network(facts)
    assert fault.advice == "NCCL_IB_TC must be an integer from -1 to 255, got 'high'."
    assert fault.advice in "\n".join(doctor.describe(facts, diagnose(facts)))


def test_RL_4038_one_package_has_all_backends_and_says_which_it_uses() -> None:
    """No build leaves a backend out in silence: each is judged on every machine."""
    for facts in (two_h200(), without_gpu(), with_cards()):
        text = "\n".join(doctor.describe(facts, diagnose(facts)))
        for backend in BACKENDS:
            assert f"backend {backend}: " in text
        assert f"usable backends: {', '.join(usable(facts))}" in text


MACHINES = [
    pytest.param(two_h200(), id="two-h200"),
    pytest.param(without_gpu(), id="no-gpu"),
    pytest.param(two_h200(extension=None, nvcc=None), id="no-extension"),
    pytest.param(two_h200(system="Darwin", gloo=False), id="elsewhere"),
    pytest.param(with_cards(ports=(ROCE,), nvshmem=None, imex=False), id="roce"),
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


# ---- files of a made-up machine


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


FABRIC_FILES = {
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_0/ports/1/gids/0": "fe80:0000:0000:0000:0c42:a103:0065:8a2e\n",
    "sys/class/infiniband/mlx5_1/ports/1/link_layer": "Ethernet\n",
    "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
    "sys/class/infiniband/mlx5_1/ports/1/gids/0": "0000:0000:0000:0000:0000:0000:0000:0000\n",
    "sys/class/infiniband/mlx5_1/ports/1/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0001\n",
    "dev/infiniband/uverbs0": "",
    "dev/infiniband/rdma_cm": "",
    "dev/gdrdrv": "",
    "dev/nvidia-caps-imex-channels/channel0": "",
    "sys/module/nvidia_peermem/version": "580.65.06\n",
    "proc/driver/nvidia/params": 'RegistryDwords: "PeerMappingOverride=1;"\n',
    "proc/self/status": "Name:\tpython\nCapEff:\t00000000a80425fb\n",
    "proc/self/limits": "Limit  Soft  Hard  Units\nMax locked memory     65536    65536    bytes\n",
    "proc/devices": "Character devices:\n234 nvidia-caps-imex-channels\n",
    "etc/nccl.conf": "# the fabric\nNCCL_IB_GID_INDEX=3\nNCCL_IB_TC=106\nPATH=/evil\n",
}


def test_facts_of_a_machine_with_a_fabric(tmp_path: Path) -> None:
    facts = gather_facts({"NCCL_IB_TC": "0"}, write(tmp_path, FABRIC_FILES))
    assert facts.network_cards == ("mlx5_0", "mlx5_1")
    assert facts.ports == (
        Port("mlx5_0", 1, "InfiniBand", True, (0,)),
        Port("mlx5_1", 1, "Ethernet", False, (3,)),
    )
    assert facts.infiniband_files and facts.infiniband_error is None
    assert facts.peer_memory_module and facts.gdrcopy
    assert facts.peer_mapping_override is True
    assert facts.imex is True
    assert facts.locked_memory == 65536
    assert facts.nccl_files == {"NCCL_IB_GID_INDEX": "3"}


def test_facts_of_a_machine_without_any_of_it(tmp_path: Path) -> None:
    facts = gather_facts({}, tmp_path)
    assert facts.network_cards == facts.ports == ()
    assert not facts.infiniband_files and facts.infiniband_error is None
    assert not facts.peer_memory_module and not facts.gdrcopy
    assert facts.peer_mapping_override is facts.imex is facts.locked_memory is None
    assert facts.nccl_files == {}


@pytest.mark.parametrize(
    ("status", "limit", "bytes_allowed"),
    [
        ("CapEff:\t0000003fffffffff", "65536", None),  # a privileged process
        ("CapEff:\t0000000000004000", "65536", None),  # CAP_IPC_LOCK alone
        ("CapEff:\t0000000000000000", "unlimited", None),
        ("CapEff:\t0000000000000000", "8388608", 8388608),
    ],
)
def test_sglang_12533_what_may_be_locked(
    status: str, limit: str, bytes_allowed: int | None, tmp_path: Path
) -> None:
    limits = f"Max locked memory         {limit}            {limit}            bytes\n"
    root = write(tmp_path, {"proc/self/status": status, "proc/self/limits": limits})
    assert gather_facts({}, root).locked_memory == bytes_allowed


def test_sglang_12533_a_device_file_that_may_not_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's device rules: the file is there, and even root may not open it."""
    root = write(tmp_path, FABRIC_FILES)
    opened = os.open

    def refuse(path: Path, *args: int) -> int:
        if Path(path).name in ("uverbs0", "channel0"):
            raise PermissionError(1, "Operation not permitted")
        return opened(path, *args)

    monkeypatch.setattr(os, "open", refuse)
    facts = gather_facts({}, root)
    assert facts.infiniband_error == f"{root}/dev/infiniband/uverbs0: Operation not permitted"
    assert facts.imex is False


@pytest.mark.parametrize(
    "path",
    [
        "sys/module/nvidia_peermem/version",
        "sys/kernel/mm/memory_peers/nvidia-peermem/version",
        "sys/kernel/mm/memory_peers/nv_mem/version",
    ],
)
def test_DeepEP_128_modules_that_open_gpu_memory(path: str, tmp_path: Path) -> None:
    assert gather_facts({}, write(tmp_path, {path: "1.3\n"})).peer_memory_module


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
    assert main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] == (code == 0)
    assert report["facts"]["gpus"][1]["name"] == "NVIDIA H200"
    assert {finding["backend"] for finding in report["findings"]} == set(BACKENDS)

    assert main(["doctor"]) == code
    assert "usable backends: torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    "field, module", [("extension", "_nvlink"), ("network_extension", "_nvshmem")]
)
def test_what_the_build_left_out_is_said_with_its_reason(field, module):
    backend, name = module.removeprefix("_"), f"hybrid_ep.{module}"
    facts = with_cards(**{field: None}, left_out={name: "no nvcc (CUDA_HOME or PATH)"})
    fault = only_fault(facts, backend)
    assert not fault.broken and "`pip install .`" in fault.advice
    assert fault.advice.startswith(
        "Not built: when the package was built, there was no nvcc (CUDA_HOME or PATH). "
    )
    assert only_fault(with_cards(**{field: None}), backend).advice.startswith("Not built. ")
