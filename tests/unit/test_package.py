"""What is built and what is left to run time: one package, nothing compiled on a user's machine."""

import re
import runpy
from pathlib import Path

import pytest
import setuptools

from hybrid_ep.backends.cuda import nvlink, nvshmem, nvshmem_library
from hybrid_ep.doctor import machine, nvidia
from tests.cases import Case
from tests.ranks import no_traces
from tools import check_kernels

ROOT = Path(__file__).resolve().parents[2]
CASE = Case("package")
NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.{0}'\n"


# ---- run time


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_DeepEP_602_nothing_is_compiled_or_cached_at_run_time(fresh_world, backend):
    """All that ranks open for writing and all that they start is listed: nothing.

    So there is no cache to race for on NFS (DeepEP#683), and no start that is slower than others.
    """
    for traces in fresh_world(2).run(no_traces.watch_a_step, CASE, backend):
        assert traces == []


def test_DeepEP_602_a_watched_rank_is_seen_writing(fresh_world, tmp_path):
    """The premise of the test above."""
    (traces,) = fresh_world(1).run(write_and_watch, str(tmp_path / "cache.so"))
    assert traces == [f"open {tmp_path / 'cache.so'}"]


def write_and_watch(me, path):
    class Writer(type(me)):
        def buffer(self, **arguments):
            Path(path).write_text("")
            return super().buffer(**arguments)

    writer = Writer(me.rank, me.num_ranks, me.device, me.target)
    return no_traces.watch_a_step(writer, CASE.on(1), "torch")


# ---- the extension


MODULES = (machine.EXTENSION, machine.NETWORK_EXTENSION)


def built(module: str) -> Path:
    path = machine._find_extension(module)
    if path is None:
        pytest.skip(f"{module} was not built: that takes nvcc, and NVSHMEM for the network's")
    return Path(path)


@pytest.mark.parametrize("module", MODULES)
def test_DeepEP_699_the_extension_knows_no_torch(module):
    """Torch's headers and ABI change from version to version; one binary serves all of them."""
    binary = built(module).read_bytes()
    for name in (b"libtorch", b"libc10", b"_ZN2at", b"_ZN3c10"):
        assert name not in binary, name


@pytest.mark.parametrize("module", MODULES)
def test_DeepEP_476_the_extension_needs_neither_driver_nor_toolkit_to_load(module):
    """An image without a GPU can import what it built."""
    path = built(module)
    assert b"libcudart.so" not in path.read_bytes(), "the runtime is not linked statically"
    error = machine.load_error(str(path)) if module == MODULES[0] else machine.network_load_error()
    assert error is None


@pytest.mark.parametrize(
    ("source", "line", "says"),
    [
        ("bindings.cpp", "#include <torch/extension.h>", "no torch header"),
        ("memory/heap.cpp", "#include <ATen/cuda/CUDAContext.h>", "no torch header"),
        ("runtime.h", '#include "c10/util/Optional.h"', "no torch header"),
        ("kernels/x.cu", "#ifdef HYBRID_EP_MULTINODE", "not an #if"),
    ],
)
def test_DeepEP_699_every_build_refuses_torch_headers_and_features_by_macro(
    source, line, says, tmp_path
):
    assert_refused(tmp_path, source, line, says)


@pytest.mark.parametrize(
    ("source", "line", "says"),
    [
        ("kernels/x.cuh", 'asm volatile("");', "belong in csrc/device/"),
        ("runtime.cpp", "kernel<<<1, 1>>>();", "launched by launch()"),
        ("network/x.cpp", "cudaLaunchKernelEx(&c, k, p);", "launched by launch()"),
        ("kernels/x.cu", "kernel<<<1, 1>>>();", "launched by launch()"),
        ("kernels/x.cu", "__global__ void copy(const Params& p) {", "parameters by value"),
        ("kernels/x.cu", "__global__ void copy(const Params* p) {", "parameters by value"),
        ("runtime.cpp", 'getenv("HYBRID_EP_SMS");', "environment variables"),
        ("kernels/x.cuh", "while (ptx::load_acquire(flag) < 1) continue;", "keep the deadline"),
        ("kernels/x.cu", "cooperative_groups::this_grid().sync();", "of its own grid"),
        ("memory/x.cpp", "#include <sstream>", "no iostreams"),
    ],
)
def test_every_build_refuses_what_breaks_a_layer(source, line, says, tmp_path):
    assert_refused(tmp_path, source, line, says)


