"""Markers that say what a test needs, and the fixtures of its ranks.

@pytest.mark.gpu          one CUDA device of Hopper or later (capability 9.0), else it is skipped
@pytest.mark.gpus(n)      n of them
@pytest.mark.not_on(...)  targets that cannot run it, and why; only_on: those that alone can
@pytest.mark.exclusive    nothing else may use the GPU: it reads the free memory, or times matter

Tests of ranks take the fixture ``world`` (``world(3).run(function, ...)``) and run on ``target``:
each of tests/targets.py for a test of tests/suite, the torch backend on the CPU in tests/unit.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from tests import targets
from tests.launch import Pool, Pools, Rank, give_memory_back
from tests.targets import Target

# each process that compiles would start others to compile in, which takes longer than compiling
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
TEST_DEADLINE_S = 180  # longer than any other deadline: tests/unit/test_deadlines.py
MIN_CAPABILITY = (9, 0)


@functools.cache
def num_gpus() -> int:
    """The CUDA devices here that can run the kernels."""
    devices = range(torch.cuda.device_count())
    return sum(torch.cuda.get_device_capability(device) >= MIN_CAPABILITY for device in devices)


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "gpu: needs one CUDA device of capability 9.0 or later",
        "gpus(n): needs n CUDA devices of capability 9.0 or later",
        "not_on(*targets, why): targets that cannot run it",
        "only_on(*targets, why): targets that alone can run it",
        "exclusive: nothing else may use the GPU",
        "breaks_ranks: takes ranks of its own, and may kill them",
        *(f"{target.name}: runs on this target" for target in targets.ALL),
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Iterator[None]:
    made = yield
    return list(filter(targets.can_run, made)) if isinstance(made, list) else made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=targets.place)
    for item in items:
        if "fresh_world" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.breaks_ranks)


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


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    alive = Pools()
    yield alive
    alive.close()


@pytest.fixture(scope="session")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A fresh folder for the compile caches of torch, which do not notice changes of our code."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture
def world(target: Target, pools: Pools) -> Callable[[int], Pool]:
    """``world(n)``: n ranks on the target, kept from test to test."""
    return functools.partial(pools.of, target)


@pytest.fixture
def alone(target: Target) -> Iterator[Rank]:
    """A world of one rank in this process, without ``torch.distributed``."""
    device = target.rank_device(0, 1)
    yield Rank(0, 1, device, target)
    give_memory_back(device)


@pytest.fixture
def fresh_world(target: Target) -> Iterator[Callable[[int], Pool]]:
    """``fresh_world(n)``: n ranks of the test's own, to break as it likes."""
    made: list[Pool] = []

    def of(num_ranks: int) -> Pool:
        made.append(Pool(num_ranks, target))
        return made[-1]

    yield of
    for pool in made:
        pool.kill()
