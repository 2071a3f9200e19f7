"""The properties, in the order in which they are checked.

Each is called by all ranks and returns what is wrong here, or None. The first line of its docstring
is what the user reads. A property makes its Buffer, by its first trial, before anything that may
fail on one rank alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.buffer import combine, dispatch
from hybrid_ep.check.case import TOKENS, TOPK, Case, bits, key_of, numbers
from hybrid_ep.check.expected_rows import expected_rows
from hybrid_ep.check.trial import Trial, beyond_bound, first_of, wrong_values
from hybrid_ep.check.world import World

LARGE_TOKENS, LARGE_HIDDEN = 256, 2048


def _trial(world: World, **settings: Any) -> Trial:
    return Trial(world, Case(world.num_ranks, **settings))


# ---- dispatch


def _peers(world: World) -> str | None:
    """Every peer's tokens arrive."""
    trial, places = _trial(world, seed=1), world.places
    rows = Counter(map(tuple, trial.dispatch().rows.cpu().view(torch.int16).tolist()))
    missing = []
    for source in range(world.num_ranks):
        token = trial.want.token[trial.want.source == source]
        payload = trial.case.rows_of(torch.full_like(token, source), token)
        sent = Counter(map(tuple, payload.tolist()))
        lost = (sent - rows).total()
        if lost:
            missing.append(
                f"{lost} of {sent.total()} rows from rank {source} "
                f"({places[source]} to {places[world.rank]})"
            )
    return "did not get " + ", ".join(missing) if missing else None


def _order(world: World) -> str | None:
    """Rows are grouped by expert, then by source rank, then by token."""
    trial = _trial(world, seed=2)
    return trial.wrong_rows(trial.dispatch().rows)


def _counts(world: World) -> str | None:
    """Counts and offsets say where each expert's rows are."""
    trial = _trial(world, seed=3)
    return trial.wrong_counts(trial.dispatch())


def _weights(world: World) -> str | None:
    """Weights arrive with their rows."""
    trial = _trial(world, seed=4)
    return trial.wrong_weights(trial.dispatch().weights)