@pytest.mark.parametrize(
    ("source", "header"),
    [
        ("layout/x.h", "device/ptx.cuh"),
        ("device/x.cuh", "kernels/kernels.h"),
        ("device/x.cuh", "network/context.h"),
        ("network/x.cuh", "kernels/several_nodes.h"),
        ("memory/x.h", "kernels/kernels.h"),
        ("kernels/x.h", "runtime.h"),
        ("kernels/x.cuh", "kernels/dispatch/block.cuh"),
        ("kernels/combine/x.cuh", "kernels/dispatch/block.cuh"),
        ("kernels/nvshmem/x.cu", "config.h"),
        ("runtime.cpp", "bind_runtime.h"),
        ("runtime.h", "kernels/dispatch/block.cuh"),
        ("one_node.h", "device/flag.cuh"),
    ],
)
def test_every_build_refuses_an_include_against_the_layers(source, header, tmp_path):
    assert_refused(tmp_path, source, f'#include "{header}"', f"and itself, not {header}")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("kernels/dispatch/x.cu", '#include "kernels/kernels.h"'),
        ("kernels/nvshmem/x.cu", '#include "kernels/dispatch/several_nodes.cuh"'),
        ("memory/x.cpp", '#include "check.h"'),
        ("runtime.cpp", '#include "kernels/kernels.h"'),
        ("nvlink_bindings.cpp", '#include "one_node.h"'),
        ("device/x.cuh", 'asm volatile("");'),
        ("layout/x.h", '// as #include "runtime.h", or asm'),
        ("kernels/x.cu", "__global__ void copy(const __grid_constant__ Params p) {"),
    ],
)
def test_no_build_refuses_what_keeps_the_layers(source, line, tmp_path):
    assert faults_of(tmp_path, {source: line}) == []


def test_every_build_refuses_headers_that_include_each_other(tmp_path):
    (fault,) = faults_of(
        tmp_path,
        {"device/a.cuh": '#include "device/b.cuh"', "device/b.cuh": '#include "device/a.cuh"'},
    )
    assert "include each other" in fault and "device/b.cuh" in fault


def test_the_sources_keep_the_layers():
    assert list(check_kernels.broken_rules(ROOT / "csrc")) == []


def test_every_kernel_is_loaded_before_one_runs():
    """But those of the card of tests, which loads its own."""
    report = ROOT / "build" / "ptxas.log"
    try:
        extensions = [backend.load_extension() for backend in (nvlink, nvshmem)]
    except ImportError as error:
        pytest.skip(str(error))
    if not report.exists():
        pytest.skip("the extensions were not built here")
    compiled = set(re.findall(r"Compiling entry function '(\S+)'", report.read_text()))
    loaded = {name for name in compiled if "delaying_card_cu" not in name}
    in_both = [name for name in loaded if "assign_rows_cu" in name]
    assert len(compiled) - len(loaded) == 3 and len(in_both) == 1
    assert sum(each.num_kernels() for each in extensions) == len(loaded) + len(in_both)


def test_invariants_have_one_name_in_docs_and_sources():
    named, marked = set(), set()
    for page in ("design.md", "several_nodes.md"):
        table = (ROOT / "docs" / page).read_text().split("## Invariants")[1].split("\n\n")
        rows = next(part for part in table if part.startswith("| name |")).splitlines()[2:]
        named |= {row.split("|")[1].strip() for row in rows}
    for path in (ROOT / "csrc").rglob("*.*"):
        comments = re.sub(r"\s*\n\s*//", "", path.read_text())
        marked |= set(re.findall(r'[Ii]nvariant\s+"([^"]+)"', comments))
    assert named == marked


