"""A planted fault fails the property of the check that it breaks. All well: tests/suite."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybrid_ep import check
from hybrid_ep.backends.torch import backend as torch_backend
from hybrid_ep.backends.torch.backend import TorchBackend
from hybrid_ep.backends.torch.fresh import Fresh
from hybrid_ep.check.world import World
from hybrid_ep.errors import PeerError
from tests.launch import Pool, Rank

PEERS, ORDER, COUNTS, WEIGHTS, FP8, LARGE, RAGGED, HOLES, ALIGN, MAX_ROWS, *_ = range(19)
*_, COMBINE, WEIGHTED, FP32, BOUND, _, _, HANDLES, REPLAY, REPEATABLE = range(19)
DISPATCH_GRADIENT, COMBINE_GRADIENT = BOUND + 1, BOUND + 2
FAULTY = 1  # the rank


def run_check(me: Rank, fault: str | None = None, **arguments: Any) -> tuple[list[int], list[str]]:
    """Places of the properties that failed, and the lines that were reported."""
    lines: list[str] = []
    planted = PLANT[fault]() if fault and me.rank == FAULTY else contextlib.nullcontext()
    with planted:
        result = check.run(backend="torch", device="cpu", report=lines.append, **arguments)
    failed = [place for place, each in enumerate(result.properties) if each.failures]
    assert result.ok == (not failed)
    assert (me.rank == 0) == bool(lines)
    return failed, lines


# ---- faults


Planted = contextlib.AbstractContextManager


def after_dispatch(change: Callable[[Tensor, Tensor | None], None]) -> Planted:
    honest = TorchBackend._dispatch

    def dispatch(self: TorchBackend, *args: Any, **kwargs: Any) -> Any:
        moved = honest(self, *args, **kwargs)
        if moved[0].dtype == torch.bfloat16 and len(moved[0]) > 8:
            change(moved[0], moved[1])
        return moved

    return mock.patch.object(TorchBackend, "_dispatch", dispatch)


def flip_a_bit(rows: Tensor, weights: Tensor | None) -> None:
    rows.view(torch.int16)[3, 5] ^= 1


def drop_a_row(rows: Tensor, weights: Tensor | None) -> None:
    rows[3] = 0


def swap_two_rows(rows: Tensor, weights: Tensor | None) -> None:
    rows[[2, 3]] = rows[[3, 2]]


def swap_two_weights(rows: Tensor, weights: Tensor | None) -> None:
    if weights is not None:
        weights[[2, 3]] = weights[[3, 2]]


def wrong_sum() -> Planted:
    honest = TorchBackend.combine

    def combine(self: TorchBackend, *args: Any, **kwargs: Any) -> Any:
        y, values = honest(self, *args, **kwargs)
        if len(y):
            y[-1] *= 1.5
        return y, values

    return mock.patch.object(TorchBackend, "combine", combine)


def sum_backwards() -> Planted:
    honest = torch_backend.sum_in_order

    def backwards(
        rows: Tensor, index: Tensor, num_terms: list[int], weights: Tensor | None = None
    ) -> Tensor:
        weights = None if weights is None else weights.flip(0)
        index = torch.where(index < 0, -1, len(rows) - 1 - index)
        return honest(rows.flip(0), index, num_terms, weights)

    return mock.patch.object(torch_backend, "sum_in_order", backwards)


def count_one_row_more() -> Planted:
    honest = Fresh.made

    def made(self: Fresh, *args: Any, **kwargs: Any) -> Any:
        route = honest(self, *args, **kwargs)
        route.sizes[-2 - 2 * len(route.counts)] += 1
        return route

    return mock.patch.object(Fresh, "made", made)


def overwrite_the_rows_before() -> Planted:
    before: list[Tensor] = []

    def change(rows: Tensor, weights: Tensor | None) -> None:
        for old in before:
            old.detach().zero_()
        before[:] = [rows]

    return after_dispatch(change)


def change_now_and_then() -> Planted:
    calls = 0

    def change(rows: Tensor, weights: Tensor | None) -> None:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            rows[0] = 1

    return after_dispatch(change)


PLANT: dict[str, Callable[[], Planted]] = {
    "flip a bit": functools.partial(after_dispatch, flip_a_bit),
    "drop a row": functools.partial(after_dispatch, drop_a_row),
    "swap two rows": functools.partial(after_dispatch, swap_two_rows),
    "swap two weights": functools.partial(after_dispatch, swap_two_weights),
    "wrong sum": wrong_sum,
    "sum backwards": sum_backwards,
    "count one row more": count_one_row_more,
    "overwrite the rows before": overwrite_the_rows_before,
    "change now and then": change_now_and_then,
}


# ---- tests


def test_nodes(world: Callable[[int], Pool]) -> None:
    results = world(4).run(functools.partial(run_check, ranks_per_node=2))
    assert [failed for failed, _ in results] == [[]] * 4


@pytest.mark.parametrize(
    ("fault", "must_fail", "must_hold", "said"),
    [
        ("flip a bit", {PEERS, ORDER}, {COUNTS, WEIGHTS, COMBINE}, "no token of any rank"),
        ("drop a row", {PEERS, ORDER}, {COUNTS, WEIGHTS, COMBINE}, "and holds zeros"),
        ("swap two rows", {ORDER}, {PEERS, COUNTS, WEIGHTS, COMBINE}, "row 2 should be token"),
        ("swap two weights", {WEIGHTS}, {PEERS, ORDER, COUNTS, WEIGHTED}, "weights: 2 of"),
        (
            "wrong sum",
            {COMBINE, WEIGHTED, BOUND, DISPATCH_GRADIENT},
            {PEERS, ORDER},
            "sums: 128 of",
        ),
        ("sum backwards", {COMBINE, FP32, DISPATCH_GRADIENT}, {PEERS, ORDER, BOUND}, "sums: "),
        ("count one row more", {COUNTS, MAX_ROWS}, {PEERS, ORDER, COMBINE}, "required_rows are"),
        ("overwrite the rows before", {HANDLES}, {PEERS, ORDER, REPLAY, COMBINE}, "zeros"),
        ("change now and then", {REPEATABLE}, {COUNTS, WEIGHTS, COMBINE}, "of call 2"),
    ],
)
def test_fault(
    world: Callable[[int], Pool], fault: str, must_fail: set[int], must_hold: set[int], said: str
) -> None:
    results = world(2).run(run_check, fault)
    failed, lines = results[0]
    assert results[1][0] == failed, "all ranks agree"
    assert must_fail <= set(failed)
    assert not must_hold & set(failed)
    told = [line for line in lines if line.startswith("FAIL")]
    assert len(told) == len(failed)
    # sums that went wrong at the experts' rank are seen at home
    seen_at = range(2) if fault == "sum backwards" else [FAULTY]
    assert all(any(f"rank {rank}: " in line for rank in seen_at) for line in told)
    assert any(said in line for line in told), told
    assert lines[-1] == f"check: {len(check.PROPERTIES) - len(failed)} passed, {len(failed)} failed"


def test_names_the_peer(world: Callable[[int], Pool]) -> None:
    lines = world(2).run(run_check, "drop a row")[0][1]
    line = next(line for line in lines if line.startswith("FAIL  Every peer"))
    assert "rank 1: did not get 1 of " in line
    assert "rows from rank 0 (" in line


def raise_once(me: Rank) -> tuple[list[str], int]:
    honest, calls = TorchBackend._dispatch, 0

    def dispatch(self: TorchBackend, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        moved = honest(self, *args, **kwargs)
        if calls == 1 and me.rank == FAULTY:
            raise OSError("planted")
        return moved

    with mock.patch.object(TorchBackend, "_dispatch", dispatch):
        result = check.run(backend="torch", device="cpu", report=lambda line: None)
    return [str(each) for each in result.failed], len(result.properties)


def test_an_exception_fails_one_property(world: Callable[[int], Pool]) -> None:
    for failed, num_properties in world(2).run(raise_once):
        assert num_properties == len(check.PROPERTIES)
        assert len(failed) == 1
        assert "rank 1: OSError: planted (test_check.py:" in failed[0]


def test_a_fault_that_a_kernel_left_is_told_by_its_own_property(alone: Rank) -> None:
    """On GPUs a call whose wait was in vain returns, and ``Buffer.check`` knows why."""
    world = World(None, backend="torch", device="cpu", ranks_per_node=None, timeout_s=1)
    fault = PeerError(rank=0, peer=1, phase="combine", call=4, channel=2, reason="no signal")

    def leaves_a_fault(world: World) -> str:
        """Sums arrive."""
        world.buffer()
        return "sums: 3 values are wrong"

    with mock.patch.object(TorchBackend, "check", side_effect=fault):
        told = str(world.agree(leaves_a_fault))
    assert told.startswith("FAIL  Sums arrive: rank 0: PeerError: rank 0 waited for rank 1")
    assert str(world.agree(lambda world: None)).startswith("ok"), "the next has a Buffer of its own"
    world.close()


def stop_before_the_call(me: Rank) -> str:
    """One rank leaves before it talks: the other waits for it, within the deadline."""

    def dispatch(self: TorchBackend, *args: Any, **kwargs: Any) -> Any:
        raise OSError("planted")

    planted = mock.patch.object(TorchBackend, "_dispatch", dispatch)
    with (
        planted if me.rank == FAULTY else contextlib.nullcontext(),
        mock.patch.object(check, "TIMEOUT_S", 1.0),
    ):
        try:
            result = check.run(backend="torch", device="cpu", report=lambda line: None)
        except RuntimeError as error:
            return str(error)
    return str(result)


def test_a_rank_that_stays_away(fresh_world: Callable[[int], Pool]) -> None:
    told = fresh_world(2).run(stop_before_the_call, deadline_s=60)
    assert all("0 failed" not in text for text in told)
    assert any("no longer answers after" in text or " failed" in text for text in told), told
