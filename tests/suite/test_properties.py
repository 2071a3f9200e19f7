"""What holds for any routing: order, counts, offsets, alignment, padding, conservation."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import targets
from tests.ranks.properties import MAX_TOKENS, Routing, dispatch_and_return

pytestmark = pytest.mark.not_on("torch_gpu", why=targets.SAME_PYTHON)

# fixtures last for the whole test here: ranks keep nothing between examples
SETTINGS = {
    "deadline": None,
    "derandomize": True,  # the same examples in every run
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


@st.composite
def routings(draw: st.DrawFn, num_ranks: int) -> Routing:
    num_local_experts = draw(st.integers(1, 4))
    topk = draw(st.integers(1, min(4, num_local_experts * num_ranks)))
    expert = st.integers(-1, num_local_experts * num_ranks - 1)
    token = st.tuples(*[expert] * topk)
    tokens = st.lists(token, max_size=MAX_TOKENS).map(tuple)
    align = draw(st.integers(1, 5))
    blocks = draw(st.none() | st.integers(0, 12))
    return Routing(
        num_local_experts,
        topk,
        draw(st.tuples(*[tokens] * num_ranks)),
        align,
        None if blocks is None else blocks * align,
    )


def check(routing: Routing, results: list[dict]) -> None:
    kept_rows = {}  # of each token of each rank
    for rank, got in enumerate(results):
        offsets, counts = got["offsets"].tolist(), got["counts"].tolist()
        rows, weights = got["rows"].tolist(), got["weights"].tolist()
        required, overflow = int(got["required_rows"]), bool(got["overflow"])

        wanted = [wants(routing, rank, e) for e in range(routing.num_local_experts)]
        assert required == sum(-(-len(w) // routing.align) * routing.align for w in wanted)
        bound = required if routing.max_rows is None else routing.max_rows
        assert len(rows) == len(weights) == bound
        assert overflow == (counts != [len(w) for w in wanted]) == (required > bound)

        assert offsets[0] == 0 and offsets[-1] <= bound
        assert all(offset % routing.align == 0 for offset in offsets)
        padding = set(range(bound))
        for (begin, end), count, want in zip(pairwise(offsets), counts, wanted, strict=True):
            assert 0 <= end - begin - count < routing.align
            group = range(begin, begin + count)
            padding -= set(group)
            sources = [tuple(rows[row]) for row in group]
            assert sources == [(source, token, 7, 9) for source, token in want][:count]
            for row in group:
                source, token = rows[row][:2]
                expert = rank * routing.num_local_experts + counts_index(offsets, row)
                assert weights[row] == routing.topk_idx[source][token].count(expert)
                kept_rows[source, token] = kept_rows.get((source, token), 0) + 1
        assert all(rows[row] == [0] * 4 and weights[row] == 0 for row in padding)

    for rank, got in enumerate(results):
        expected = [[kept_rows.get((rank, t), 0)] * 4 for t in range(len(routing.topk_idx[rank]))]
        assert got["y"].tolist() == expected


def wants(routing: Routing, rank: int, local_expert: int) -> list[tuple[int, int]]:
    """The tokens that chose an expert, in (source rank, source token) order."""
    expert = rank * routing.num_local_experts + local_expert
    return [
        (source, token)
        for source, tokens in enumerate(routing.topk_idx)
        for token, experts in enumerate(tokens)
        if expert in experts
    ]


def counts_index(offsets: list[int], row: int) -> int:
    """The local expert whose group holds the row."""
    return max(e for e, begin in enumerate(offsets[:-1]) if begin <= row)


def test_any_routing_alone(alone):
    @settings(max_examples=50 if alone.target.on_gpu else 150, **SETTINGS)
    @given(routing=routings(1))
    def any_routing(routing):
        check(routing, [dispatch_and_return(alone, routing)])

    any_routing()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_routing(target, world, num_ranks):
    @settings(max_examples=20 if target.on_gpu else 60, **SETTINGS)
    @given(routing=routings(num_ranks))
    def any_routing(routing):
        check(routing, world(num_ranks).run(dispatch_and_return, routing))

    any_routing()