def faults_of(folder: Path, sources: dict[str, str]) -> list[str]:
    for source, line in sources.items():
        path = folder / "csrc" / source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#pragma once\n{line}\n")
    return list(check_kernels.broken_rules(folder / "csrc"))


def assert_refused(folder: Path, source: str, line: str, says: str) -> None:
    (fault,) = faults_of(folder, {source: line})
    assert fault.startswith(f"csrc/{source}:2: ") and says in fault


# ---- the build


@pytest.fixture
def setup_py(monkeypatch):
    """``setup_py()`` runs setup.py without building; what it would build, and with which nvcc."""

    def run() -> tuple[list, str | None]:
        made = {}
        monkeypatch.setattr(setuptools, "setup", made.update)
        names = runpy.run_path(str(ROOT / "setup.py"))
        return [(e.name, sorted(e.sources)) for e in made["ext_modules"]], names["NVCC"]

    return run


def fake_nvcc(folder: Path, build: int) -> str:
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(NVCC.format(build))
    nvcc.chmod(0o755)
    return str(nvcc)


def test_DeepEP_606_without_nvcc_the_package_is_pure_python(setup_py, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert setup_py() == ([], None)
    assert "pure Python package without GPU kernels" in " ".join(capsys.readouterr().out.split())


def test_DeepEP_616_CUDA_HOME_is_honoured_and_told(setup_py, monkeypatch, tmp_path):
    """Build and doctor name the same compiler: CUDA_HOME's if it has one, else that of PATH."""
    on_path = fake_nvcc(tmp_path / "path", 1)
    at_home = fake_nvcc(tmp_path / "home/bin", 2)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/bin:/usr/bin")
    for home, nvcc, version in (
        (None, on_path, "13.0.1"),
        (tmp_path / "home", at_home, "13.0.2"),
        (tmp_path / "empty", on_path, "13.0.1"),
    ):
        environment = {} if home is None else {"CUDA_HOME": str(home)}
        monkeypatch.delenv("CUDA_HOME", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert setup_py()[1] == nvcc
        assert nvidia.nvcc_version(environment) == version
        assert machine.gather_facts({**environment, "CXX": "g++-13"}).environment == {
            **environment,
            "CXX": "g++-13",
        }


def test_documents_pins_and_doctor_name_the_same_versions_of_nvshmem():
    least, roce = (
        ".".join(map(str, version))
        for version in (nvshmem_library.MIN_VERSION, nvshmem_library.ROCE_VERSION)
    )
    assert f" {least} or later, {roce} or later over RoCE" in (ROOT / "docs/cluster.md").read_text()
    assert f'"nvidia-nvshmem-cu13>={least}"' in (ROOT / "pyproject.toml").read_text()
    pinned = re.search(r"nvidia-nvshmem-cu13==([\d.]+)", (ROOT / "requirements.txt").read_text())
    assert tuple(map(int, pinned[1].split("."))) >= nvshmem_library.MIN_VERSION


def test_RL_4038_no_variable_of_the_build_leaves_anything_out(setup_py, monkeypatch, tmp_path):
    """One package for one node and for many: the build looks where the compilers are, no more."""
    fake_nvcc(tmp_path / "bin", 1)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    built, _ = setup_py()
    for name in ("HYBRID_EP_MULTINODE", "HYBRID_EP_BACKEND", "NVSHMEM_DIR", "USE_NIXL"):
        for value in ("0", "1"):
            monkeypatch.setenv(name, value)
            assert setup_py()[0] == built
    read = re.findall(r"environ\W+(?:get\W+)?(\w+)", (ROOT / "setup.py").read_text())
    read += re.findall(r"environ\W+(?:get\W+)?(\w+)", (ROOT / "tools/build_backend.py").read_text())
    library = (ROOT / "hybrid_ep/backends/cuda/nvshmem_library.py").read_text()
    read += re.findall(r"environ\w*\)?\.get\W+(\w+)", library)
    assert set(read) == {"CUDA_HOME", "CXX", "NVSHMEM_HOME"}
