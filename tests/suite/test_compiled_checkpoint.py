"""A checkpoint around a compiled block whose router says something else in the recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import Case
from tests.launch import Pool
from tests.ranks import recomputed
from tests.targets import SAME_OPS

pytestmark = [
    pytest.mark.not_on(
        "torch_gpu", why="what torch compiles for a GPU is compared on the kernels' targets"
    ),
    pytest.mark.not_on("nodes", why=SAME_OPS),
]
CASE = Case("recompute", num_ranks=2, topk=3, dtype=torch.float32)
ENOUGH = 256  # rows
RIGHT = [
    ("hybrid_ep.checkpoint", "block"),
    ("hybrid_ep.checkpoint in itself", "block"),
    ("hybrid_ep.checkpoint in a plain one", "block"),
    ("SAC_SAVE_OPS", "experts"),
]


def gradients(pool: Pool, run: str, *how: Any) -> list[dict[str, Any]]:
    return pool.run(recomputed.gradients, CASE, run, *how)


@pytest.mark.parametrize("bound", [None, ENOUGH], ids=["exact", "bounded"])
@pytest.mark.parametrize(("run", "compiled"), RIGHT)
def test_a_noisy_router_of_a_compiled_block_is_not_asked_again(
    world, inductor_cache, run, compiled, bound
):
    wanted = gradients(world(CASE.num_ranks), "stored", "", bound, inductor_cache)
    found = gradients(world(CASE.num_ranks), run, compiled, bound, inductor_cache)
    for got, want in zip(found, wanted, strict=True):
        assert got["forwards"] == 2
        assert got["forward"] == ["route", "dispatch", "combine"]
        backward = ["combine", "combine", "combine_backward", "dispatch"]
        assert sorted(got["backward"]) == backward, "routed again"
        for name in ("y", "x", "router"):
            torch.testing.assert_close(
                got[name], want[name], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("run", ["plain checkpoint", "plain checkpoint in hybrid_ep.checkpoint"])
@pytest.mark.parametrize("compiled", ["", "block"], ids=["eager", "compiled"])
def test_the_innermost_checkpoint_decides_and_a_plain_one_routes_again(
    world, inductor_cache, run, compiled
):
    """The premise of the test above: this router does give other rows in the recomputation."""
    wanted = gradients(world(CASE.num_ranks), "stored", "", ENOUGH, inductor_cache)
    found = gradients(world(CASE.num_ranks), run, compiled, ENOUGH, inductor_cache)
    for got, want in zip(found, wanted, strict=True):
        assert not torch.allclose(got["x"], want["x"], rtol=1e-2)
