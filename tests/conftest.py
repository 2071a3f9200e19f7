"""Markers that say what a test needs; a machine without it skips the test with a reason.

@pytest.mark.gpu       one CUDA device of Hopper or later (capability 9.0)
@pytest.mark.gpus(n)   n of them

Tests of ranks take the fixture ``world`` (``world(3).run(function, ...)``) and run on what the
fixture ``target`` of their folder names: another backend's folder can import the same tests.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.launch import Pool, Rank, Target

TEST_DEADLINE_S = 180  # longer than any other deadline: tests/cpu/test_deadlines.py
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


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """No test hangs: the main process is interrupted, and ``Pool`` keeps a deadline of its own."""

    def late(signum: int, frame: object) -> None:
        raise TimeoutError(f"the test took more than {TEST_DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(TEST_DEADLINE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[tuple[Target, int], Pool]]:
    alive: dict[tuple[Target, int], Pool] = {}
    yield alive
    for pool in alive.values():
        pool.close()


@pytest.fixture(scope="session")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A fresh folder for the compile caches of torch, which do not notice changes of our code."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture
def world(target: Target, pools: dict[tuple[Target, int], Pool]) -> Callable[[int], Pool]:
    """``world(n)``: n ranks on the folder's target, kept from test to test."""
    from tests.launch import Pool

    def of(num_ranks: int) -> Pool:
        pool = pools.get((target, num_ranks))
        if pool is None or not pool.usable:
            if pool is not None:
                pool.kill()
            pool = pools[target, num_ranks] = Pool(num_ranks, target)
        return pool

    return of


@pytest.fixture
def alone(target: Target) -> Rank:
    """A world of one rank in this process, without ``torch.distributed``."""
    from tests.launch import Rank, rank_device

    device = rank_device(0, "cpu" if target.device == "cpu" else "auto")
    return Rank(0, 1, device, target.backend)


@pytest.fixture
def fresh_world(target: Target) -> Iterator[Callable[[int], Pool]]:
    """``fresh_world(n)``: n ranks of the test's own, to break as it likes."""
    from tests.launch import Pool

    made: list[Pool] = []

    def of(num_ranks: int) -> Pool:
        made.append(Pool(num_ranks, target))
        return made[-1]

    yield of
    for pool in made:
        pool.kill()
