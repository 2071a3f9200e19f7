"""The same over networks that ranks of one host do not take: plain stores, and NVSHMEM's puts."""

from functools import partial

import pytest

from tests.cases import Case, named
from tests.checks import check_verbs
from tests.ranks import networks

pytestmark = pytest.mark.only_on("nodes", why="one node has no network")
CASES = [
    *named("plain", "one_rank_without_tokens"),
    Case("long", tokens=(300, 410), topk=4, hidden=64, num_scales=2),
]
ON_NODES = [
    pytest.param(case.on(nodes * ranks, ranks), id=f"{nodes}x{ranks}-{case}")
    for nodes, ranks in ((2, 1), (2, 2))
    for case in CASES
]


@pytest.mark.parametrize("network", ["delaying", "puts"])
@pytest.mark.parametrize("case", ON_NODES)
def test_verbs(world, case, network):
    check_verbs(world(case.num_ranks), case, partial(networks.all_verbs, network=network))
