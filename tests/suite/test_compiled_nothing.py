"""Compiled layers of exact sizes where a rank sends nothing, receives nothing, or neither."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import nothing
from tests.ranks.nothing import Nothing
from tests.targets import SAME_OPS

pytestmark = [
    pytest.mark.not_on(
        "torch_gpu", why="what torch compiles for a GPU is compared on the kernels' targets"
    ),
    pytest.mark.not_on("nodes", why=SAME_OPS),
]
ALL, OF_RANK_0 = range(8), range(4)
CASES = [
    Nothing("no_tokens", (0, 192), ALL),
    Nothing("no_tokens_dynamic", (0, 192), ALL, dynamic=True),
    Nothing("no_rows", (192, 192), OF_RANK_0),
    Nothing("no_rows_dynamic", (192, 192), OF_RANK_0, dynamic=True),
    Nothing("no_tokens_no_rows", (192, 0), OF_RANK_0),
    Nothing("no_tokens_no_rows_checkpoint", (192, 0), OF_RANK_0, checkpoint=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_layer_of_exact_sizes_with_nothing_to_do(world, target, inductor_cache, case):
    if case.dynamic and torch.__version__ < "2.7":
        pytest.skip("torch 2.6 does not compile exact sizes with dynamic=True")
    by_rank = world(2).run(nothing.run, case, inductor_cache)
    assert (by_rank[1]["rows"] == 0) == (case.chosen is OF_RANK_0)
    for rank, result in enumerate(by_rank):
        for got, want in zip(result["compiled"], result["eager"], strict=True):
            off = 2e-2 if target.on_gpu else 1e-3  # in bf16 there, which fusion rounds elsewhere
            assert want.isfinite().all()
            assert (got - want).norm() <= off * want.norm(), f"rank {rank}"
