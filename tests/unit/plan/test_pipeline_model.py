"""The model of the chunk pipeline against closed forms, a recurrence and what must hold always."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep.plan.pipeline_model import (
    Pipeline,
    fewest_credits,
    fill_gaps,
    overlap_of,
    pipeline_of,
    simulate,
)
from hybrid_ep.plan.plan import make_plan
from hybrid_ep.plan.scaling import (
    WeakScaling,
    deepseek_v3,
    first_network_bound,
    scaling_rows,
    simulated_row,
)
from hybrid_ep.shape import DTYPES, Shape

SETTINGS = {"deadline": None, "derandomize": True}  # the same examples in every run

# one peer; a chunk of 10 records is sent in 10 us, pulled in 4, each latency is its own number
CHUNK_US, PULL_US, NETWORK_LATENCY, NVLINK_LATENCY = 10.0, 4.0, 30.0, 7.0
ROUND_TRIP = CHUNK_US + NETWORK_LATENCY + PULL_US + NVLINK_LATENCY + NETWORK_LATENCY


def one_peer(**changes: object) -> Pipeline:
    values = {
        "num_peers": 1,
        "tokens_per_peer": 200,
        "record_bytes": 1000,
        "pull_bytes": 4000.0,
        "local_pull_bytes": 0.0,
        "chunk_tokens": 10,
        "network_gbs": 1.0,
        "nvlink_gbs": 10.0,
        "network_latency_us": NETWORK_LATENCY,
        "nvlink_latency_us": NVLINK_LATENCY,
        "put_us": 0.0,
        "pass_on_us": 0.0,
    }
    return Pipeline(**{**values, **changes})


# ---- closed forms


@pytest.mark.parametrize("credits", [None, 1, 5])
def test_one_chunk_takes_the_sum_of_all_steps(credits: int | None) -> None:
    outcome = simulate(one_peer(tokens_per_peer=10, credits=credits))
    steps = CHUNK_US + NETWORK_LATENCY + PULL_US + NVLINK_LATENCY
    assert outcome.total_us == pytest.approx(steps)
    assert (outcome.chunks, outcome.most_under_way, outcome.overlap) == (1, 1, 0)


@pytest.mark.parametrize("num_peers", [1, 3])
def test_unlimited_credits_behind_the_network(num_peers: int) -> None:
    """Bytes over bandwidth, then the way of the last chunk."""
    pipeline = one_peer(num_peers=num_peers)
    outcome = simulate(pipeline)
    sending = num_peers * 20 * CHUNK_US
    assert sending == pytest.approx(num_peers * 200 * 1000 / 1.0 / 1e3)
    way = NETWORK_LATENCY + PULL_US + NVLINK_LATENCY
    assert outcome.total_us == pytest.approx(sending + way)
    assert outcome.network_utilisation == pytest.approx(sending / (sending + way))


def test_unlimited_credits_behind_nvlink() -> None:
    """The first chunk's way, then bytes over bandwidth."""
    outcome = simulate(one_peer(pull_bytes=25_000.0))
    fill = CHUNK_US + NETWORK_LATENCY
    assert outcome.total_us == pytest.approx(fill + 20 * 25 + NVLINK_LATENCY)
    assert outcome.nvlink_busy_us == pytest.approx(500)
    assert outcome.both_busy_us == pytest.approx(19 * CHUNK_US - NETWORK_LATENCY)


def test_own_tokens_fill_the_gaps_of_nvlink() -> None:
    gaps = CHUNK_US + NETWORK_LATENCY + 19 * (CHUNK_US - PULL_US)
    just_fits = one_peer(local_pull_bytes=gaps * 10 * 1e3)
    assert simulate(just_fits).total_us == pytest.approx(simulate(one_peer()).total_us)
    more = simulate(replace(just_fits, local_pull_bytes=(gaps + 50) * 10 * 1e3))
    assert more.total_us == pytest.approx(simulate(one_peer()).total_us + 50)
    assert more.nvlink_busy_us == pytest.approx(gaps + 50 + 20 * PULL_US)
    assert more.overlap == pytest.approx(1)  # the card's work, the shorter, is hidden


