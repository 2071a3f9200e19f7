"""The module ``deep_ep`` in ``sys.modules``, and out of it again."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType

from hybrid_ep.integrations.deep_ep import settings

PATH = Path(__file__).parent / "on_path"
"""The folder for PYTHONPATH: it holds the package ``deep_ep`` and nothing else."""

_NAME = "deep_ep"
_FILE = PATH / _NAME / "__init__.py"
# They look for deep_ep once, when they are imported. torchtitan looks when it makes a buffer.
_FRAMEWORK_MODULES = (
    "megatron.core.transformer.moe.fused_a2a",
    "nemo_automodel.components.moe.megatron.fused_a2a",
)
_log = logging.getLogger("hybrid_ep.integrations")


def install(
    *, topk: int | None = None, max_tokens: int | None = None, num_sms: int | None = None
) -> None:
    """Let ``import deep_ep`` find this library's HybridEPBuffer, in this process.

    Call it before the framework is imported. A second call only configures. A DeepEP that is
    installed but not loaded is hidden until ``uninstall()``, and a warning names it.

    Args:
        topk: as of ``configure``.
        max_tokens: likewise.
        num_sms: likewise.

    Raises:
        RuntimeError: another ``deep_ep`` is loaded, or a framework was imported without one.
        ValueError: a setting is no integer or less than 1.
    """
    loaded = sys.modules.get(_NAME)
    if loaded is not None and not _is_ours(loaded):
        raise RuntimeError(
            f"another deep_ep is loaded, from {getattr(loaded, '__file__', None)}: call "
            "hybrid_ep.integrations.deep_ep.install() before anything imports deep_ep"
        )
    if loaded is None:
        for name in _FRAMEWORK_MODULES:
            if not getattr(sys.modules.get(name), "HAVE_HYBRIDEP", True):
                raise RuntimeError(
                    f"{name} was imported without a deep_ep, and does not look for one again: "
                    "call hybrid_ep.integrations.deep_ep.install() before the framework is imported"
                )
    settings.configure(topk=topk, max_tokens=max_tokens, num_sms=num_sms)
    if loaded is None:
        _load()


def uninstall() -> None:
    """Undo ``install()`` and every ``configure()``.

    Modules that imported HybridEPBuffer keep it. Does nothing where another ``deep_ep`` is loaded.
    """
    settings.forget()
    if _is_ours(sys.modules.get(_NAME)):
        for name in list(sys.modules):
            if name == _NAME or name.startswith(f"{_NAME}."):
                del sys.modules[name]


def _load() -> None:
    hidden = importlib.util.find_spec(_NAME)
    if hidden is not None and (hidden.origin is None or Path(hidden.origin) != _FILE):
        _log.warning("the installed deep_ep (%s) is hidden by hybrid_ep's", hidden.origin)
    folder = [str(_FILE.parent)]
    spec = importlib.util.spec_from_file_location(_NAME, _FILE, submodule_search_locations=folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_NAME]
        raise
    _log.info("deep_ep.HybridEPBuffer is served by hybrid_ep")


def _is_ours(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file) == _FILE
