"""The torch backend on the CPU: what the tests of this folder run on."""

import pytest

from tests.launch import Target


@pytest.fixture(scope="session")
def target() -> Target:
    return Target(backend="torch", device="cpu")
