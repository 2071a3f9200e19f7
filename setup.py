"""Builds hybrid_ep._nvlink with nvcc and pybind11 alone, and hybrid_ep._nvshmem with NVSHMEM.

No torch header takes part and torch's build helper neither: so this builds in seconds, and one
binary serves every torch version. nvcc drives every step, the host files and the link included,
because it knows where its toolkit keeps the headers and the static CUDA runtime. Without nvcc the
package is pure Python (its torch backend), without NVSHMEM it serves one node.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import build_backend  # noqa: E402  in tools/, where pip finds it as well

CSRC = ROOT / "csrc"
# Objects hold Python's ABI, so each Python keeps its own.
OBJECTS = ROOT / "build" / f"obj-{sys.implementation.cache_tag}"
PTXAS_LOG = ROOT / "build" / "ptxas.log"


def load_alone(name: str) -> ModuleType:
    """A module of hybrid_ep.backends.cuda that needs no torch, without the package around it."""
    path = ROOT / "hybrid_ep" / "backends" / "cuda" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_alone("build")
COMPILE_FLAGS, LINK_FLAGS = build.COMPILE_FLAGS, build.LINK_FLAGS


def host_compiler() -> list[str]:
    """Nvcc's option for the host compiler that CXX names, if it names one."""
    words = shlex.split(os.environ.get("CXX", ""))
    return [f"-ccbin={words[-1]}"] if words else []  # the last word: CXX may be "ccache g++-13"


def sources_of(module: str) -> list[str]:
    """The sources under csrc of an extension module: all but those of another one alone."""
    sources = {path for suffix in ("*.cpp", "*.cu") for path in CSRC.rglob(suffix)}
    for other in ALONE.keys() - {module}:
        sources -= {path for pattern in ALONE[other] for path in CSRC.glob(pattern)}
    sources = filter(build.is_source, sources)
    return sorted(str(path.relative_to(ROOT)) for path in sources)


def find_nvshmem() -> Path | None:
    """Where NVSHMEM is, by the package's own search, which needs no torch."""
    home = load_alone("nvshmem_library").find_home()
    return home if home and (home / "include" / "nvshmem.h").exists() else None


def nvshmem_version() -> str:
    """Of its headers."""
    header = NVSHMEM / "include" / "non_abi" / "nvshmem_version.h"
    text = header.read_text(errors="replace") if header.exists() else ""
    return ".".join(re.findall(r"VENDOR_(?:MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", text)) or "unknown"


def write_report(package: Path) -> None:
    """What is built and what is not, for the package that is installed and for its user."""
    package.mkdir(parents=True, exist_ok=True)
    (package / build.REPORT).write_text(json.dumps(REPORT, indent=1) + "\n", encoding="utf-8")


