"""Markers that say what a test needs; a machine without it skips the test with a reason.

@pytest.mark.gpu       one CUDA device of Hopper or later (capability 9.0)
@pytest.mark.gpus(n)   n of them
"""

import functools

import pytest

MIN_CAPABILITY = (9, 0)


@functools.cache
def num_gpus() -> int:
    """The CUDA devices here that can run the kernels."""
    import torch

    devices = range(torch.cuda.device_count())
    return sum(torch.cuda.get_device_capability(device) >= MIN_CAPABILITY for device in devices)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs one CUDA device of capability 9.0 or later")
    config.addinivalue_line("markers", "gpus(n): needs n CUDA devices of capability 9.0 or later")


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = max(
        [1 for _ in item.iter_markers("gpu")]
        + [marker.args[0] for marker in item.iter_markers("gpus")],
        default=0,
    )
    if needed and num_gpus() < needed:
        capability = ".".join(map(str, MIN_CAPABILITY))
        pytest.skip(f"needs {needed} GPU(s) of capability {capability}, found {num_gpus()}")
