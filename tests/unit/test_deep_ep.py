"""The module deep_ep: how it comes, how it goes, what it has; settings; what the log says."""

import importlib
import importlib.util
import inspect
import logging
import os
import subprocess
import sys
import types

import pytest

import hybrid_ep
from hybrid_ep.integrations import deep_ep
from hybrid_ep.integrations.deep_ep import hybrid_ep_buffer, settings
from hybrid_ep.integrations.deep_ep.installation import PATH
from hybrid_ep_cli.main import main

LOGGER = "hybrid_ep.integrations"


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "deep_ep":
            monkeypatch.delitem(sys.modules, name)
    yield
    deep_ep.uninstall()


def test_frameworks_find_what_they_import():
    deep_ep.install()
    from deep_ep import HybridEPBuffer  # as Megatron-Core and NeMo Automodel do
    from deep_ep.hybrid_ep_buffer import indices_to_map  # as torchtitan does

    assert HybridEPBuffer is deep_ep.HybridEPBuffer
    assert indices_to_map is deep_ep.indices_to_map
    assert importlib.util.find_spec("deep_ep").origin == str(PATH / "deep_ep" / "__init__.py")
    assert hybrid_ep.__version__ in sys.modules["deep_ep"].__version__


@pytest.mark.parametrize("name", ["Buffer", "ElasticBuffer", "utils", "Config"])
def test_other_backends_of_frameworks_stay_off(name):
    deep_ep.install()
    with pytest.raises(ImportError):
        exec(f"from deep_ep import {name}")


def test_it_goes_again():
    deep_ep.install(topk=3)
    deep_ep.install()
    assert settings.current().topk == 3
    deep_ep.uninstall()
    assert "deep_ep" not in sys.modules and "deep_ep.hybrid_ep_buffer" not in sys.modules
    assert settings.current() == settings.Settings()
    with pytest.raises(ImportError):
        importlib.import_module("deep_ep")
    deep_ep.uninstall()


def test_another_deep_ep_that_is_loaded_stays(monkeypatch):
    other = types.ModuleType("deep_ep")
    other.__file__ = "/site-packages/deep_ep/__init__.py"
    monkeypatch.setitem(sys.modules, "deep_ep", other)
    with pytest.raises(RuntimeError, match=r"another deep_ep is loaded, from /site-packages/deep_"):
        deep_ep.install(topk=3)
    deep_ep.uninstall()
    assert sys.modules["deep_ep"] is other
    assert settings.current().topk is None


