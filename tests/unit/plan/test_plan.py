"""The plan's arithmetic against simulation, construction and the Buffer itself."""

import itertools
import json
import re
import time
from dataclasses import fields
from typing import Any

import pytest
import torch

import hybrid_ep
from hybrid_ep import shape as shapes
from hybrid_ep.bench import options
from hybrid_ep.config import Config
from hybrid_ep.integers import round_up
from hybrid_ep.layout.buffer_layout import symmetric_regions
from hybrid_ep.layout.handle_layout import handle_bytes
from hybrid_ep.layout.network_window import Window
from hybrid_ep.plan import command, scaling_tables
from hybrid_ep.plan.plan import UNCONFIRMED, Plan, make_plan, tokens_by_sms
from hybrid_ep.plan.random_load import worst_rows
from hybrid_ep.shape import Shape
from hybrid_ep_cli.main import main, make_parser

EP64 = {
    "num_ranks": 64,
    "max_tokens": 4096,
    "hidden": 7168,
    "num_experts": 256,
    "topk": 8,
}
SIZES = "--ranks 16 --ranks-per-node 8 --tokens 4096 --hidden 7168 --experts 64 --topk 8"


def planned(**sizes_and_more: Any) -> Plan:
    """The plan of a shape, whose sizes are among the arguments."""
    names = {field.name for field in fields(Shape)}
    sizes = {name: value for name, value in sizes_and_more.items() if name in names}
    more = {name: value for name, value in sizes_and_more.items() if name not in names}
    return make_plan(Shape(**sizes), **more)


def small(**changes: object) -> Plan:
    sizes = {"num_ranks": 4, "max_tokens": 10, "hidden": 64, "num_experts": 8, "topk": 2}
    return planned(**{**sizes, **changes})


# ---- memory


def test_the_example_of_the_design() -> None:
    plan = planned(**EP64)
    assert plan.regions["outbox"] == 2 * 4096 * (14336 + 128)
    assert plan.regions["outbox"] / 1e9 == pytest.approx(0.12, abs=0.005)
    assert plan.regions["inbox"] / 1e9 == pytest.approx(0.47, abs=0.005)
    assert plan.push_bytes / 1e9 == pytest.approx(3.75, abs=0.01)


def test_regions_of_odd_sizes() -> None:
    # T=130 is two tiles; fp8 rows of 48 bytes go home as 96; scales of 5 bytes take 16
    regions = symmetric_regions(
        Shape(
            num_ranks=3,
            num_experts=15,
            max_tokens=130,
            hidden=48,
            topk=3,
            dtype=torch.float8_e4m3fn,
            scale_bytes=5,
        )
    )
    assert regions == {
        "outbox": 33280,  # 2 * 130 records of 48 + 16 + 16, each padded to 128
        "routing_inbox": 9984,  # 2 * 3 * (round_up(256 * 3 * 2) + round_up(24)) = 6 * (1536 + 128)
        "inbox": 24960,  # 130 * 2 other ranks * 96
        "value_inbox": 1664,  # 130 * 3 * 4 = 1560, padded
        "flags": 6528,  # 3 * round_up(256 + 9 + 1, 16) * 8
        "calls": 128,  # 3 * 5 * 8 = 120, padded
        "sum_flags": 2176,  # 130 * 2 * 8 = 2080, padded
    }


@pytest.mark.parametrize("tokens", [1, 130, 4096])
@pytest.mark.parametrize(("ranks", "experts_per_rank", "topk"), [(1, 3, 1), (3, 5, 7), (64, 4, 8)])
def test_sizes_are_those_of_the_extension(tokens, ranks, experts_per_rank, topk) -> None:
    extension = pytest.importorskip(
        "hybrid_ep._nvlink", reason="hybrid_ep._nvlink was not built: that takes nvcc"
    )
    experts, hidden = ranks * experts_per_rank, 2880
    sizes = {"num_ranks": ranks, "num_experts": experts, "max_tokens": tokens, "topk": topk}
    shape = Shape(**sizes, hidden=hidden, scale_bytes=40)
    built = extension.symmetric_bytes(ranks, experts, tokens, topk, 2 * hidden + 48, 2 * hidden)
    assert sum(symmetric_regions(shape).values()) == built
    assert handle_bytes(shape) == 4 * extension.handle_words(ranks, experts, tokens, topk)


def test_symmetric_memory_barely_grows_with_ranks() -> None:
    few, many = (planned(**{**EP64, "num_ranks": ranks}) for ranks in (16, 64))
    assert many.symmetric_bytes < 1.02 * few.symmetric_bytes
    assert many.push_bytes == 4 * few.push_bytes