def test_one_credit_is_stop_and_wait() -> None:
    outcome = simulate(one_peer(credits=1))
    last_credit = NETWORK_LATENCY  # nobody waits for it
    assert outcome.total_us == pytest.approx(20 * ROUND_TRIP - last_credit)
    assert outcome.most_under_way == 1
    assert outcome.both_busy_us == 0


@pytest.mark.parametrize("credits", [2, 3, 5, 8])
def test_few_credits_give_so_many_chunks_a_round_trip(credits: int) -> None:
    outcome = simulate(one_peer(credits=credits, tokens_per_peer=10 * credits * 50))
    last_round = credits * CHUNK_US + NETWORK_LATENCY + PULL_US + NVLINK_LATENCY
    assert outcome.total_us == pytest.approx(49 * ROUND_TRIP + last_round)
    assert outcome.most_under_way == credits


@pytest.mark.parametrize("num_peers", [1, 2, 3, 8])
@pytest.mark.parametrize("latency", [0.0, 5.0, 30.0, 100.0])
def test_credits_that_cover_bandwidth_times_delay_are_enough(
    num_peers: int, latency: float
) -> None:
    """The chunks to all peers that the card could send while a credit comes back."""
    pipeline = one_peer(num_peers=num_peers, tokens_per_peer=6_000, network_latency_us=latency)
    delay = CHUNK_US + latency + PULL_US + NVLINK_LATENCY + latency
    product = delay / CHUNK_US / num_peers
    enough = simulate(replace(pipeline, credits=math.ceil(product)))
    assert enough.total_us == pytest.approx(simulate(pipeline).total_us)
    fewest = fewest_credits(pipeline)
    assert 0.95 * product <= fewest <= math.ceil(product)
    if fewest > 1:
        fewer = simulate(replace(pipeline, credits=fewest - 1)).total_us
        assert simulate(pipeline).total_us < 0.98 * fewer


def test_fewest_credits_at_other_shares() -> None:
    pipeline = one_peer(tokens_per_peer=10_000)
    needed = [fewest_credits(pipeline, share=share) for share in (0.1, 0.5, 0.9, 1.0)]
    assert needed == sorted(needed)
    assert needed[0] == 1 and needed[-1] == math.ceil(ROUND_TRIP / CHUNK_US)
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
            fewest_credits(pipeline, share=share)


def test_larger_chunks_fill_the_pipeline_later() -> None:
    """The last chunk is pulled only when it is there whole; all else goes at the network's pace."""
    times = [simulate(one_peer(chunk_tokens=tokens)).total_us for tokens in (1, 10, 100, 200)]
    assert times == sorted(times)
    assert times[-1] - times[0] == pytest.approx((200 - 1) * PULL_US / 10)


def test_each_run_of_records_is_a_put_with_a_signal() -> None:
    """Where a peer gets every token a chunk is one put; where it gets few, one for each record."""
    dense, sparse = (one_peer(put_us=3.0, density=density) for density in (1.0, 1e-9))
    way = NETWORK_LATENCY + PULL_US + NVLINK_LATENCY
    assert simulate(dense).total_us == pytest.approx(20 * CHUNK_US + way), "hidden by the bytes"
    assert simulate(sparse).total_us == pytest.approx(20 * (10 * 3) + way)


@pytest.mark.parametrize("credits", [None, 1])
def test_an_arrival_is_passed_on_before_it_is_pulled(credits: int | None) -> None:
    base = simulate(one_peer(credits=credits)).total_us
    hops = 1 if credits is None else 20  # hidden but for the last, or paid for each chunk
    late = simulate(one_peer(credits=credits, pass_on_us=6.0)).total_us
    assert late == pytest.approx(base + 6 * hops)