def _fp8(world: World) -> str | None:
    """fp8 rows arrive with their scales, to the last bit."""
    trial = _trial(world, seed=5)

    def rows_and_scales(source: Tensor | int, token: Tensor) -> tuple[Tensor, Tensor]:
        key = key_of(source, token)
        rows = bits(key, trial.case.hidden // 2, 51).view(torch.float8_e4m3fn)
        return rows, bits(key, 8, 52).view(torch.float32)  # four scales per token

    x, scales = rows_and_scales(world.rank, torch.arange(trial.num_tokens))
    out = dispatch(
        trial.buffer, trial.here(x), trial.here(trial.topk_idx), scales=trial.here(scales)
    )
    rows, row_scales = rows_and_scales(trial.want.source, trial.want.token)
    return first_of(
        wrong_values(out.rows, rows, "rows"), wrong_values(out.scales, row_scales, "scales")
    )


def _large(world: World) -> str | None:
    """Large rows arrive: 4 KB each, many to a rank."""
    tokens = (LARGE_TOKENS,) * world.num_ranks
    trial = _trial(world, seed=6, tokens=tokens, hidden=LARGE_HIDDEN)
    return trial.wrong_rows(trial.dispatch().rows)


def _ragged(world: World) -> str | None:
    """Ranks may have different numbers of tokens, or none."""
    sizes, seen = (17, 0, TOKENS, 1), []
    for seed, tokens in (
        (7, tuple(sizes[r % 4] for r in range(world.num_ranks))),
        (8, tuple(sizes[(r + 1) % 4] for r in range(world.num_ranks))),
        (9, (0,) * world.num_ranks),
    ):
        wrong = _wrong_round_trip(_trial(world, seed=seed, tokens=tokens))
        seen.append(wrong and f"with T {list(tokens)}: {wrong}")
    return first_of(*seen)


def _holes(world: World) -> str | None:
    """Slots may be empty (-1) or repeat an expert, whose weights then add."""
    return _wrong_round_trip(_trial(world, seed=10, holes=True))


def _align(world: World) -> str | None:
    """Groups are padded to the alignment with zero rows of zero weight."""
    trial = _trial(world, seed=11, align=32)
    trial.dirty(len(trial.want))
    return _wrong_round_trip(trial)


def _wrong_round_trip(trial: Trial) -> str | None:
    out = trial.dispatch()
    y = trial.combine(out.handle, weighted=True)
    return first_of(
        trial.wrong_counts(out),
        trial.wrong_rows(out.rows),
        trial.wrong_weights(out.weights),
        trial.wrong_sums(y, weighted=True),
    )


def _max_rows(world: World) -> str | None:
    """With max_rows, rows beyond it are dropped and the overflow flag is exact."""
    whole = Case(world.num_ranks, seed=12, holes=True, align=8)
    required = [expected_rows(whole, rank).required for rank in range(world.num_ranks)]
    seen = []
    # all drop; all but the least drop; the busiest just fits; there is room to spare
    for bound in (8 * (min(required) // 16), min(required), max(required), max(required) + 16):
        trial = Trial(world, replace(whole, max_rows=bound))
        trial.dirty(bound)
        out = trial.dispatch()
        y = trial.combine(out.handle)
        overflow, needed = bool(out.handle.overflow), required[world.rank]
        wrong = first_of(
            None
            if overflow == (needed > bound)
            else f"overflow is {overflow} where {needed} rows were needed",
            trial.wrong_counts(out),
            trial.wrong_rows(out.rows),
            trial.wrong_weights(out.weights),
            trial.wrong_sums(y),
        )
        seen.append(wrong and f"with max_rows {bound}: {wrong}")
    return first_of(*seen)


# ---- combine


def _combine(world: World) -> str | None:
    """Combine adds in the stated order: equal to the last bit."""
    trial = _trial(world, seed=13)
    return trial.wrong_sums(trial.combine(trial.dispatch().handle))


def _combine_weighted(world: World) -> str | None:
    """A weighted combine does too."""
    trial = _trial(world, seed=14)
    y = trial.combine(trial.dispatch().handle, weighted=True)
    return trial.wrong_sums(y, weighted=True)


def _combine_fp32(world: World) -> str | None:
    """Combine of fp32 rows does too, where every rounding shows."""
    trial = _trial(world, seed=25, holes=True, dtype=torch.float32)
    y = trial.combine(trial.dispatch().handle, weighted=True)
    return trial.wrong_sums(y, weighted=True)


def _combine_bound(world: World) -> str | None:
    """Combine errs no more than its roundings allow, against fp64."""
    trial = _trial(world, seed=15)
    y = trial.combine(trial.dispatch().handle, weighted=True)
    _, exact, bound = trial.sums(weighted=True)
    return beyond_bound(y, exact, bound, "sums")


# ---- gradients


def _dispatch_gradient(world: World) -> str | None:
    """The gradient of dispatch is the ordered sum of its rows' gradients."""
    trial = _trial(world, seed=16, holes=True, align=4)
    case, me, want = trial.case, world.rank, trial.want
    x = trial.here(numbers(torch.arange(trial.num_tokens), case.hidden, 161)).requires_grad_()
    topk_weights = trial.here(case.weights[me]).requires_grad_()
    out = dispatch(trial.buffer, x, trial.here(trial.topk_idx), topk_weights, align=case.align)

    def weight_gradient(source: Tensor, token: Tensor, expert: Tensor) -> Tensor:
        return numbers(key_of(source, token, expert), 1, 162, torch.float32).squeeze(1)

    num_rows = len(out.rows)
    grad_weights = weight_gradient(want.source, want.token, want.expert)
    got_x, got_weights = torch.autograd.grad(
        (out.rows, out.weights),
        (x, topk_weights),
        (trial.outputs(num_rows), trial.here(grad_weights, num_rows)),
    )
    token, slot = (trial.topk_idx >= 0).nonzero(as_tuple=True)
    by_slot = torch.zeros(trial.num_tokens, TOPK)
    expert = trial.topk_idx[token, slot]
    by_slot[token, slot] = weight_gradient(torch.full_like(token, me), token, expert)
    return first_of(
        wrong_values(got_x, trial.sums(weighted=False).ordered, "gradient of x"),
        wrong_values(got_weights, by_slot, "gradient of weights"),
    )


def _combine_gradient(world: World) -> str | None:
    """The gradient of combine is dispatched to the rows and their weights."""
    trial = _trial(world, seed=17, holes=True)
    hidden, want = trial.case.hidden, trial.want
    handle = trial.dispatch().handle
    rows = trial.outputs(handle.num_rows).requires_grad_()
    weights = trial.here(trial.row_weights, handle.num_rows).requires_grad_()
    y = combine(trial.buffer, rows, handle, weights=weights)
    grad_y = numbers(key_of(world.rank, torch.arange(trial.num_tokens)), hidden, 171)
    got_rows, got_weights = torch.autograd.grad(y, (rows, weights), trial.here(grad_y))
    if len(rows) != len(want):
        return f"{len(rows)} rows, not {len(want)}"
    arrived = numbers(key_of(want.source, want.token), hidden, 171)
    weighted = (arrived * trial.row_weights.unsqueeze(1)).to(arrived.dtype)
    products = rows.detach().cpu().double() * arrived.double()
    bound = products.abs().sum(dim=1) * hidden * 2.0**-24
    return first_of(
        wrong_values(got_rows, weighted, "gradient of rows"),
        beyond_bound(got_weights, products.sum(dim=1), bound, "gradient of weights"),
    )


# ---- handles


def _handles(world: World) -> str | None:
    """Handles live side by side and may be combined in any order."""
    trials = [
        _trial(world, seed=18),
        _trial(world, seed=19, holes=True),
        _trial(world, seed=20),
    ]
    outs = [trial.dispatch() for trial in trials]
    seen = [trial.wrong_rows(out.rows) for trial, out in zip(trials, outs, strict=True)]
    for index in (1, 2, 0):
        wrong = trials[index].wrong_sums(trials[index].combine(outs[index].handle))
        seen.append(wrong and f"handle {index}: {wrong}")
    return first_of(*seen)


def _replay(world: World) -> str | None:
    """A handle replays its layout for other tokens."""
    first = _trial(world, seed=21, align=8).dispatch()
    _trial(world, seed=22).dispatch()  # another layout in between
    other = _trial(world, seed=23, routing_seed=21, align=8)
    out = other.dispatch(handle=first.handle)
    return first_of(
        other.wrong_rows(out.rows),
        other.wrong_weights(out.weights),
        other.wrong_counts(out),
    )


def _repeatable(world: World) -> str | None:
    """The same call gives the same bits, five times."""
    trial = _trial(world, seed=24, holes=True)
    seen = []
    first: tuple[Tensor, ...] | None = None
    for time in range(5):
        out = trial.dispatch()
        y = trial.combine(out.handle, weighted=True)
        got = tuple(t.cpu() for t in (out.rows, out.weights, y))
        first = first or got
        for name, now, before in zip(("rows", "weights", "sums"), got, first, strict=True):
            seen.append(wrong_values(now, before, f"{name} of call {time + 1}"))
    return first_of(*seen)


PROPERTIES: tuple[Callable[[World], str | None], ...] = (
    _peers,
    _order,
    _counts,
    _weights,
    _fp8,
    _large,
    _ragged,
    _holes,
    _align,
    _max_rows,
    _combine,
    _combine_weighted,
    _combine_fp32,
    _combine_bound,
    _dispatch_gradient,
    _combine_gradient,
    _handles,
    _replay,
    _repeatable,
)
