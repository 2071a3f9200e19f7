"""Does it work here? A round trip on this topology, each property of the contract by itself.

    result = hybrid_ep.check.run(group)     # on every rank, at start-up; a few seconds
    if not result.ok: ...

Every rank recomputes what it must receive: routing and payload are functions of (rank, token), so
the comparison needs no second communication that might fail the same way. What combine sums is made
from what should have arrived, not from what did: a fault of dispatch fails the properties of
dispatch and no other. A property fails on all ranks if it fails on one.
"""

from __future__ import annotations

import functools
import os
import platform
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.buffer import Buffer, round_up
from hybrid_ep.config import Config
from hybrid_ep.handle import Dispatched, Handle
from hybrid_ep.ops import combine, dispatch

EXPERTS_PER_RANK = 4
TOPK = 4
TOKENS = 96
HIDDEN = 128
LARGE_TOKENS, LARGE_HIDDEN = 256, 2048
TIMEOUT_S = 30.0
MAX_RANKS_SHOWN = 4


class Property(NamedTuple):
    """One line of the check.

    Attributes:
        name: what was checked.
        failures: rank -> what was seen there; empty where it holds.
    """

    name: str
    failures: dict[int, str]

    def __str__(self) -> str:
        if not self.failures:
            return f"ok    {self.name}"
        shown = [f"rank {r}: {seen}" for r, seen in sorted(self.failures.items())]
        more = len(shown) - MAX_RANKS_SHOWN
        tail = f"; and on {more} more rank(s)" if more > 0 else ""
        return f"FAIL  {self.name}: " + "; ".join(shown[:MAX_RANKS_SHOWN]) + tail


@dataclass(frozen=True)
class CheckResult:
    """What was checked; the same on all ranks."""

    properties: tuple[Property, ...]

    @property
    def failed(self) -> tuple[Property, ...]:
        """The properties that do not hold on some rank."""
        return tuple(p for p in self.properties if p.failures)

    @property
    def ok(self) -> bool:
        """Whether all hold."""
        return not self.failed

    def __str__(self) -> str:
        failed = len(self.failed)
        return f"check: {len(self.properties) - failed} passed, {failed} failed"


def run(
    group: dist.ProcessGroup | None = None,
    *,
    backend: str = "auto",
    device: torch.device | str | None = None,
    ranks_per_node: int | None = None,
    report: Callable[[str], Any] = print,
) -> CheckResult:
    """Check dispatch and combine between the ranks of a group; all of them call it.

    Args:
        group: as of Buffer.
        backend: as of Buffer.
        device: as of Buffer.
        ranks_per_node: as of Buffer.
        report: gets the lines, on the group's first rank.

    Returns:
        CheckResult: what held and what did not; nothing is raised for a property that fails.

    Raises:
        ValueError: an argument breaks a rule of Buffer.
        RuntimeError: the backend cannot run here, or ranks stopped answering.
    """
    world = _World(group, backend, device, ranks_per_node)
    report = report if world.rank == 0 else _say_nothing
    for line in world.buffer().describe().splitlines():
        report(line)
    properties = []
    for check in PROPERTIES:
        properties.append(world.agree(check))
        report(str(properties[-1]))
    world.close()
    result = CheckResult(tuple(properties))
    report(str(result))
    return result


def _say_nothing(line: str) -> None:
    pass