# ---- what must hold always


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    us = st.floats(0, 50)
    return Pipeline(
        num_peers=draw(st.integers(1, 4)),
        tokens_per_peer=draw(st.integers(1, 60)),
        record_bytes=draw(st.integers(1, 20_000)),
        pull_bytes=draw(st.floats(0, 50_000)),
        local_pull_bytes=draw(st.floats(0, 1e6)),
        chunk_tokens=draw(st.integers(1, 20)),
        credits=draw(st.none() | st.integers(1, 8)),
        network_gbs=draw(st.floats(0.5, 100)),
        nvlink_gbs=draw(st.floats(0.5, 500)),
        network_latency_us=draw(us),
        nvlink_latency_us=draw(us),
        density=draw(st.floats(0.01, 1)),
        put_us=draw(st.floats(0, 5)),
        pass_on_us=draw(us),
    )


def by_recurrence(pipeline: Pipeline) -> float:
    """Total time without events: a chunk's times follow from those of earlier chunks."""
    sent, pulled, gaps = [], [], 0.0
    for round_idx in range(pipeline.chunks_per_peer):
        left = pipeline.tokens_per_peer - round_idx * pipeline.chunk_tokens
        tokens = min(pipeline.chunk_tokens, left)
        for peer in range(pipeline.num_peers):
            credit = 0.0
            if pipeline.credits is not None and round_idx >= pipeline.credits:
                spent = (round_idx - pipeline.credits) * pipeline.num_peers + peer
                credit = pulled[spent] + pipeline.nvlink_latency_us + pipeline.network_latency_us
            begin = max(credit, sent[-1] if sent else 0.0)
            sent.append(begin + pipeline.chunk_us(tokens))
            nvlink_free = pulled[-1] if pulled else 0.0
            arrives = sent[-1] + pipeline.network_latency_us + pipeline.pass_on_us
            begin = max(arrives, nvlink_free)
            gaps += begin - nvlink_free
            pulled.append(begin + pipeline.pull_us(tokens))
    late = max(0.0, pipeline.local_us - gaps)
    return pulled[-1] + late + pipeline.nvlink_latency_us


@given(pipelines())
@settings(**SETTINGS)
def test_events_agree_with_the_recurrence(pipeline: Pipeline) -> None:
    assert simulate(pipeline).total_us == pytest.approx(by_recurrence(pipeline))


@given(pipelines())
@settings(**SETTINGS)
def test_never_faster_than_the_bounds(pipeline: Pipeline) -> None:
    total = simulate(pipeline).total_us * (1 + 1e-9)
    first = min(pipeline.chunk_tokens, pipeline.tokens_per_peer)
    last = pipeline.tokens_per_peer - (pipeline.chunks_per_peer - 1) * pipeline.chunk_tokens
    latencies = pipeline.network_latency_us + pipeline.nvlink_latency_us
    arrives = pipeline.send_us(first) + pipeline.network_latency_us
    remote = pipeline.nvlink_us - pipeline.local_us
    assert total >= pipeline.network_us + latencies + pipeline.pull_us(last)
    assert total >= pipeline.nvlink_us + pipeline.nvlink_latency_us
    assert total >= arrives + remote + pipeline.nvlink_latency_us


@given(pipelines())
@settings(**SETTINGS)
def test_never_slower_than_one_step_after_the_other(pipeline: Pipeline) -> None:
    chunks = pipeline.num_peers * pipeline.chunks_per_peer
    latency = 2 * pipeline.network_latency_us + pipeline.nvlink_latency_us + pipeline.pass_on_us
    puts = pipeline.num_peers * pipeline.tokens_per_peer  # a token each, at most
    serial = pipeline.network_us + pipeline.nvlink_us + chunks * latency + puts * pipeline.put_us
    assert simulate(pipeline).total_us <= serial * (1 + 1e-9)


@given(pipelines())
@settings(**SETTINGS)
def test_more_credits_are_never_slower(pipeline: Pipeline) -> None:
    credits = [*range(1, pipeline.chunks_per_peer + 2), None]
    times = [simulate(replace(pipeline, credits=count)).total_us for count in credits]
    assert all(more <= fewer * (1 + 1e-12) for fewer, more in pairwise(times))
    assert times[-2] == pytest.approx(times[-1])  # a credit for every chunk is as good as any


