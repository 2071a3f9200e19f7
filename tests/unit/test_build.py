"""What a build asks for, what it leaves out, and that an extension of other sources is refused."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_ep.backends.cuda import build, nvlink, nvshmem, nvshmem_library
from hybrid_ep.doctor import machine
from tests.unit.test_package import MODULES, built, fake_nvcc

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import build_backend

    return build_backend


# ---- the build id


def sources(folder: Path, **files: str) -> Path:
    for name, text in {"a.cu": "one", "b.h": "two", **files}.items():
        path = folder / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_id_is_that_of_csrc_and_the_flags(tmp_path, monkeypatch):
    first = build.id_of_sources(sources(tmp_path / "1"))
    assert build.id_of_sources(sources(tmp_path / "2")) == first, "the folder does not count"
    others = [
        build.id_of_sources(sources(tmp_path / "3", **{"a.cu": "two", "b.h": "one"})),
        build.id_of_sources(sources(tmp_path / "4", **{"c.cuh": ""})),
        build.id_of_sources(sources(tmp_path / "5", **{"b.h": "two "})),
    ]
    monkeypatch.setattr(build, "COMPILE_FLAGS", [*build.COMPILE_FLAGS, "-G"])
    others.append(build.id_of_sources(sources(tmp_path / "6")))
    assert len({first, *others}) == 5 and {len(each) for each in others} == {16}


@pytest.mark.parametrize("module", MODULES)
def test_an_extension_of_other_sources_is_refused(module, tmp_path):
    path, ours = built(module), build.id_of_sources(ROOT)
    assert machine.load_error(str(path)) is None or module != MODULES[0]
    if module == MODULES[1]:
        nvshmem_library.load_host_library()
    build.refuse_other_build(SimpleNamespace(__file__=str(path)))
    binary = path.read_bytes()
    assert binary.count(ours.encode()) == 1
    other = tmp_path / path.name
    other.write_bytes(binary.replace(ours.encode(), b"0123456789abcdef"))
    with pytest.raises(ImportError, match="its build id is 0123456789abcdef, that of the sources"):
        build.refuse_other_build(SimpleNamespace(__file__=str(other)))
    if module == MODULES[0]:
        assert "build again: `make`" in machine.load_error(str(other)), "the doctor tells it too"


def test_an_extension_from_before_build_ids_is_refused():
    import _ctypes  # an extension module that has no id

    with pytest.raises(ImportError, match=r"its build id is missing, .*: `make` in a clone, or"):
        build.refuse_other_build(SimpleNamespace(__file__=_ctypes.__file__))


def test_an_installed_package_has_the_id_of_its_build(tmp_path):
    package = tmp_path / "hybrid_ep"
    package.mkdir()
    assert build._needed_id.__wrapped__(package) is None, "nobody knows, so nothing is refused"
    (package / build.REPORT).write_text(json.dumps({"id": "abc", "left_out": {}}))
    assert build._needed_id.__wrapped__(package) == "abc"
    (tmp_path / "setup.py").write_text("")
    assert build._needed_id.__wrapped__(sources(tmp_path) / "hybrid_ep") == "abc", "another csrc"
    sources(tmp_path, **{"nvlink_bindings.cpp": ""})
    found = build._needed_id.__wrapped__(package)
    assert found == build.id_of_sources(tmp_path), "in a clone the sources count"
    (package / build.REPORT).write_text("[]")
    assert build.read_report(package) == {}


@pytest.mark.parametrize("backend_module", [nvlink, nvshmem])
def test_what_was_left_out_is_told_where_it_is_missed(backend_module, monkeypatch):
    name = f"hybrid_ep.{'_nvlink' if backend_module is nvlink else '_nvshmem'}"
    report = {"left_out": {name: "no nvcc (CUDA_HOME or PATH)"}}
    monkeypatch.setattr(build, "read_report", lambda package: report)
    monkeypatch.setattr(nvshmem, "load_host_library", lambda: None)
    monkeypatch.setattr(nvshmem, "_nvshmem", None)
    monkeypatch.setattr(nvlink, "_nvlink", None)
    monkeypatch.setattr(nvlink, "_import_error", ImportError("No module"), raising=False)
    monkeypatch.setitem(sys.modules, "hybrid_ep._nvshmem", None)
    monkeypatch.delattr("hybrid_ep._nvshmem", raising=False)
    with pytest.raises(ImportError) as raised:
        backend_module.load_extension()
    assert str(raised.value).startswith(f"the extension {name} cannot be imported: ")
    assert str(raised.value).endswith(
        " (left out when this was built: no nvcc (CUDA_HOME or PATH))"
    )


# ---- what a build asks for


@pytest.mark.parametrize(
    ("release", "installed", "wanted"),
    [
        (13, None, [f"nvidia-nvshmem-cu13>={'.'.join(map(str, nvshmem_library.MIN_VERSION))}"]),
        (12, "3.5.1", ["nvidia-nvshmem-cu12==3.5.1"]),
        (11, None, []),
    ],
)
def test_the_wheel_of_nvshmem_fits_nvcc_and_what_is_installed(
    backend, monkeypatch, tmp_path, release, installed, wanted
):
    nvcc = Path(fake_nvcc(tmp_path / "bin", 88))
    nvcc.write_text(nvcc.read_text().replace("13.0", f"{release}.0"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("NVSHMEM_HOME", raising=False)
    asked = []
    monkeypatch.setattr(backend, "installed_version", lambda wheel: installed)
    monkeypatch.setattr(backend, "offered", lambda each: asked.append(each) or True)
    assert backend.nvcc_version(str(nvcc)) == f"{release}.0.88"
    assert backend.nvshmem_wheels() == asked == wanted
    monkeypatch.setenv("NVSHMEM_HOME", "/opt/nvshmem")
    assert backend.nvshmem_wheels() == []


def test_without_nvcc_or_an_index_that_has_it_no_wheel_is_asked_for(
    backend, monkeypatch, tmp_path, capsys
):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("NVSHMEM_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert backend.nvshmem_wheels() == []
    fake_nvcc(tmp_path / "bin", 88)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(backend, "installed_version", lambda wheel: None)
    assert backend.nvshmem_wheels() == []
    assert "no index offers nvidia-nvshmem-cu13>=" in capsys.readouterr().err


def test_the_hooks_are_those_of_setuptools_and_the_wheel_of_nvshmem(backend, monkeypatch):
    monkeypatch.setattr(backend, "nvshmem_wheels", lambda: ["a wheel"])
    monkeypatch.setattr(backend.build_meta, "get_requires_for_build_wheel", lambda settings: ["b"])
    assert backend.get_requires_for_build_wheel() == ["b", "a wheel"]
    for hook in ("build_wheel", "build_sdist", "build_editable"):
        assert getattr(backend, hook) is getattr(backend.build_meta, hook)


def test_a_version_is_that_of_the_environment_that_is_installed_into(backend):
    assert backend.installed_version("pytest") == pytest.__version__
    assert backend.installed_version("no-such-package-of-ours") is None


def test_what_editors_leave_beside_sources_is_no_source(tmp_path):
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "a.cpp").write_text("int a;")
    before = build.id_of_sources(tmp_path)
    (csrc / ".#a.cpp").symlink_to("somebody@somewhere.1234")  # Emacs: a link to nothing
    (csrc / "._a.cpp").write_bytes(b"\0")
    (csrc / "folder.cu").mkdir()
    assert build.id_of_sources(tmp_path) == before
    (csrc / "b.cpp").write_text("int b;")
    assert build.id_of_sources(tmp_path) != before