@pytest.mark.parametrize("align", [1, 8])
def test_agrees_with_a_buffer_of_one_rank(align: int) -> None:
    plan = small(num_ranks=1, align=align)
    buffer = hybrid_ep.Buffer(
        hidden=64, num_experts=8, max_tokens=10, topk=2, device="cpu", backend="torch"
    )
    assert plan.torch_layout_bytes == 4 * buffer.layout_size

    topk_idx = torch.tensor([[t % 8, (t + 1) % 8] for t in range(10)])
    x = torch.zeros((10, 64), dtype=torch.bfloat16)
    out = hybrid_ep.dispatch(buffer, x, topk_idx, align=align)
    assert out.rows.shape[0] <= plan.rows.worst
    if align == 1:
        assert out.rows.shape[0] == plan.rows.expected == plan.rows.worst


@pytest.mark.parametrize("topk", [1, 2, 3, 4])
@pytest.mark.parametrize("align", [1, 2, 3, 8])
@pytest.mark.parametrize("num_local_experts", [1, 2, 3])
@pytest.mark.parametrize("copies", [1, 2, 5])
def test_worst_rows_is_reached_and_never_passed(
    topk: int, align: int, num_local_experts: int, copies: int
) -> None:
    # any counts up to one row a copy and expert whose sum is at most min(topk, experts) a copy
    most = copies * min(topk, num_local_experts)
    counts = itertools.product(range(copies + 1), repeat=num_local_experts)
    rows = [sum(-(-c // align) * align for c in count) for count in counts if sum(count) <= most]
    assert max(rows) == worst_rows(1, num_local_experts, copies, topk, align)


@pytest.mark.parametrize("max_tokens", [1, 60])
def test_expected_rows_count_the_padding(max_tokens: int) -> None:
    plan = small(max_tokens=max_tokens, align=16, num_experts=32, topk=3)
    experts = draw_experts(plan, 2000 * 4 * max_tokens).view(2000, -1)  # 2000 calls of 4 ranks
    counts = torch.stack([(experts == expert).sum(1) for expert in range(8)], dim=1)
    rows = (counts + 15) // 16 * 16
    assert rows.sum(1).float().mean().item() == pytest.approx(plan.rows.expected, rel=0.02)
    assert plan.rows.expected <= plan.rows.worst
    assert small(align=16, topk=8).rows.expected == small(align=16, topk=8).rows.worst == 2 * 48


# ---- fan-out and traffic


def draw_experts(plan: Plan, num_tokens: int) -> torch.Tensor:
    """``[num_tokens, topk]`` distinct experts, uniform over the nodes allowed and within them."""
    generator = torch.Generator().manual_seed(0)
    node_of_expert = (
        torch.arange(plan.shape.num_experts) * plan.shape.num_nodes // plan.shape.num_experts
    )
    limit = plan.node_limit or plan.shape.num_nodes
    ranking = (
        torch.rand((num_tokens, plan.shape.num_nodes), generator=generator).argsort(1).argsort(1)
    )
    allowed = (ranking < limit)[:, node_of_expert]
    score = torch.rand((num_tokens, plan.shape.num_experts), generator=generator)
    return score.masked_fill(~allowed, -1.0).topk(plan.shape.topk).indices


SHAPES = [
    pytest.param({"num_ranks": 4}, id="one-node"),
    pytest.param({"num_ranks": 6, "ranks_per_node": 2, "num_experts": 12, "topk": 3}, id="3x2"),
    pytest.param({"num_ranks": 3, "ranks_per_node": 1, "num_experts": 9, "topk": 5}, id="3x1"),
    pytest.param(
        {"num_ranks": 8, "ranks_per_node": 2, "num_experts": 24, "topk": 4, "node_limit": 2},
        id="4x2-limit-2",
    ),
    pytest.param(
        {**EP64, "ranks_per_node": 8, "node_limit": 4},
        id="deepseek-v3-8x8-limit-4",
    ),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_expected_values_against_simulation(shape: dict) -> None:
    plan = small(**shape)
    ranks, nodes, local = plan.shape.num_ranks, plan.shape.num_nodes, plan.shape.ranks_per_node
    num_tokens = 40_000
    experts = draw_experts(plan, num_tokens)
    on_rank = torch.zeros((num_tokens, ranks)).scatter_(
        1, experts * ranks // plan.shape.num_experts, 1
    )
    on_node = on_rank.view(num_tokens, nodes, local).amax(2)
    assert on_rank.sum(1).mean().item() == pytest.approx(plan.copies.expected, rel=0.01)
    assert on_node.sum(1).mean().item() == pytest.approx(plan.nodes.expected, rel=0.01)
    assert on_rank.sum(1).max() == plan.copies.worst
    assert on_node.sum(1).max() == plan.nodes.worst

    # walk the copies of rank 0's tokens; all ranks being alike, what it causes is what it carries
    by_node = on_rank.view(num_tokens, nodes, local)
    pulls = by_node[:, :, 1:].sum()  # on every node from the rail peer, who has local rank 0
    crossings = on_node[:, 1:].sum()
    scale = plan.shape.max_tokens / num_tokens * plan.dispatch.row_bytes
    phase = plan.dispatch
    assert pulls.item() * scale == pytest.approx(phase.nvlink.expected, rel=0.02)
    assert crossings.item() * scale == pytest.approx(phase.network.expected, rel=0.02)
    without = on_rank[:, local:].sum().item() * scale
    assert without == pytest.approx(phase.network_without_dedup.expected, rel=0.02)
    remote_experts = (experts >= local * plan.shape.num_experts // ranks).sum()
    once_an_expert = remote_experts.item() * scale
    assert once_an_expert == pytest.approx(phase.network_once_an_expert.expected, rel=0.02)


@pytest.mark.parametrize("node_limit", [1, 2, 3, 4])
def test_expected_values_over_all_routings(node_limit: int) -> None:
    """4 nodes of 2 ranks of 2 experts: each set of nodes, then each set of experts there."""
    plan = small(num_ranks=8, ranks_per_node=2, num_experts=16, topk=3, node_limit=node_limit)
    tokens = [
        chosen
        for nodes in itertools.combinations(range(4), node_limit)
        for chosen in itertools.combinations([e for e in range(16) if e // 4 in nodes], 3)
    ]

    def mean(count) -> float:
        return sum(count(chosen) for chosen in tokens) / len(tokens)

    ranks = mean(lambda chosen: len({e // 2 for e in chosen}))
    nodes = mean(lambda chosen: len({e // 4 for e in chosen}))
    assert plan.copies.expected == pytest.approx(ranks)
    assert plan.nodes.expected == pytest.approx(nodes)
    crossings = {
        "network": mean(lambda chosen: len({e // 4 for e in chosen if e >= 4})),
        "network_without_dedup": mean(lambda chosen: len({e // 2 for e in chosen if e >= 4})),
        "network_once_an_expert": mean(lambda chosen: sum(e >= 4 for e in chosen)),
    }
    for name, times in crossings.items():
        expected = getattr(plan.dispatch, name).expected
        assert expected == pytest.approx(plan.shape.max_tokens * times * plan.dispatch.row_bytes)


def test_worst_traffic_by_construction() -> None:
    # 3 nodes of 2, 12 experts, top-3: rank 0 is local rank 0 of node 0, experts 2r and 2r+1 on r
    plan = small(num_ranks=6, ranks_per_node=2, num_experts=12, topk=3)
    rows, row = plan.shape.max_tokens, plan.dispatch.row_bytes
    sent = {
        "all to rank 1": rows * 3 * 1,  # own tokens and both rails', all wanted by the local peer
        "one expert a node": rows * 2,  # so each token crosses to both remote nodes
        "three remote ranks": rows * 3,
    }
    assert plan.dispatch.nvlink.worst_sent == sent["all to rank 1"] * row
    assert plan.dispatch.network.worst_sent == sent["one expert a node"] * row
    assert plan.dispatch.network_without_dedup.worst_sent == sent["three remote ranks"] * row
    assert plan.dispatch.network_once_an_expert.worst_sent == rows * 3 * row
    # everybody chooses rank 0: its peer serves the tokens of its own rail on all three nodes
    assert plan.dispatch.nvlink.worst_received == rows * 3 * row
    assert plan.dispatch.network.worst_received == rows * 2 * row
    assert plan.dispatch.network_without_dedup.worst_received == rows * 4 * row
    # both of its experts, by the tokens of the four remote ranks
    assert plan.dispatch.network_once_an_expert.worst_received == rows * 4 * 2 * row
    # one remote node of one expert is all that a token may choose there
    few = small(num_ranks=2, ranks_per_node=1, num_experts=2, topk=2)
    assert few.dispatch.network_once_an_expert.worst_sent == rows * few.dispatch.row_bytes


def test_combine_goes_the_other_way_in_two_bytes() -> None:
    plan = small(num_ranks=6, num_experts=12, dtype=torch.float8_e4m3fn, scale_bytes=4)
    assert plan.dispatch.row_bytes == 64 + 16 + 16
    assert plan.combine.row_bytes == 128
    out, home = plan.dispatch.nvlink, plan.combine.nvlink
    assert home.expected / 128 == pytest.approx(out.expected / 96)
    assert home.worst_sent / 128 == out.worst_received / 96
    assert home.worst_received / 128 == out.worst_sent / 96


def test_one_rank_moves_nothing() -> None:
    plan = small(num_ranks=1)
    assert plan.copies.expected == plan.copies.worst == 1
    assert plan.dispatch.nvlink.expected == plan.combine.nvlink.worst_received == 0


# ---- bounds


def test_bounds_of_the_measured_case() -> None:
    """Two ranks, 16 experts: 58.7 MB each way, 8 rows a token, published and read twice."""
    case = {**EP64, "num_ranks": 2, "num_experts": 16}
    plan = planned(**case, num_sms=48)
    us = {bound.limit: bound.us for bound in plan.dispatch.bounds}
    assert us["NVLink"] == pytest.approx(178, abs=1)
    assert us["SM output"] == pytest.approx(9.75 * 58.7e3 / (48 * 62), abs=1)
    assert us["memory"] == pytest.approx(12 * 58.7e3 / 4140, abs=1)
    assert plan.dispatch.dominant.limit == "SM output"
    us = {bound.limit: bound.us for bound in plan.combine.bounds}
    assert us["SM sums"] == pytest.approx(9 * 58.7e3 / (48 * 66), abs=1)
    assert planned(**case, num_sms=64).dispatch.dominant.limit == "NVLink"


def test_the_copy_engine_publishes_where_few_sms_dispatch() -> None:
    def sm_output(**case: int) -> float:
        plan = planned(**{**EP64, "num_ranks": 2, "num_experts": 16, **case})
        (us,) = (bound.us for bound in plan.dispatch.bounds if bound.limit == "SM output")
        return us * case["num_sms"] / plan.shape.max_tokens

    by_itself = sm_output(num_sms=33)
    assert sm_output(num_sms=16) == pytest.approx(by_itself * 8.5 / 9.75, rel=1e-3)
    assert sm_output(num_sms=17) == pytest.approx(by_itself * (8.5 + 1.25 / 8) / 9.75, rel=1e-3)
    assert sm_output(num_sms=32, max_tokens=2047) == pytest.approx(by_itself, rel=1e-3)
    assert sm_output(num_sms=32, max_tokens=2048) < 0.93 * by_itself


def test_network_dominates_between_nodes() -> None:
    plan = planned(**EP64, ranks_per_node=8)
    assert plan.dispatch.dominant.limit == plan.combine.dominant.limit == "network"
    limited = planned(**EP64, ranks_per_node=8, node_limit=4)
    assert limited.dispatch.dominant.us < plan.dispatch.dominant.us
    assert planned(**EP64, ranks_per_node=8, node_limit=8).nodes == plan.nodes


def test_balance_is_where_both_sides_take_as_long() -> None:
    plan = planned(**EP64, ranks_per_node=8)
    for name in ("dispatch", "combine"):
        gbs = getattr(plan, name).balance_gbs
        even = getattr(planned(**EP64, ranks_per_node=8, network_gbs=gbs), name)
        us = {bound.limit: bound.us for bound in even.bounds}
        assert us["network"] == pytest.approx(us["NVLink"])
        assert plan.as_dict()[name]["balance_gbs"] == gbs
    assert planned(**EP64).dispatch.balance_gbs is None
    assert small(ranks_per_node=1).dispatch.balance_gbs is None  # no NVLink in a node of one


def test_1024_ranks_are_instant() -> None:
    start = time.perf_counter()
    plan = planned(
        num_ranks=1024,
        ranks_per_node=8,
        max_tokens=8192,
        hidden=7168,
        num_experts=4096,
        topk=16,
    )
    assert time.perf_counter() - start < 1
    assert 15 < plan.copies.expected < 16
    assert plan.shape.num_nodes == 128


# ---- limits of the backends


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_ranks": 72, "num_experts": 72}, []),
        ({"num_ranks": 73, "num_experts": 73}, ["the number of ranks must be at most 72, got 73"]),
        ({"num_experts": 64, "topk": 33}, ["topk must be at most 32, got 33"]),
        ({"num_experts": 32768}, ["num_experts must be at most 32767, got 32768"]),
        (
            {"max_tokens": 2**27},
            ["ranks * max_tokens * topk must be at most 1073741823, got 10737"],
        ),
        ({"ranks_per_node": 2}, []),  # nvshmem
        (
            {"num_ranks": 1280, "ranks_per_node": 40, "num_experts": 1280},
            ["the number of ranks must be at most 1024", "ranks_per_node must be at most 32"],
        ),
    ],
)
def test_names_the_limits_that_a_shape_exceeds(changes: dict, says: list[str]) -> None:
    beyond = small(**changes).beyond
    assert len(beyond) == len(says)
    assert all(text.startswith(start) for text, start in zip(beyond, says, strict=True))


def test_limits_are_those_of_the_extension() -> None:
    extension = pytest.importorskip(
        "hybrid_ep._nvlink", reason="hybrid_ep._nvlink was not built: that takes nvcc"
    )
    assert (shapes.MAX_RANKS, shapes.MAX_TOPK) == (extension.MAX_RANKS, extension.MAX_TOPK)
    for case in itertools.product((1, 16, 17, 32, 33, 64), (1, 2047, 2048, 4096)):
        assert tokens_by_sms(*case) == extension.tokens_by_sms(*case), case


def test_rows_of_odd_bytes_are_beyond_nvlink() -> None:
    shape = Shape(num_ranks=2, num_experts=2, max_tokens=1, hidden=12, topk=1)
    rule = "rows must be a multiple of 16 bytes, got 24 (hidden=12, torch.bfloat16)"
    assert shape.beyond("nvlink") == [rule]


# ---- several nodes: what is under way is bounded by credits

TWO_NODES = {"num_ranks": 16, "ranks_per_node": 8, "hidden": 7168, "num_experts": 256, "topk": 8}


def network(channels: int, chunk_tokens: int, window_chunks: int) -> Config:
    return Config(
        network_channels=channels,
        network_chunk_tokens=chunk_tokens,
        network_window_chunks=window_chunks,
    )


@pytest.mark.parametrize("tokens", [1, 128, 4096, 21_845, 65_536, 1_000_000])
def test_Megatron_LM_3999_queue_depth_does_not_depend_on_the_tokens(tokens: int) -> None:
    """3 entries a token are more than a queue has from 21,845 tokens on."""
    window = planned(**TWO_NODES, max_tokens=tokens).window
    assert window == planned(**TWO_NODES, max_tokens=64).window
    assert window.queue_depth <= 1024, "more than NVSHMEM has by itself"


def test_Megatron_LM_3999_windows_counted_by_hand() -> None:
    shape = {**TWO_NODES, "num_ranks": 32, "max_tokens": 65_536}
    window = planned(**shape, config=network(4, 30, 10)).window
    assert window.queue_pairs == 3 * 4  # one rail peer on each of three other nodes
    assert window.entries == 2 * 10 * 30
    assert window.queue_depth == 1024
    assert planned(**TWO_NODES, max_tokens=1, config=network(8, 1, 1)).window == (
        Window(8, 1, 1, queue_pairs=8, entries=2, queue_depth=128)
    )


def test_memory_of_several_nodes_counted_by_hand() -> None:
    shape = {**TWO_NODES, "num_ranks": 32, "max_tokens": 4096}
    regions = planned(**shape, config=network(4, 16, 3)).regions
    tokens = 4 * (4 * 3) * 16  # of four nodes' windows
    # records of 14336 + 32 bytes begin a cache line each, sums with their values too
    assert regions["outbox"] == 2 * 4096 * 14464
    assert regions["relay_window"] == tokens * 14464
    pushed = (3 * 12 + 4 * 12) * 16  # three other nodes, four times one for mine
    assert regions["push_window"] == pushed * 8 * 14336
    assert regions["outgoing"] == regions["home_window"] == tokens * 14464
    assert regions["push_values"] == pushed * 8 * 4
    assert regions["pushed_flags"] == 4 * 4096 * 8 * 8  # nodes, tokens, ranks of a node
    assert "inbox" not in regions


def test_Megatron_LM_3999_one_node_has_no_queues() -> None:
    assert small().window is None
    assert small(config=network(8, 32, 10**9)).window is None


def test_Megatron_LM_3999_too_deep_a_queue_is_refused() -> None:
    """Before any memory is asked for, with the rule and the value."""
    planned(**TWO_NODES, max_tokens=65_536, config=network(8, 32, 512))  # just fits
    with pytest.raises(
        ValueError, match=r"at most 32768, .* got 32832 \(network_window_chunks=513"
    ):
        planned(**TWO_NODES, max_tokens=65_536, config=network(8, 32, 513))


@pytest.mark.parametrize("way", [[], ["--simulate"]], ids=["one_plan", "simulate"])
@pytest.mark.parametrize(
    ("option", "name", "value"),
    [
        ("--chunk", "network_chunk_tokens", 64),
        ("--chunk", "network_chunk_tokens", 0),
        ("--channels", "network_channels", 0),
        ("--window", "network_window_chunks", -1),
    ],
)
def test_plan_refuses_settings_that_config_refuses(
    way: list[str], option: str, name: str, value: int, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(ValueError) as refusal:
        Config(**{name: value})
    assert main(["plan", *(way or SIZES.split()), option, str(value)]) == 2
    typed = str(refusal.value).replace(f"Config.{name}", option)
    assert capsys.readouterr().err == f"hybrid-ep plan: {typed}\n"


def test_plan_without_settings_has_those_of_config() -> None:
    shape = {**TWO_NODES, "max_tokens": 128}
    assert planned(**shape) == planned(**shape, config=Config())
    defaults = planned(**shape).window
    settings = defaults.channels, defaults.chunk_tokens, defaults.window_chunks
    config = Config()
    assert settings == (
        config.network_channels,
        config.network_chunk_tokens,
        config.network_window_chunks,
    )


def test_Megatron_LM_3999_the_command_states_the_depth(capsys: pytest.CaptureFixture) -> None:
    assert run_command("--tokens", "65536") == 0
    text = capsys.readouterr().out
    assert re.search(r"queue depth +128 +for 64 entries; the tokens of a call do not matter", text)
    assert re.search(r"queue pairs +8 +8 to each rail peer", text)
    with pytest.raises(ValueError, match="deepest queue"):
        run_command("--tokens", "65536", "--window", "65536")
    assert run_command("--tokens", "65536", "--json", "--window", "32") == 0
    assert json.loads(capsys.readouterr().out)["window"]["queue_depth"] == 512


# ---- reports of memory that was not foreseen


def test_Megatron_Bridge_1731_memory_is_known_before_the_first_run() -> None:
    """DeepSeek-V3 on 64 ranks: a sixth of what the worst case of a push design takes."""
    plan = planned(**EP64)
    assert plan.symmetric_bytes < plan.push_bytes / 6
    assert set(plan.regions) == {
        "outbox",
        "routing_inbox",
        "inbox",
        "value_inbox",
        "flags",
        "calls",
        "sum_flags",
    }
    # one outbox serves dispatch, one inbox combine, forward and backward alike
    half = planned(**{**EP64, "max_tokens": 2048})
    assert half.symmetric_bytes == pytest.approx(plan.symmetric_bytes / 2, rel=0.001)


def test_TransformerEngine_3035_what_travels_is_counted_by_rank_and_not_by_expert() -> None:
    """Memory and traffic are those of copies: more experts on a rank cost neither."""
    few, many = planned(**EP64), planned(**{**EP64, "num_experts": 4096})
    for region in ("outbox", "inbox", "value_inbox", "flags"):
        assert few.regions[region] == many.regions[region]
    # all eight experts of a token on one rank: eight rows there, one copy on the way
    one_rank = planned(**{**EP64, "num_ranks": 2, "num_experts": 16})
    assert one_rank.rows.worst == 2 * 4096 * 8
    assert one_rank.copies.worst == 2
    assert one_rank.dispatch.nvlink.worst_sent == 4096 * one_rank.dispatch.row_bytes


def test_DeepEP_716_routing_travels_as_topk_and_not_as_a_map() -> None:
    """A map of all tokens by experts is 16 MiB here, top-k with the counts of tiles 1."""
    shape = {"num_ranks": 8, "max_tokens": 8192, "hidden": 7168, "topk": 8}
    routing = planned(**shape, num_experts=256).regions["routing_inbox"] / 2  # of one call
    assert routing < 8192 * 8 * 256 / 10
    # sixteen times the experts: the choices take what they took, the counts grow
    more = planned(**shape, num_experts=4096).regions["routing_inbox"] / 2
    assert more - routing == 8 * (8192 // 128) * (4096 - 256) // 8 * 2


def test_uccl_924_max_tokens_is_the_knob() -> None:
    """The formula of docs/design.md, on 16 ranks: all but the flags is proportional to T."""
    shape = {"num_ranks": 16, "hidden": 7168, "num_experts": 256, "topk": 8}
    for tokens in (1024, 8192):
        regions = planned(**shape, max_tokens=tokens).regions
        assert regions["outbox"] == 2 * tokens * (14336 + 128)
        assert regions["inbox"] == tokens * 8 * 14336
        assert regions["value_inbox"] == tokens * 8 * 4
        tile_counts = round_up(tokens // 128 * 17 * 2, 128)
        assert regions["routing_inbox"] == 2 * 16 * (tokens * 8 * 2 + tile_counts)
    assert planned(**shape, max_tokens=512).symmetric_bytes < 80e6


# ---- bad input and the command line


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts": 10}, r"num_experts must be divisible .* num_experts=10 with 4 ranks"),
        ({"ranks_per_node": 3}, r"ranks_per_node must divide .* ranks_per_node=3 with 4 ranks"),
        ({"ranks_per_node": 8}, r"ranks_per_node must divide"),
        ({"topk": 9}, r"topk must be at most num_experts=8, got 9"),
        ({"ranks_per_node": 1, "node_limit": 1, "topk": 3}, r"node_limit=1 nodes, 2, got 3"),
        ({"node_limit": 0}, r"node_limit must be an integer of at least 1, got 0"),
        ({"num_ranks": 0}, r"num_ranks must be an integer of at least 1, got 0"),
        ({"max_tokens": -1}, r"max_tokens .* got -1"),
        ({"hidden": 1.5}, r"hidden .* got 1.5"),
        ({"hidden": True}, r"hidden .* got True"),
        ({"hidden": 20, "dtype": torch.float8_e4m3fn}, r"16 bytes, got 20 \(hidden=20, torch.fl"),
        ({"scale_bytes": -4}, r"scale_bytes .* got -4"),
        ({"align": 0}, r"align .* got 0"),
        ({"num_sms": 0}, r"num_sms .* got 0"),
        ({"nvlink_gbs": 0.0}, r"nvlink_gbs must be positive, got 0.0"),
        ({"network_gbs": float("nan")}, r"network_gbs must be positive, got nan"),
    ],
)
def test_bad_input_names_rule_and_value(changes: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        small(**changes)


def run_options(*words: str) -> int:
    return command.run(make_parser().parse_args(["plan", *words]))


def run_command(*words: str) -> int:
    return run_options(*SIZES.split(), *words)


def test_command_prints_tables(capsys: pytest.CaptureFixture) -> None:
    assert run_command() == 0
    text = capsys.readouterr().out
    assert "16 ranks in 2 nodes of 8" in text
    assert "MB, GB = 1e3, 1e6, 1e9 bytes" in text
    assert "network, once per node" in text
    assert "<- dominates" in text


def test_command_prints_json_alone(capsys: pytest.CaptureFixture) -> None:
    assert run_command("--json", "--dtype", "fp8", "--node-limit", "1") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_nodes"] == 2
    assert plan["symmetric_bytes"] == sum(plan["regions"].values())
    assert plan["dispatch"]["dominant"] in {b["limit"] for b in plan["dispatch"]["bounds"]}


@pytest.mark.parametrize(
    ("words", "scale_bytes"),
    [(("--dtype", "fp8"), 4), (("--dtype", "fp8", "--scale-bytes", "0"), 0), ((), 0)],
)
def test_fp8_scales_are_counted_alike_by_plan_and_bench(
    capsys: pytest.CaptureFixture, words: tuple[str, ...], scale_bytes: int
) -> None:
    assert run_command("--json", "--hidden", "128", *words) == 0
    assert json.loads(capsys.readouterr().out)["scale_bytes"] == scale_bytes
    for hidden in (16, 128, 144, 7168):
        fp8 = options.Options(hidden=(hidden,), experts=(2,), topk=(1,), dtypes=("fp8",))
        (load,) = fp8.loads(num_ranks=1)
        assert load.scale_bytes == shapes.default_scale_bytes(torch.float8_e4m3fn, hidden)


def test_command_says_what_nvlink_cannot_run(capsys: pytest.CaptureFixture) -> None:
    one_node = ("--ranks-per-node", "16")
    assert run_command(*one_node) == 0
    assert "The nvlink backend cannot" not in capsys.readouterr().out
    assert run_command(*one_node, "--topk", "40") == 0
    line = "The nvlink backend cannot run this: topk must be at most 32, got 40.\n"
    assert line in capsys.readouterr().out
    assert run_command(*one_node, "--topk", "40", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["beyond"] == ["topk must be at most 32, got 40"]


def test_command_writes_json(tmp_path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "plan.json"
    assert run_command("--json", str(path)) == 0
    assert json.loads(path.read_text())["copies"]["worst"] == 8
    assert "memory" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--json must name a file that can be written"):
        run_command("--json", str(tmp_path))


def test_command_refuses_what_the_plan_refuses() -> None:
    with pytest.raises(ValueError, match="topk must be at most"):
        run_command("--topk", "65")
    with pytest.raises(SystemExit) as left:
        run_command("--dtype", "int3")
    assert left.value.code == 2


@pytest.mark.parametrize(("nodes", "status"), [(1, None), (2, UNCONFIRMED)])
def test_a_plan_of_several_nodes_says_that_it_is_a_model(
    nodes: int, status: str | None, capsys: pytest.CaptureFixture
) -> None:
    per_node = ("--ranks-per-node", str(16 // nodes))
    assert run_command(*per_node) == 0
    text = capsys.readouterr().out
    assert (UNCONFIRMED in text) == (status is not None)
    titles = re.findall(r"^.*(?:traffic of a call|floors of its time)", text, re.MULTILINE)
    assert [title.startswith("model: ") for title in titles] == 4 * [status is not None]
    assert run_command(*per_node, "--json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == status


# ---- tables of several nodes


def test_scaling_prints_a_table_for_each_dtype_and_routing(capsys: pytest.CaptureFixture) -> None:
    assert run_options("--scaling") == 0
    text = capsys.readouterr().out
    for dtype in ("bf16, 14,368 bytes", "fp8, 7,424 bytes"):
        for routing in ("uniform", "at most 4 nodes"):
            assert f"model: {dtype} per row, {routing}\n" in text
    assert len(re.findall(r"^  1,024 +1,024 ", text, re.MULTILINE)) == 4
    assert text.count("The network is the longer side from 16 ranks on.") == 4
    assert UNCONFIRMED in text


def test_simulate_prints_times_overlap_and_credits(capsys: pytest.CaptureFixture) -> None:
    assert run_options("--simulate") == 0
    text = capsys.readouterr().out
    rows = re.findall(r"^  (bf16|fp8) +(uniform|at most 4 nodes) +(\d) ", text, re.MULTILINE)
    assert rows == [
        (dtype, routing, nodes)
        for dtype in ("bf16", "fp8")
        for routing, nodes in [*(("uniform", n) for n in "248"), ("at most 4 nodes", "8")]
    ]
    assert "chunks of 8 tokens, 32 credits" in text
    assert UNCONFIRMED in text


def test_tables_as_json_say_that_they_are_a_model(capsys: pytest.CaptureFixture) -> None:
    assert run_options("--scaling", "--simulate", "--json", "--network-latency-us", "20") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == UNCONFIRMED
    assert len(report["scaling"]) == 4 * 8
    assert report["simulation"]["network_latency_us"] == 20
    assert {row["num_nodes"] for row in report["simulation"]["rows"]} == {2, 4, 8}
    assert all(0 < r["outcome"]["overlap"] <= 1 for r in report["simulation"]["rows"])


def test_tables_take_the_sizes_that_are_given(capsys: pytest.CaptureFixture, tmp_path) -> None:
    sizes = "--ranks-per-node 4 --tokens 100 --hidden 64 --experts 24 --topk 2 --dtype fp8"
    path = tmp_path / "scaling.json"
    words = ("--scaling", *sizes.split(), "--node-limit", "1", "--json", str(path))
    assert run_options(*words) == 0
    rows = json.loads(path.read_text())["scaling"]
    assert [row["num_ranks"] for row in rows] == 2 * [4, 8, 16, 32, 64, 128, 256, 512]
    assert [row["num_experts"] for row in rows][:4] == [24, 24, 32, 32]
    assert {row["node_limit"] for row in rows} == {None, 1}
    assert {row["dtype"] for row in rows} == {"fp8"}
    assert "fp8, 96 bytes per row" in capsys.readouterr().out


def test_tables_have_numbers_of_nodes_of_their_own() -> None:
    with pytest.raises(ValueError, match=r"--ranks must be left out .* got 64"):
        run_options("--scaling", "--ranks", "64")
    with pytest.raises(ValueError, match="missing: --ranks, --hidden, --topk"):
        run_options("--tokens", "1", "--experts", "8")
    with pytest.raises(ValueError, match="ranks_per_node must be an integer of at least 1, got 0"):
        run_options("--scaling", "--ranks-per-node", "0")


def test_the_simulation_sweeps_sizes_that_config_takes() -> None:
    for tokens in scaling_tables.CHUNK_SWEEP:
        assert Config(network_chunk_tokens=tokens).network_chunk_tokens == tokens
