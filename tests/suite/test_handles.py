"""Handles side by side, in any order and again; several Buffers and groups; nothing is kept."""

from dataclasses import replace

import pytest
import torch

from tests import oracle
from tests.cases import Case, named, params
from tests.checks import same_bytes, same_results
from tests.ranks import handles

LAYERS = [
    Case("exact", num_ranks=4, tokens=(20, 0, 7), topk=4),
    Case("bounded", num_ranks=4, tokens=(8, 20), topk=4, max_rows="third", align=4, seed=1),
    Case("duplicates", num_ranks=4, tokens=(20, 11), topk=4, routing="duplicates", seed=2),
]
STRIDED = Case("strided", topk=3, num_scales=3, tokens=(9, 6))
IN_TURN = "D0 C0 B0 D1 C1 B1 D2 C2 B2"
ORDERS = {
    "forwards_then_backwards": "D0 C0 D1 C1 D2 C2 B2 B1 B0",
    "dispatches_then_combines": "D0 D1 D2 C0 C1 C2 B0 B1 B2",
    "prime-rl#3411_combines_crossed": "D0 D1 C1 D2 C0 C2 B1 B2 B0",
    "one_forward_one_backward": "D0 C0 D1 C1 B0 D2 C2 B1 B2",
    "backward_between_dispatch_and_combine": "D0 C0 D1 B0 C1 D2 B1 C2 B2",
    "Automodel#3156_replayed": "D0 D1 R0 C0 D2 C2 R1 R1 B0 C1 B1 B2",
    "combined_again": "D0 C0 D1 C1 C0 C1 D2 C2 B2 B0 B1",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_order_does_not_matter(world, order):
    pool = world(4)
    in_turn = pool.run(handles.interleave, LAYERS, IN_TURN)
    for rank, results in enumerate(pool.run(handles.interleave, LAYERS, order)):
        for layer, (got, want) in enumerate(zip(results, in_turn[rank], strict=True)):
            same_results(got, want, f"layer {layer} on rank {rank}")


@params(
    named(
        "plain",
        "one_rank_without_tokens",
        "torchtitan#2207_third_duplicates",
        "odd_fp32_scales",
        "2_nodes_of_2_holes",
        "world_of_1",
    )
)
def test_replay_of_a_layout(world, case):
    pool = world(case.num_ranks)
    case = pool.target.divided(case)
    results = pool.run(handles.replay, case, oracle.max_rows(case))
    newer = replace(case, seed=case.seed + 2).all_inputs()
    mixed = [
        replace(new, topk_idx=old.topk_idx)
        for new, old in zip(newer, case.all_inputs(), strict=True)
    ]
    expected = oracle.dispatch(case, mixed)
    rows = [case.values(r, "rows", len(want.sources)) for r, want in enumerate(expected)]
    y = oracle.combine(case, expected, rows)
    for rank, (got, want) in enumerate(zip(results, expected, strict=True)):
        assert got["overflow"] == want.overflow
        same_bytes(got["rows"], want.rows, f"rows of rank {rank}")
        same_bytes(got["weights"], want.weights, f"weights of rank {rank}")
        if want.scales is not None:
            same_bytes(got["scales"], want.scales, f"scales of rank {rank}")
        same_bytes(got["y"], y[rank], f"y of rank {rank}")
        same_bytes(got["y of the first"], y[rank], f"y of the first handle on rank {rank}")


def test_no_rank_runs_ahead_of_one_it_gets_nothing_from(world):
    tokens, calls = 40, 6
    ahead, late = world(2).run(handles.one_way_replays, tokens, calls)
    for call in range(calls):
        x = torch.arange(tokens * 64).reshape(tokens, 64).bfloat16() + call
        same_bytes(late[call], x, f"call {call}")
        assert ahead[call].shape == (0, 64)


@pytest.mark.not_on("nodes", why="a process takes part in one NVSHMEM job: tests/gpu/test_nodes.py")
def test_groups_beside_the_world(world):
    pair = Case("pair", num_ranks=2)
    everybody = Case("everybody", num_ranks=4, hidden=64, experts_per_rank=2, topk=3, seed=1)
    results = world(4).run(handles.subgroups, pair, everybody)
    expected = {2: oracle.dispatch(pair), 4: oracle.dispatch(everybody)}

    def y(case):
        wants = expected[case.num_ranks]
        rows = [case.values(rank, "rows", len(want.sources)) for rank, want in enumerate(wants)]
        return oracle.combine(case, wants, rows)

    y_of_pair, y_of_world = y(pair), y(everybody)
    for rank, got in enumerate(results):
        same_bytes(got["pair"], expected[2][rank % 2].rows, f"pair on rank {rank}")
        same_bytes(got["pair again"], expected[2][rank % 2].rows, f"pair again on rank {rank}")
        same_bytes(got["world"], expected[4][rank].rows, f"world on rank {rank}")
        same_bytes(got["pair y"], y_of_pair[rank % 2], f"y of the pair on rank {rank}")
        same_bytes(got["world y"], y_of_world[rank], f"y of the world on rank {rank}")


def test_uccl_878_many_buffers(world):
    case = Case("many buffers", num_ranks=4)
    expected = oracle.dispatch(case)
    for rank, results in enumerate(world(4).run(handles.many_buffers, case, 6)):
        for rows in results:
            same_bytes(rows, expected[rank].rows, f"rows of rank {rank}")


def test_NeMo_RL_2964_collectives_of_others_on_the_group(world):
    case = Case("beside collectives", num_ranks=3)
    expected = oracle.dispatch(case)
    for rank, rows in enumerate(world(3).run(handles.beside_collectives, case)):
        same_bytes(rows, expected[rank].rows, f"rows of rank {rank}")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_torchtitan_2273_memory_does_not_grow(world, num_ranks):
    case = Case("memory", num_ranks=num_ranks)
    for live in world(num_ranks).run(handles.train_and_evaluate, case, 20):
        assert live[-4:] == live[4:8]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_strides_do_not_matter(world, num_ranks):
    names = ("gaps", "transposed", "offset", "expanded")
    results = world(num_ranks).run(handles.strided, STRIDED.on(num_ranks))
    for rank, (plain, *others) in enumerate(results):
        for name, results in zip(names, others, strict=True):
            for tensor in plain:
                what = f"{tensor}, {name}, rank {rank}"
                assert torch.equal(results[tensor], plain[tensor]), what