@given(pipelines())
@settings(**SETTINGS)
def test_higher_rates_and_lower_latencies_are_never_slower(pipeline: Pipeline) -> None:
    total = simulate(pipeline).total_us * (1 + 1e-9)
    for name in ("network_gbs", "nvlink_gbs"):
        assert simulate(replace(pipeline, **{name: 2 * getattr(pipeline, name)})).total_us <= total
    for name in (
        *("network_latency_us", "nvlink_latency_us", "put_us", "pass_on_us"),
        "local_pull_bytes",
    ):
        assert simulate(replace(pipeline, **{name: getattr(pipeline, name) / 2})).total_us <= total


@given(pipelines())
@settings(**SETTINGS)
def test_work_is_conserved(pipeline: Pipeline) -> None:
    outcome = simulate(pipeline)
    assert outcome.chunks == pipeline.num_peers * pipeline.chunks_per_peer
    full, rest = divmod(pipeline.tokens_per_peer, pipeline.chunk_tokens)
    of_a_peer = full * pipeline.chunk_us(pipeline.chunk_tokens)
    of_a_peer += pipeline.chunk_us(rest) if rest else 0.0
    assert outcome.network_busy_us == pytest.approx(pipeline.num_peers * of_a_peer)
    assert outcome.nvlink_busy_us == pytest.approx(pipeline.nvlink_us, abs=1e-9)
    assert 1 <= outcome.most_under_way <= min(pipeline.credits or 99, pipeline.chunks_per_peer)
    shorter = min(outcome.network_busy_us, outcome.nvlink_busy_us)
    assert 0 <= outcome.both_busy_us <= shorter + 1e-9
    assert -1e-9 <= outcome.overlap <= 1 + 1e-9
    for share in (outcome.network_utilisation, outcome.nvlink_utilisation):
        assert 0 <= share <= 1 + 1e-9


@given(pipelines(), st.floats(0.3, 1.0))
@settings(**SETTINGS)
def test_fewest_credits_reach_the_share_and_one_less_does_not(
    pipeline: Pipeline, share: float
) -> None:
    fewest = fewest_credits(pipeline, share=share)
    best = simulate(replace(pipeline, credits=None)).total_us
    reached = simulate(replace(pipeline, credits=fewest)).total_us
    assert best >= share * reached * (1 - 1e-9)
    if fewest > 1:
        assert best < share * simulate(replace(pipeline, credits=fewest - 1)).total_us


def test_the_same_pipeline_has_the_same_outcome() -> None:
    pipeline = one_peer(num_peers=3, credits=2, local_pull_bytes=1e6)
    assert simulate(pipeline) == simulate(pipeline)


def test_intervals_by_hand() -> None:
    busy = [(2.0, 3.0), (3.0, 4.0), (6.0, 7.0)]
    assert fill_gaps(busy, 0.0) == busy
    assert fill_gaps(busy, 3.0) == [(0.0, 2.0), (2.0, 3.0), (3.0, 4.0), (4.0, 5.0), (6.0, 7.0)]
    assert fill_gaps(busy, 9.0)[-1] == (7.0, 12.0)
    assert fill_gaps([], 2.0) == [(0.0, 2.0)]
    assert overlap_of(busy, [(0.0, 2.5), (3.5, 6.5)]) == 0.5 + 0.5 + 0.5
    assert overlap_of(busy, []) == 0


# ---- from a plan


def test_a_pipeline_carries_what_the_plan_says() -> None:
    plan = WeakScaling(deepseek_v3(), node_limit=4).plan(8)
    pipeline = pipeline_of(plan, credits=4, chunk_tokens=32)
    assert pipeline.num_peers == 7
    sent = 7 * pipeline.tokens_per_peer * pipeline.record_bytes
    assert sent == pytest.approx(plan.dispatch.network.expected, rel=1e-3)
    us = {bound.limit: bound.us for bound in plan.dispatch.bounds}
    assert pipeline.network_us == pytest.approx(us["network"], rel=1e-3)
    assert pipeline.nvlink_us == pytest.approx(us["NVLink"], rel=1e-3)
    assert pipeline.local_us == pytest.approx(us["NVLink"] / 8)
    assert pipeline.density == pytest.approx(pipeline.tokens_per_peer / plan.shape.max_tokens)