class _World:
    """The ranks, and Buffers by their sizes."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        backend: str,
        device: torch.device | str | None,
        ranks_per_node: int | None,
    ) -> None:
        self._group = group
        self._arguments = {
            "backend": backend,
            "device": device,
            "ranks_per_node": ranks_per_node,
            "config": Config(timeout_s=TIMEOUT_S),
        }
        together = dist.is_available() and dist.is_initialized()
        self.num_ranks = dist.get_world_size(group) if together else 1
        self.rank = dist.get_rank(group) if together else 0
        self._buffers: dict[tuple[Any, ...], Buffer] = {}

    def buffer(
        self, tokens: int = TOKENS, hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16
    ) -> Buffer:
        key = (tokens, hidden, dtype)
        if key not in self._buffers:
            self._buffers[key] = Buffer(
                self._group,
                hidden=hidden,
                num_experts=EXPERTS_PER_RANK * self.num_ranks,
                max_tokens=tokens,
                topk=TOPK,
                dtype=dtype,
                **self._arguments,
            )
        return self._buffers[key]

    def agree(self, check: Callable[[_World], str | None]) -> Property:
        """Run one property everywhere and tell everybody what everybody saw."""
        broken = False
        try:
            seen = check(self)
        except Exception as error:  # whatever it is, the line of this property says so
            broken = True
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(where.filename)}:{where.lineno}"
            seen = f"{type(error).__name__}: {error} ({place})"
        name = (check.__doc__ or check.__name__).rstrip(".")
        try:
            everybody = self.gather((seen, broken))
            if any(broken for _, broken in everybody):
                self.close()  # ranks stopped at different calls: the next property starts afresh
        except RuntimeError as error:
            raise RuntimeError(
                f"the group no longer answers after {name!r}, where this rank saw: {seen}"
            ) from error
        failures = {rank: seen for rank, (seen, _) in enumerate(everybody) if seen is not None}
        return Property(name, failures)

    def gather(self, value: Any) -> list[Any]:
        """One Python object from each rank."""
        values: list[Any] = [value]
        if self.num_ranks > 1:
            values = [None] * self.num_ranks
            dist.all_gather_object(values, value, group=self._group)
        return values

    @functools.cached_property
    def places(self) -> list[str]:
        """Host and device of each rank."""
        return self.gather(f"{platform.node()} {self.buffer().device}")

    def close(self) -> None:
        if self._buffers and self.num_ranks > 1:
            dist.barrier(self._group)
        for buffer in self._buffers.values():
            buffer.destroy()
        self._buffers.clear()


# ---- what must be


@dataclass(frozen=True)
class _Case:
    """Routing and payload of all ranks, as functions of the rank.

    Attributes:
        world: the ranks.
        seed: of routing and payload.
        tokens: T of each rank, None for ``TOKENS`` everywhere.
        holes: whether slots are empty (-1) or repeat an expert.
        align, max_rows: as of dispatch.
        hidden: H.
        dtype: of what the experts make.
    """

    world: _World
    seed: int
    tokens: tuple[int, ...] | None = None
    holes: bool = False
    align: int = 1
    max_rows: int | None = None
    hidden: int = HIDDEN
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_tokens(self) -> tuple[int, ...]:
        return self.tokens or (TOKENS,) * self.world.num_ranks

    @functools.cached_property
    def routing(self) -> list[Tensor]:
        return [self.topk_idx(rank) for rank in range(self.world.num_ranks)]

    def topk_idx(self, rank: int) -> Tensor:
        """int64 ``[T, K]`` on the host."""
        generator = torch.Generator().manual_seed(self.seed * 7919 + rank)
        num_tokens, experts = self.num_tokens[rank], EXPERTS_PER_RANK * self.world.num_ranks
        chosen = torch.rand(num_tokens, experts, generator=generator).topk(TOPK, dim=1).indices
        if self.holes:
            luck = torch.rand(num_tokens, TOPK, generator=generator)
            chosen = torch.where(luck < 0.3, -1, chosen)
            chosen[:, -1] = torch.where(luck[:, -1] > 0.6, chosen[:, 0], chosen[:, -1])
            chosen[::7] = -1
        return chosen

    def weights(self, rank: int) -> Tensor:
        """float32 ``[T, K]`` on the host."""
        generator = torch.Generator().manual_seed(self.seed * 104729 + rank)
        return torch.rand(self.num_tokens[rank], TOPK, generator=generator)

    def payload(self, rank: int) -> Tensor:
        """bf16 ``[T, H]`` on the host; any bits, NaN too, for dispatch only moves them."""
        token = torch.arange(self.num_tokens[rank])
        return self.rows_of(torch.full_like(token, rank), token).view(torch.bfloat16)

    def rows_of(self, source: Tensor, token: Tensor) -> Tensor:
        """The payload's bits of these tokens, int16 ``[N, H]``."""
        return _bits(source * 65537 + token, self.hidden, self.seed)

    def outputs_of(self, source: Tensor, token: Tensor, expert: Tensor) -> Tensor:
        """What the experts make of these tokens, ``[N, H]``."""
        key = (source * 65537 + token) * 4099 + expert
        return _numbers(key, self.hidden, self.seed + 1, self.dtype)

    @functools.cached_property
    def expected(self) -> _Expected:
        return self.expected_of(self.world.rank)

    def expected_of(self, rank: int) -> _Expected:
        """The rows of a rank, from everybody's routing."""
        experts = range(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)
        rows: list[tuple[int, int, int]] = []  # (source, token, expert); source -1 is padding
        counts, offsets = [], [0]
        for expert in experts:
            group = [
                (source, token, expert)
                for source, topk_idx in enumerate(self.routing)
                for token in (topk_idx == expert).any(dim=1).nonzero().flatten().tolist()
            ]
            padding = round_up(len(group), self.align) - len(group)
            counts.append(len(group))
            rows += group + [(-1, 0, 0)] * padding
            offsets.append(len(rows))
        required = len(rows)
        if self.max_rows is not None:
            counts = [
                min(count, max(0, self.max_rows - begin))
                for count, begin in zip(counts, offsets[:-1], strict=True)
            ]
            offsets = [min(offset, self.max_rows) for offset in offsets]
            rows = (rows + [(-1, 0, 0)] * self.max_rows)[: self.max_rows]
        table = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        return _Expected(*table.unbind(dim=1), counts, offsets, required)

    # ---- calls

    def buffer(self) -> Buffer:
        """Of the size of the case."""
        if self.hidden == LARGE_HIDDEN:
            return self.world.buffer(LARGE_TOKENS, LARGE_HIDDEN)
        return self.world.buffer(dtype=self.dtype)

    def dispatch(self, **arguments: Any) -> Dispatched:
        """Dispatch of this rank's tokens with their weights."""
        buffer, rank = self.buffer(), self.world.rank
        return dispatch(
            buffer,
            self.payload(rank).to(buffer.device),
            self.routing[rank].to(buffer.device),
            self.weights(rank).to(buffer.device),
            align=self.align,
            max_rows=self.max_rows,
            **arguments,
        )

    def combine(self, handle: Handle, *, weighted: bool = False) -> Tensor:
        """Combine of the expert outputs; called whatever dispatch did, for peers call it too."""
        rows, weights = self.outputs(handle.num_rows), None
        if weighted:
            weights = _of_length(self.row_weights(), handle.num_rows).to(rows.device)
        return combine(self.buffer(), rows, handle, weights=weights)

    def wrong_sums(self, y: Tensor, *, weighted: bool = False) -> str | None:
        """Compare what ``combine`` gave."""
        return _wrong_values(y, self.combined(self.outputs_of, weighted=weighted)[0], "sums")

    def outputs(self, num_rows: int) -> Tensor:
        """Expert outputs of this rank, ``[M, H]``; NaN where combine must not look."""
        want = self.expected
        outputs = self.outputs_of(want.source, want.token, want.expert)
        outputs[want.source < 0] = float("nan")
        return _of_length(outputs, num_rows).to(self.buffer().device)

    def row_weights(self) -> Tensor:
        """float32 ``[M]`` of this rank's rows, zero on padding; on the host."""
        return self.weights_of(self.expected)

    def weights_of(self, want: _Expected) -> Tensor:
        values = [
            self.slot_sum(source, token, expert) if source >= 0 else 0.0
            for source, token, expert in want.triples
        ]
        return torch.tensor(values, dtype=torch.float32)

    def slot_sum(self, source: int, token: int, expert: int) -> float:
        """Weight of a row: its slots' weights, added in slot order in float32."""
        slots = (self.routing[source][token] == expert).nonzero().flatten().tolist()
        total = self._all_weights[source][token, slots[0]]
        for slot in slots[1:]:
            total = total + self._all_weights[source][token, slot]
        return total.item()

    @functools.cached_property
    def _all_weights(self) -> list[Tensor]:
        return [self.weights(rank) for rank in range(self.world.num_ranks)]

    def combined(
        self, value: Callable[[Tensor, Tensor, Tensor], Tensor], *, weighted: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What combine must return here: the ordered sum, the fp64 sum, and a bound between them.

        Args:
            value: rows of (source, token, expert), of the case's dtype.
            weighted: whether rows are weighted.
        """
        rank, topology = self.world.rank, self.buffer().topology
        num_tokens = self.num_tokens[rank]
        kept = self._kept_rows if self.max_rows is not None else None
        shape = (num_tokens, self.hidden)
        exact, size = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        home = _OrderedSum(shape, self.dtype)
        for node in range(topology.num_nodes):
            of_node = _OrderedSum(shape, self.dtype)
            for local in range(topology.ranks_per_node):
                of_rank = _OrderedSum(shape, self.dtype)
                first = (node * topology.ranks_per_node + local) * EXPERTS_PER_RANK
                for expert in range(first, first + EXPERTS_PER_RANK):
                    token = (self.routing[rank] == expert).any(dim=1).nonzero().flatten()
                    if kept is not None:
                        there = [(rank, t, expert) in kept for t in token.tolist()]
                        token = token[torch.tensor(there, dtype=torch.bool)]
                    if token.numel() == 0:
                        continue
                    term = value(
                        *torch.broadcast_tensors(torch.tensor(rank), token, torch.tensor(expert))
                    )
                    wide = term.double()
                    term = term.float()
                    if weighted:
                        weight = torch.tensor(
                            [self.slot_sum(rank, t, expert) for t in token.tolist()]
                        ).unsqueeze(1)
                        term, wide = term * weight, wide * weight.double()
                    of_rank.add(token, term)
                    exact.index_add_(0, token, wide)
                    size.index_add_(0, token, wide.abs())
                of_node.add(of_rank.touched, of_rank.rounded())
            home.add(of_node.touched, of_node.rounded())
        # each rounding errs by half an eps of what it rounds, each product and sum by 2**-24
        roundings = 2 if topology.num_nodes == 1 else 3
        half_eps = torch.finfo(self.dtype).eps / 2
        bound = size * (roundings * half_eps + 4 * TOPK * 2.0**-24) * 1.02
        ordered = torch.zeros(shape)
        ordered[home.touched] = home.rounded()
        return ordered.to(self.dtype), exact, bound

    @functools.cached_property
    def _kept_rows(self) -> set[tuple[int, int, int]]:
        return {
            triple
            for rank in range(self.world.num_ranks)
            for triple in self.expected_of(rank).triples
            if triple[0] >= 0
        }


class _OrderedSum:
    """Sums in fp32 that begin with their first term and are rounded to a dtype at their end."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._total = torch.zeros(shape)
        self._begun = torch.zeros(shape[0], dtype=torch.bool)

    @property
    def touched(self) -> Tensor:
        return self._begun.nonzero().flatten()

    def add(self, token: Tensor, term: Tensor) -> None:
        begun = self._begun[token].unsqueeze(1)
        self._total[token] = torch.where(begun, self._total[token] + term, term)
        self._begun[token] = True

    def rounded(self) -> Tensor:
        """Of the tokens touched."""
        return self._total[self._begun].to(self._dtype).float()


@dataclass(frozen=True)
class _Expected:
    """Rows of a rank: ``source``, ``token``, ``expert`` int64 ``[M]``; source -1 is padding."""

    source: Tensor
    token: Tensor
    expert: Tensor
    counts: list[int]
    offsets: list[int]
    required: int

    @property
    def triples(self) -> list[tuple[int, int, int]]:
        columns = (self.source.tolist(), self.token.tolist(), self.expert.tolist())
        return list(zip(*columns, strict=True))


def _of_length(rows: Tensor, num_rows: int) -> Tensor:
    """The rows themselves, or zeros where dispatch returned another number of them."""
    return rows if len(rows) == num_rows else rows.new_zeros((num_rows, *rows.shape[1:]))


def _mixed(key: Tensor, width: int, seed: int) -> Tensor:
    """int64 ``[N, width]`` of 32 well mixed bits, by key, place and seed."""
    value = key.unsqueeze(1) * 2654435761 + torch.arange(width) * 40503 + seed * 97_003 + 1
    for _ in range(2):
        value = ((value ^ (value >> 16)) * 73244475) & 0xFFFFFFFF
    return value ^ (value >> 16)


def _bits(key: Tensor, width: int, seed: int) -> Tensor:
    return ((_mixed(key, width, seed) & 0xFFFF) - 0x8000).to(torch.int16)


def _numbers(key: Tensor, width: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``[N, width]``: from 2**-12 to 2**12 in size, and every other one plus or minus 2**30.

    Rounding to bf16 would hide in which order a sum was made, if large terms did not cancel.
    """
    mixed = _mixed(key, width, seed)
    significand = 1 + (mixed & 0xFFFF).float() / 0x10000
    exponent = (mixed >> 16) % 24 - 12
    size = torch.where(mixed >> 24 & 1 == 1, 2.0**30, torch.ldexp(significand, exponent))
    return (size * (1 - 2 * (mixed >> 25 & 1))).to(dtype)


# ---- what was seen


def _wrong_rows(case: _Case, rows: Tensor, what: str = "row") -> str | None:
    """Compare rows with the payload that must be there, bit by bit."""
    want = case.expected
    got = rows.detach().cpu().contiguous().view(torch.int16)
    if got.shape != (len(want.source), case.hidden):
        return f"{what}s have shape {list(got.shape)}, not {[len(want.source), case.hidden]}"
    wanted = case.rows_of(want.source, want.token)
    wanted[want.source < 0] = 0
    wrong = (got != wanted).any(dim=1).nonzero().flatten()
    if wrong.numel() == 0:
        return None
    first = int(wrong[0])
    should = _name_of(int(want.source[first]), int(want.token[first]))
    return (
        f"{wrong.numel()} of {len(got)} {what}s are wrong; {what} {first} should be {should}, "
        f"and holds {_origin(case, got[first])}"
    )


def _name_of(source: int, token: int) -> str:
    return "zero padding" if source < 0 else f"token {token} of rank {source}"


def _origin(case: _Case, row: Tensor) -> str:
    """Which token a row is, in words."""
    if not row.any():
        return "zeros"
    for source, tokens in enumerate(case.num_tokens):
        same = (case.payload(source).view(torch.int16) == row).all(dim=1).nonzero().flatten()
        if tokens and same.numel():
            return _name_of(source, int(same[0]))
    return "no token of any rank"


def _wrong_values(got: Tensor, want: Tensor, what: str) -> str | None:
    """Compare bit by bit; ``want`` is on the host."""
    got = got.detach().cpu()
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{what}: {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}"
    if got.numel() == 0:
        return None
    left, right = (t.contiguous().view(-1, 1).view(torch.uint8) for t in (got, want))
    wrong = (left != right).any(dim=1).view(got.shape).nonzero()
    if len(wrong) == 0:
        return None
    place = tuple(wrong[0].tolist())
    return (
        f"{what}: {len(wrong)} of {got.numel()} values are wrong; at {list(place)} "
        f"{got[place].item()!r} instead of {want[place].item()!r}"
    )


def _first(*seen: str | None) -> str | None:
    return next((text for text in seen if text is not None), None)


def _dirty(buffer: Buffer, num_rows: int) -> None:
    """Leave NaN in memory that the next call is likely to get."""
    torch.full((num_rows, buffer.hidden), float("nan"), dtype=buffer.dtype, device=buffer.device)


# ---- the properties; the first line of each is what the user reads


def _peers(world: _World) -> str | None:
    """Every peer's tokens arrive."""
    case, places = _Case(world, seed=1), world.places
    rows = Counter(map(tuple, case.dispatch().rows.cpu().view(torch.int16).tolist()))
    want = case.expected
    missing = []
    for source in range(world.num_ranks):
        token = want.token[want.source == source]
        sent = Counter(map(tuple, case.rows_of(torch.full_like(token, source), token).tolist()))
        lost = (sent - rows).total()
        if lost:
            missing.append(
                f"{lost} of {sent.total()} rows from rank {source} "
                f"({places[source]} to {places[world.rank]})"
            )
    return "did not get " + ", ".join(missing) if missing else None


def _order(world: _World) -> str | None:
    """Rows are grouped by expert, then by source rank, then by token."""
    case = _Case(world, seed=2)
    return _wrong_rows(case, case.dispatch().rows)


def _counts(world: _World) -> str | None:
    """Counts and offsets say where each expert's rows are."""
    case = _Case(world, seed=3)
    return _wrong_counts(case, case.dispatch())


def _wrong_counts(case: _Case, out: Dispatched) -> str | None:
    want = case.expected
    for name, got, expected in (
        ("counts", out.counts.tolist(), want.counts),
        ("offsets", out.offsets.tolist(), want.offsets),
        ("required_rows", int(out.handle.required_rows), want.required),
        ("rows", len(out.rows), len(want.source)),
    ):
        if got != expected:
            return f"{name} are {got}, not {expected}"
    return None


def _weights(world: _World) -> str | None:
    """Weights arrive with their rows."""
    case = _Case(world, seed=4)
    return _wrong_values(case.dispatch().weights, case.row_weights(), "weights")


def _fp8(world: _World) -> str | None:
    """fp8 rows arrive with their scales, to the last bit."""
    case = _Case(world, seed=5, hidden=HIDDEN)
    buffer, me = case.buffer(), world.rank
    num_scales = 4
    keys = [r * 65537 + torch.arange(n) for r, n in enumerate(case.num_tokens)]
    x = _bits(keys[me], HIDDEN // 2, 51).view(torch.float8_e4m3fn)
    scales = _bits(keys[me], 2 * num_scales, 52).view(torch.float32)
    out = dispatch(
        buffer,
        x.to(buffer.device),
        case.routing[me].to(buffer.device),
        scales=scales.to(buffer.device),
    )
    want = case.expected
    key = want.source * 65537 + want.token
    return _first(
        _wrong_values(
            out.rows.view(torch.uint8), _bits(key, HIDDEN // 2, 51).view(torch.uint8), "bytes"
        ),
        _wrong_values(out.scales.view(torch.int16), _bits(key, 2 * num_scales, 52), "scales"),
    )


def _large(world: _World) -> str | None:
    """Large rows arrive: 4 KB each, many to a rank."""
    tokens = (LARGE_TOKENS,) * world.num_ranks
    case = _Case(world, seed=6, tokens=tokens, hidden=LARGE_HIDDEN)
    return _wrong_rows(case, case.dispatch().rows)


def _ragged(world: _World) -> str | None:
    """Ranks may have different numbers of tokens, or none."""
    sizes, seen = (17, 0, TOKENS, 1), []
    for seed, tokens in (
        (7, tuple(sizes[r % 4] for r in range(world.num_ranks))),
        (8, tuple(sizes[(r + 1) % 4] for r in range(world.num_ranks))),
        (9, (0,) * world.num_ranks),
    ):
        wrong = _wrong_round_trip(_Case(world, seed=seed, tokens=tokens))
        seen.append(wrong and f"with T {list(tokens)}: {wrong}")
    return _first(*seen)


def _holes(world: _World) -> str | None:
    """Slots may be empty (-1) or repeat an expert, whose weights then add."""
    return _wrong_round_trip(_Case(world, seed=10, holes=True))


def _wrong_round_trip(case: _Case) -> str | None:
    out = case.dispatch()
    y = case.combine(out.handle, weighted=True)
    return _first(
        _wrong_counts(case, out),
        _wrong_rows(case, out.rows),
        _wrong_values(out.weights, case.row_weights(), "weights"),
        case.wrong_sums(y, weighted=True),
    )


def _align(world: _World) -> str | None:
    """Groups are padded to the alignment with zero rows of zero weight."""
    case = _Case(world, seed=11, align=32)
    _dirty(case.buffer(), len(case.expected.source))
    return _wrong_round_trip(case)


def _max_rows(world: _World) -> str | None:
    """With max_rows, rows beyond it are dropped and the overflow flag is exact."""
    whole = _Case(world, seed=12, holes=True, align=8)
    required = [whole.expected_of(r).required for r in range(world.num_ranks)]
    seen = []
    # all drop; all but the least drop; the busiest just fits; there is room to spare
    for bound in (8 * (min(required) // 16), min(required), max(required), max(required) + 16):
        case = replace(whole, max_rows=bound)
        _dirty(case.buffer(), bound)
        out = case.dispatch()
        y = case.combine(out.handle)
        overflow, needed = bool(out.handle.overflow), required[world.rank]
        wrong = _first(
            None
            if overflow == (needed > bound)
            else f"overflow is {overflow} where {needed} rows were needed",
            _wrong_counts(case, out),
            _wrong_rows(case, out.rows),
            _wrong_values(out.weights, case.row_weights(), "weights"),
            case.wrong_sums(y),
        )
        seen.append(wrong and f"with max_rows {bound}: {wrong}")
    return _first(*seen)


def _combine(world: _World) -> str | None:
    """Combine adds in the stated order: equal to the last bit."""
    case = _Case(world, seed=13)
    return case.wrong_sums(case.combine(case.dispatch().handle))


def _combine_weighted(world: _World) -> str | None:
    """A weighted combine does too."""
    case = _Case(world, seed=14)
    y = case.combine(case.dispatch().handle, weighted=True)
    return case.wrong_sums(y, weighted=True)


def _combine_fp32(world: _World) -> str | None:
    """Combine of fp32 rows does too, where every rounding shows."""
    case = _Case(world, seed=25, holes=True, dtype=torch.float32)
    y = case.combine(case.dispatch().handle, weighted=True)
    return case.wrong_sums(y, weighted=True)


def _combine_bound(world: _World) -> str | None:
    """Combine errs no more than its roundings allow, against fp64."""
    case = _Case(world, seed=15)
    y = case.combine(case.dispatch().handle, weighted=True)
    _, exact, bound = case.combined(case.outputs_of, weighted=True)
    error = (y.cpu().double() - exact).abs()
    if bool((error <= bound).all()):
        return None
    place = int((error - bound).argmax())
    return (
        f"error {error.flatten()[place]:.3g} at value {place}, the bound is "
        f"{bound.flatten()[place]:.3g}"
    )


def _dispatch_gradient(world: _World) -> str | None:
    """The gradient of dispatch is the ordered sum of its rows' gradients."""
    case = _Case(world, seed=16, holes=True, align=4)
    buffer, me = case.buffer(), world.rank
    numbers = _numbers(torch.arange(case.num_tokens[me]), HIDDEN, 161)
    x = numbers.to(buffer.device).requires_grad_()
    topk_weights = case.weights(me).to(buffer.device).requires_grad_()
    out = dispatch(buffer, x, case.routing[me].to(buffer.device), topk_weights, align=case.align)
    want = case.expected

    def row_weight_gradient(source: Tensor, token: Tensor, expert: Tensor) -> Tensor:
        return _numbers((source * 65537 + token) * 4099 + expert, 1, 162).float().squeeze(1)

    grad_rows = case.outputs(len(out.rows))
    grad_weights = row_weight_gradient(want.source, want.token, want.expert)
    grad_weights = _of_length(grad_weights, len(out.rows)).to(buffer.device)
    got_x, got_weights = torch.autograd.grad(
        (out.rows, out.weights), (x, topk_weights), (grad_rows, grad_weights)
    )
    token, slot = (case.routing[me] >= 0).nonzero(as_tuple=True)
    by_slot = torch.zeros(case.num_tokens[me], TOPK)
    by_slot[token, slot] = row_weight_gradient(
        torch.full_like(token, me), token, case.routing[me][token, slot]
    )
    return _first(
        _wrong_values(got_x, case.combined(case.outputs_of, weighted=False)[0], "gradient of x"),
        _wrong_values(got_weights, by_slot, "gradient of weights"),
    )


def _combine_gradient(world: _World) -> str | None:
    """The gradient of combine is dispatched to the rows and their weights."""
    case = _Case(world, seed=17, holes=True)
    buffer, me = case.buffer(), world.rank
    want = case.expected
    handle = case.dispatch().handle
    rows = case.outputs(handle.num_rows).requires_grad_()
    weights = _of_length(case.row_weights(), handle.num_rows).to(buffer.device).requires_grad_()
    y = combine(buffer, rows, handle, weights=weights)
    grad_y = _numbers(me * 65537 + torch.arange(case.num_tokens[me]), HIDDEN, 171)
    got_rows, got_weights = torch.autograd.grad(y, (rows, weights), grad_y.to(buffer.device))
    arrived = _numbers(want.source * 65537 + want.token, HIDDEN, 171)
    weighted = (arrived * case.row_weights().unsqueeze(1)).to(torch.bfloat16)
    if len(rows) != len(want.source):
        return f"{len(rows)} rows, not {len(want.source)}"
    products = rows.detach().cpu().double() * arrived.double()
    error = (got_weights.cpu().double() - products.sum(dim=1)).abs()
    bound = products.abs().sum(dim=1) * HIDDEN * 2.0**-24
    seen = None
    if bool((error > bound).any()):
        place = int((error - bound).argmax())
        seen = (
            f"gradient of weights: error {error[place]:.3g} in row {place}, the bound is "
            f"{bound[place]:.3g}"
        )
    return _first(_wrong_values(got_rows, weighted, "gradient of rows"), seen)


def _handles(world: _World) -> str | None:
    """Handles live side by side and come home in any order."""
    cases = [_Case(world, seed=18), _Case(world, seed=19, holes=True), _Case(world, seed=20)]
    outs = [case.dispatch() for case in cases]
    seen = [_wrong_rows(case, out.rows) for case, out in zip(cases, outs, strict=True)]
    for index in (1, 2, 0):
        case = cases[index]
        wrong = case.wrong_sums(case.combine(outs[index].handle))
        seen.append(wrong and f"handle {index}: {wrong}")
    return _first(*seen)


def _replay(world: _World) -> str | None:
    """A handle replays its layout for other tokens."""
    case = _Case(world, seed=21, align=8)
    first = case.dispatch()
    _Case(world, seed=22).dispatch()  # another layout in between
    other = _Case(world, seed=23, align=8)  # its payload, the first one's routing
    other.__dict__["routing"] = case.routing
    buffer, me = other.buffer(), world.rank
    out = dispatch(
        buffer,
        other.payload(me).to(buffer.device),
        None,
        other.weights(me).to(buffer.device),
        handle=first.handle,
    )
    return _first(
        _wrong_rows(other, out.rows),
        _wrong_values(out.weights, other.row_weights(), "weights"),
        _wrong_counts(other, out),
    )


def _repeatable(world: _World) -> str | None:
    """The same call gives the same bits, five times."""
    case = _Case(world, seed=24, holes=True)
    seen = []
    first: tuple[Tensor, ...] | None = None
    for time in range(5):
        out = case.dispatch()
        y = case.combine(out.handle, weighted=True)
        got = tuple(t.cpu() for t in (out.rows, out.weights, y))
        first = first or got
        for name, now, before in zip(("rows", "weights", "sums"), got, first, strict=True):
            seen.append(_wrong_values(now, before, f"{name} of call {time + 1}"))
    return _first(*seen)


PROPERTIES: tuple[Callable[[_World], str | None], ...] = (
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
