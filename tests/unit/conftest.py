"""Tests of one thing, on machines without a GPU: their ranks have the torch backend on the CPU."""

import pytest

from tests.targets import TORCH_CPU, Target


@pytest.fixture(scope="session")
def target() -> Target:
    return TORCH_CPU


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as COLUMNS says, which a shell or pytest's workers may have set."""
    monkeypatch.delenv("COLUMNS", raising=False)