def test_another_deep_ep_that_is_installed_is_named(monkeypatch, caplog, tmp_path):
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("Buffer = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING, LOGGER):
        deep_ep.install()
    assert f"the installed deep_ep ({tmp_path}/deep_ep/__init__.py) is hidden" in caplog.text
    assert not hasattr(sys.modules["deep_ep"], "Buffer")
    deep_ep.uninstall()
    assert hasattr(importlib.import_module("deep_ep"), "Buffer")


@pytest.mark.parametrize("found", [True, False])
def test_a_framework_that_was_imported_before(monkeypatch, found):
    name = "megatron.core.transformer.moe.fused_a2a"
    framework = types.ModuleType(name)
    framework.HAVE_HYBRIDEP = found
    monkeypatch.setitem(sys.modules, name, framework)
    if found:  # by the folder on PYTHONPATH, or by an install() that was undone
        deep_ep.install()
    else:
        with pytest.raises(RuntimeError, match=f"{name} was imported without a deep_ep"):
            deep_ep.install()
        assert "deep_ep" not in sys.modules


def test_the_folder_for_pythonpath(capfd):
    assert main(["deep-ep-path"]) == 0
    folder = capfd.readouterr().out.strip()
    assert folder == str(PATH)
    assert os.listdir(folder) == ["deep_ep"]
    program = (
        "from deep_ep import HybridEPBuffer; from deep_ep.hybrid_ep_buffer import indices_to_map\n"
        "import hybrid_ep.integrations.deep_ep as ours\n"
        "ours.install(topk=2)  # nothing to do but to configure\n"
        "print(HybridEPBuffer is ours.HybridEPBuffer)"
    )
    path = os.pathsep.join([folder, *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_the_folder_is_told_without_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from hybrid_ep_cli.main import main; main(['deep-ep-path'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{PATH}\n", "")


@pytest.mark.parametrize(
    ("method", "names"),
    [
        # frameworks look for these to learn what may be passed
        ("dispatch_with_permute", "fuse_permute_dispatch topk_idx topk_weights num_of_experts"),
        ("dispatch_with_permute", "dense_routing num_of_tokens_per_rank num_permuted_tokens"),
        ("combine_with_unpermute", "hidden probs handle pad_multiple fuse_unpermute_combine"),
        ("__init__", "num_sms_dispatch_api num_sms_combine_api num_sms_preprocessing_api"),
    ],
)
def test_parameters_are_written_out(method, names):
    parameters = inspect.signature(getattr(deep_ep.HybridEPBuffer, method)).parameters
    assert set(names.split()) <= parameters.keys()
    kinds = {parameter.kind for parameter in parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}


# ---- settings


def test_configure_wins_over_the_environment(monkeypatch):
    for name, value in (("TOPK", "8"), ("MAX_TOKENS", "100"), ("NUM_SMS", "")):
        monkeypatch.setenv(f"HYBRID_EP_{name}", value)
    assert settings.current() == settings.Settings(topk=8, max_tokens=100, num_sms=None)
    deep_ep.configure(topk=4)
    deep_ep.configure(num_sms=20)
    assert settings.current() == settings.Settings(topk=4, max_tokens=100, num_sms=20)


@pytest.mark.parametrize("value", ["0", "-1", "eight", "8.0"])
def test_a_variable_that_is_no_number(monkeypatch, value):
    monkeypatch.setenv("HYBRID_EP_TOPK", value)
    with pytest.raises(ValueError, match="HYBRID_EP_TOPK must be an integer of at least 1, got"):
        settings.current()


def test_a_setting_that_is_no_number():
    with pytest.raises(ValueError, match="max_tokens must be an integer of at least 1, got 0"):
        deep_ep.configure(topk=2, max_tokens=0)
    assert settings.current().topk is None


OURS = hybrid_ep.Config()


@pytest.mark.parametrize(
    ("given", "num_sms", "dispatch", "combine"),
    [
        ((None, None), None, OURS.num_sms_dispatch, OURS.num_sms_combine),
        ((16, 16), None, OURS.num_sms_dispatch, OURS.num_sms_combine),  # torchtitan's default
        ((24, 24), None, OURS.num_sms_dispatch, OURS.num_sms_combine),  # NeMo Automodel's
        ((20, 8), None, 20, 8),
        ((20, None), None, 20, OURS.num_sms_combine),
        ((20, 8), 16, 16, 16),
    ],
)
def test_numbers_of_sms(given, num_sms, dispatch, combine):
    deep_ep.configure(num_sms=num_sms)
    config = settings.config_for(*given)
    found = config.num_sms_publish, config.num_sms_dispatch, config.num_sms_combine
    assert found == (dispatch, dispatch, combine)


def test_arguments_without_effect_are_named_once(monkeypatch, caplog):
    monkeypatch.setattr(hybrid_ep_buffer, "_named", set())
    with caplog.at_level(logging.INFO, LOGGER):
        for _ in range(2):
            hybrid_ep_buffer._name_once(num_blocks_permute=4, use_mnnvl=None, use_shared_buffer=0)
        hybrid_ep_buffer._name_once(num_blocks_permute=4, use_mnnvl=True)
    assert [record.getMessage() for record in caplog.records] == [
        "HybridEPBuffer: these arguments have no effect: num_blocks_permute",
        "HybridEPBuffer: these arguments have no effect: use_mnnvl",
    ]


# ---- frameworks that are missing


def test_torchtitan_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, "hybrid_ep.integrations.torchtitan", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'hybrid_ep\[torchtitan\]'"):
        importlib.import_module("hybrid_ep.integrations.torchtitan")
