"""Tests of one thing, on machines without a GPU: their ranks have the torch backend on the CPU."""

import pytest

from tests.targets import TORCH_CPU, Target


@pytest.fixture(scope="session")
def target() -> Target:
    return TORCH_CPU
