"""Every test of this folder runs on GPUs with the nvshmem backend: ranks in virtual nodes."""

from pathlib import Path

import pytest

from tests.launch import Target

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session")
def target() -> Target:
    return Target("nvshmem", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
