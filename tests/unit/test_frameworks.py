"""Megatron-Core, NeMo Automodel and torchtitan, as their wheels are, over this library.

They are what ``tools/fetch_consumers.py`` has fetched; without it these tests skip.
"""

from collections.abc import Iterator

import pytest
import torch._library.opaque_object

from tests.launch import Pools
from tests.ranks import frameworks
from tests.targets import TORCH_CPU
from tools.fetch_consumers import paths_of


@pytest.fixture(scope="module")
def pools_of_frameworks() -> Iterator[Pools]:
    """Ranks of their own: the frameworks stay imported."""
    alive = Pools(most_ranks=6)
    yield alive
    alive.close()


@pytest.fixture
def run(pools_of_frameworks):
    def on_ranks(num_ranks, framework, name, *args):
        missing = [path.name for path in paths_of(framework) if not path.is_dir()]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}: run tools/fetch_consumers.py")
        pool = pools_of_frameworks.of(TORCH_CPU, num_ranks)
        told = pool.run(frameworks.call, framework, name, *args, deadline_s=120)
        assert told == [[]] * num_ranks

    return on_ranks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_megatron_identity_experts(run, num_ranks):
    run(num_ranks, "megatron-core", "megatron_identity")


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_megatron_budget_of_a_rank(run, factor):
    run(2, "megatron-core", "megatron_budget", factor)


@pytest.mark.parametrize("pads", [True, False])
def test_megatron_uneven_tokens(run, pads):
    run(2, "megatron-core", "megatron_uneven", pads)


@pytest.mark.parametrize("name", ["megatron_interleaved", "megatron_drop_and_pad"])
def test_megatron(run, name):
    run(2, "megatron-core", name)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_automodel(run, num_ranks):
    run(num_ranks, "nemo-automodel", "automodel")


@pytest.mark.parametrize("name", ["titan_override", "titan_checkpointing"])
def test_torchtitan_override(run, name):
    run(2, "torchtitan", name)


@pytest.mark.skipif(
    not hasattr(torch._library.opaque_object, "CustomClassBase"),
    reason="torchtitan 0.3.0's own dispatcher imports a class that torch has from 2.14 on",
)
def test_torchtitan_unchanged(run):
    run(2, "torchtitan", "titan_unchanged")