class BuildPy(build_py):
    """Also writes the report, which a build without any extension has too."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_report(Path(self.build_lib) / "hybrid_ep")


class NvccBuildExt(build_ext):
    """Compiles what changed, in parallel, and keeps ptxas's report in build/ptxas.log."""

    def run(self) -> None:
        super().run()
        if self.inplace:
            write_report(ROOT / "hybrid_ep")

    def build_extension(self, ext: Extension) -> None:
        """Compile and link one extension module."""
        target = Path(self.get_ext_fullpath(ext.name))
        sources = [ROOT / source for source in ext.sources]
        objects = [object_of(source) for source in sources]
        # Headers are few, so each counts for every source, as the flags do.
        shared = [Path(build.__file__), *CSRC.rglob("*.h"), *CSRC.rglob("*.cuh")]
        newest_shared = max(path.stat().st_mtime for path in shared)

        stale = [
            (source, obj)
            for source, obj in zip(sources, objects, strict=True)
            if self.force or mtime(report_of(obj)) < max(source.stat().st_mtime, newest_shared)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for output in pool.map(lambda pair: self.compile(*pair), stale):
                if output:
                    print(output, file=sys.stderr)

        if ext.name == EXTENSIONS[-1].name:
            every = sorted({source for each in EXTENSIONS for source in each.sources})
            reports = [report_of(object_of(ROOT / source)) for source in every]
            PTXAS_LOG.write_text("".join(path.read_text() for path in reports))

        objects.append(self.compile_id(ext.name))
        if stale or mtime(target) < max(map(mtime, objects)):
            target.parent.mkdir(parents=True, exist_ok=True)
            libraries = NVSHMEM_LINK_FLAGS if ext.name == NVSHMEM_MODULE else []
            run([NVCC, *host_compiler(), *LINK_FLAGS, "-o", target, *objects, *libraries])
            print(f"built {target.name}")

    def compile_id(self, module: str) -> Path:
        """The object that holds the build id, which the package compares with its own."""
        source, obj = OBJECTS / f"{module}.id.cpp", OBJECTS / f"{module}.id.o"
        text = f"""extern "C" {{
__attribute__((visibility("default"))) extern const char {build.ID_SYMBOL}[];
const char {build.ID_SYMBOL}[] = "{REPORT["id"]}";
}}
"""
        if not obj.exists() or not source.exists() or source.read_text() != text:
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text(text)
            run([NVCC, *host_compiler(), "-Xcompiler=-fPIC", "-c", source, "-o", obj])
        return obj

    def compile(self, source: Path, obj: Path) -> str:
        """Compile one file; returns the compiler's warnings."""
        import pybind11

        sys.stdout.write(f"nvcc {source.relative_to(ROOT)}\n")  # in one piece: others print too
        sys.stdout.flush()
        obj.parent.mkdir(parents=True, exist_ok=True)
        headers = [sysconfig.get_paths()["include"], pybind11.get_include()]
        includes = [f"-I{CSRC}", *(f"-isystem={path}" for path in headers)]
        flags = [*host_compiler(), *COMPILE_FLAGS, *includes]
        if any(room in source.parents for room in NVSHMEM_ROOMS):
            flags += NVSHMEM_COMPILE_FLAGS
        lines = run([NVCC, *flags, "-c", source, "-o", obj]).splitlines()
        report = [line for line in lines if is_ptxas_report(line)]
        report_of(obj).write_text("".join(f"{line}\n" for line in report))
        return "\n".join(line for line in lines if line.strip() and not is_ptxas_report(line))


def object_of(source: Path) -> Path:
    """Where a source is compiled to."""
    folder = OBJECTS
    if any(room in source.parents for room in NVSHMEM_ROOMS):
        folder /= f"nvshmem-{nvshmem_version()}"  # another version has other headers
    return folder / f"{source.relative_to(CSRC)}.o"


def report_of(obj: Path) -> Path:
    """What ptxas said about an object; written after it, so its age is the object's."""
    return obj.with_suffix(".ptxas")


def is_ptxas_report(line: str) -> bool:
    """Whether a line of nvcc's output belongs to what -Xptxas=-v asked for."""
    return line.startswith("ptxas info") or "bytes stack frame" in line


def mtime(path: Path) -> float:
    """When a file was written; long ago if there is none."""
    return path.stat().st_mtime if path.exists() else 0.0


def run(command: list) -> str:
    """Run a command and return what it printed, or end the build showing it."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed: {shlex.join(map(str, command))}")
    return done.stdout


NVLINK, NVSHMEM_MODULE = "hybrid_ep._nvlink", "hybrid_ep._nvshmem"
ALONE = {  # sources and rooms under csrc that one module has alone; the rest is of both
    NVLINK: (
        "nvlink_bindings.cpp",
        "kernels/*/one_node.cu",
        "kernels/ceilings.cu",
        "kernels/maps.cu",
    ),
    NVSHMEM_MODULE: (
        "nvshmem_bindings.cpp",
        "network/*",
        "kernels/route/keep_routing.cu",
        "kernels/loopback.cu",
        "kernels/delaying_card.cu",
        "kernels/nvshmem/*",
    ),
}
NVSHMEM_ROOMS = (CSRC / "network", CSRC / "kernels" / "nvshmem")  # that include its headers
NVCC, NVSHMEM = build_backend.find_nvcc(), find_nvshmem()
NVSHMEM_COMPILE_FLAGS = [
    "-rdc=true",  # its device code is linked with NVSHMEM's
    f"-isystem={NVSHMEM}/include",
    *([f"-isystem={Path(NVCC).resolve().parent.parent}/include/cccl"] if NVCC else []),
]
NVSHMEM_LINK_FLAGS = [
    *(flag for flag in COMPILE_FLAGS if flag.startswith("-gencode")),
    f"-L{NVSHMEM}/lib",
    "-lnvshmem_device",
    "-Xlinker=-l:libnvshmem_host.so.3",
]
EXTENSIONS = []
LEFT_OUT = {}
if NVCC:
    EXTENSIONS.append(Extension(NVLINK, sources_of(NVLINK)))
else:
    LEFT_OUT = dict.fromkeys((NVLINK, NVSHMEM_MODULE), "no nvcc (CUDA_HOME or PATH)")
    print(
        "hybrid_ep: no nvcc (CUDA_HOME or PATH), so this is the pure Python package without GPU "
        "kernels."
    )
if NVCC and NVSHMEM:
    EXTENSIONS.append(Extension(NVSHMEM_MODULE, sources_of(NVSHMEM_MODULE)))
elif NVCC:
    LEFT_OUT[NVSHMEM_MODULE] = (
        "no NVSHMEM (NVSHMEM_HOME, or the wheel nvidia-nvshmem-cu12 or -cu13 of nvcc's CUDA)"
    )
    print(f"hybrid_ep: {LEFT_OUT[NVSHMEM_MODULE]}, so this is built for one node.")
REPORT = {
    "id": build.id_of_sources(ROOT),
    "nvcc": build_backend.nvcc_version(NVCC) if NVCC else None,
    "nvshmem": nvshmem_version() if NVSHMEM else None,
    "built": [each.name for each in EXTENSIONS],
    "left_out": LEFT_OUT,
}

setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": NvccBuildExt, "build_py": BuildPy})