def test_two_nodes_of_one_rank_pull_nothing() -> None:
    sizes = {"max_tokens": 10, "hidden": 64, "num_experts": 2, "topk": 2}
    plan = make_plan(Shape(num_ranks=2, ranks_per_node=1, **sizes))
    outcome = simulate(pipeline_of(plan, credits=1, chunk_tokens=4))
    assert (outcome.nvlink_busy_us, outcome.overlap) == (0, 0)


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_deepseek_v3_is_bound_by_its_network(nodes: int, dtype: str) -> None:
    row = simulated_row(
        WeakScaling(deepseek_v3(dtype=DTYPES[dtype])), nodes, chunk_tokens=32, credits=16
    )
    assert row.floor_us < row.outcome.total_us < 1.02 * row.floor_us < row.serial_us
    assert row.outcome.total_us == row.unlimited_us
    assert row.outcome.overlap > 0.99
    assert row.credits_needed <= 5 < 16, "less than the windows that plan proposes"


def test_scaling_rows_of_deepseek_v3() -> None:
    uniform, limited = (
        scaling_rows(WeakScaling(deepseek_v3(), node_limit=limit)) for limit in (None, 4)
    )
    assert [row.num_ranks for row in uniform] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert [row.num_experts for row in uniform] == [256] * 6 + [512, 1024]
    for free, bound in zip(uniform, limited, strict=True):
        assert free.network_bytes <= free.once_a_rank_bytes <= free.once_an_expert_bytes
        if free.num_nodes <= 4:
            assert bound == replace(free, node_limit=4)
        else:
            assert bound.network_bytes < free.network_bytes
            assert bound.nodes_of_token < 4
        assert bound.once_an_expert_bytes == free.once_an_expert_bytes
    assert uniform[0].network_us == 0 and uniform[0].balance_gbs is None
    assert first_network_bound(uniform) == uniform[1]


def test_the_side_that_takes_longer_changes_at_the_balance() -> None:
    (row,) = scaling_rows(WeakScaling(deepseek_v3()), (4,))
    below, above = (
        scaling_rows(WeakScaling(deepseek_v3(), network_gbs=row.balance_gbs * factor), (4,))[0]
        for factor in (0.99, 1.01)
    )
    assert (below.longer, above.longer) == ("network", "NVLink")
    assert below.network_us * 0.99 == pytest.approx(below.nvlink_us)
    assert first_network_bound([above]) is None


def test_fp8_brings_its_scales() -> None:
    fp8 = {"dtype": DTYPES["fp8"]}
    assert deepseek_v3(**fp8).scale_bytes == 7168 // 128 * 4
    assert deepseek_v3(**fp8, hidden=192).scale_bytes == 2 * 4, "the last covers fewer"
    assert deepseek_v3(**fp8, scale_bytes=0).scale_bytes == 0
    assert deepseek_v3().scale_bytes == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"credits": 0}, "credits must be an integer of at least 1, got 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be an integer of at least 1, got 0"),
        ({"num_peers": 1.5}, "num_peers must be an integer of at least 1, got 1.5"),
        ({"network_gbs": 0.0}, "network_gbs must be positive, got 0.0"),
        ({"nvlink_gbs": math.inf}, "nvlink_gbs must be positive, got inf"),
        ({"network_latency_us": -1.0}, "network_latency_us must be at least 0, got -1.0"),
        ({"put_us": -0.1}, "put_us must be at least 0, got -0.1"),
        ({"density": 0.0}, "density must be above 0 and at most 1, got 0.0"),
        ({"pull_bytes": math.nan}, "pull_bytes must be at least 0, got nan"),
    ],
)
def test_bad_input_names_rule_and_value(changes: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        one_peer(**changes)


def test_one_node_has_no_pipeline() -> None:
    with pytest.raises(ValueError, match="at least 2 nodes, got 1"):
        pipeline_of(WeakScaling(deepseek_v3()).plan(1), credits=1, chunk_tokens=32)
