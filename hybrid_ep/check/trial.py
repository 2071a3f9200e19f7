"""A case on this rank: its calls, and what is wrong with what they gave.

Inputs are made on the host and go to the Buffer's device; results are compared on the host, bit by
bit, so that NaN equals itself and 0.0 is not -0.0.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.buffer import Buffer, combine, dispatch
from hybrid_ep.check.case import TOKENS, Case
from hybrid_ep.check.expected_rows import Rows, expected_rows, row_weights
from hybrid_ep.check.expected_sums import Sums, expected_sums
from hybrid_ep.check.world import World
from hybrid_ep.handle import Dispatched, Handle


class Trial:
    """See the module.

    Args:
        world: the ranks.
        case: what they send.
    """

    def __init__(self, world: World, case: Case) -> None:
        self.case = case
        self.rank = world.rank
        self.num_tokens = case.num_tokens[world.rank]
        self.buffer: Buffer = world.buffer(max(TOKENS, *case.num_tokens), case.hidden, case.dtype)

    # ---- what is sent, and what must come

    @functools.cached_property
    def want(self) -> Rows:
        """The rows of this rank."""
        return expected_rows(self.case, self.rank)

    @functools.cached_property
    def row_weights(self) -> Tensor:
        """float32 ``[M]`` of these rows, on the host."""
        return row_weights(self.case, self.want)

    def sums(self, *, weighted: bool) -> Sums:
        """What combine must return here."""
        return expected_sums(self.case, self.buffer.topology, weighted=weighted)

    @property
    def topk_idx(self) -> Tensor:
        """Of this rank, on the host."""
        return self.case.topk_idx[self.rank]

    def outputs(self, num_rows: int) -> Tensor:
        """Expert outputs of this rank, ``[M, H]`` on the device; NaN in padding: not to be read."""
        outputs = self.case.outputs_of(self.want.source, self.want.token, self.want.expert)
        outputs[self.want.is_padding] = float("nan")
        return self.here(outputs, num_rows)

    def here(self, tensor: Tensor, num_rows: int | None = None) -> Tensor:
        """A copy on the device, also where that is the host; zeros if it has not ``num_rows``.

        Where dispatch returned another number of rows than it must, its own property fails, and
        combine is called nevertheless, for the peers call it too.
        """
        if num_rows is not None and len(tensor) != num_rows:
            tensor = tensor.new_zeros((num_rows, *tensor.shape[1:]))
        return tensor.to(self.buffer.device, copy=True)

    # ---- calls

    def dispatch(self, **arguments: Any) -> Dispatched:
        """Dispatch of this rank's tokens with their weights; a replay where ``handle`` is given."""
        if "handle" not in arguments:
            arguments |= {
                "topk_idx": self.here(self.topk_idx),
                "align": self.case.align,
                "max_rows": self.case.max_rows,
            }
        return dispatch(
            self.buffer,
            self.here(self.case.payload(self.rank)),
            topk_weights=self.here(self.case.weights[self.rank]),
            **arguments,
        )

    def combine(self, handle: Handle, *, weighted: bool = False) -> Tensor:
        """Combine of the expert outputs."""
        weights = self.here(self.row_weights, handle.num_rows) if weighted else None
        return combine(self.buffer, self.outputs(handle.num_rows), handle, weights=weights)

    def dirty(self, num_rows: int) -> None:
        """Leave NaN in memory that the next call is likely to get.

        More than one call's rows of it, for the inputs are allocated before them.
        """
        shape, like = (num_rows, self.case.hidden), {"device": self.buffer.device}
        kept = [torch.full(shape, float("nan"), dtype=self.case.dtype, **like) for _ in range(4)]
        del kept

    # ---- what is wrong

    def wrong_counts(self, out: Dispatched) -> str | None:
        """Compare everything that says where rows are."""
        for name, got, expected in (
            ("counts", out.counts.tolist(), self.want.counts),
            ("offsets", out.offsets.tolist(), self.want.offsets),
            ("required_rows", int(out.handle.required_rows), self.want.required),
            ("rows", len(out.rows), len(self.want)),
        ):
            if got != expected:
                return f"{name} are {got}, not {expected}"
        return None

    def wrong_rows(self, rows: Tensor) -> str | None:
        """Compare rows with the payload that must be there; say what is there instead."""
        want, hidden = self.want, self.case.hidden
        got = rows.detach().cpu().contiguous().view(torch.int16)
        if got.shape != (len(want), hidden):
            return f"rows have shape {list(got.shape)}, not {[len(want), hidden]}"
        wanted = self.case.rows_of(want.source, want.token)
        wanted[want.is_padding] = 0
        wrong = (got != wanted).any(dim=1).nonzero().flatten()
        if wrong.numel() == 0:
            return None
        first = int(wrong[0])
        should = _name_of(int(want.source[first]), int(want.token[first]))
        return (
            f"{wrong.numel()} of {len(got)} rows are wrong; row {first} should be {should}, and "
            f"holds {self._origin(got[first])}"
        )

    def _origin(self, row: Tensor) -> str:
        """Which token a row is, in words."""
        if not row.any():
            return "zeros"
        for source in range(self.case.num_ranks):
            payload = self.case.payload(source).view(torch.int16)
            same = (payload == row).all(dim=1).nonzero().flatten()
            if same.numel():
                return _name_of(source, int(same[0]))
        return "no token of any rank"

    def wrong_weights(self, weights: Tensor) -> str | None:
        """Compare the weights that came with the rows."""
        return wrong_values(weights, self.row_weights, "weights")

    def wrong_sums(self, y: Tensor, *, weighted: bool = False) -> str | None:
        """Compare what ``combine`` gave."""
        return wrong_values(y, self.sums(weighted=weighted).ordered, "sums")


def wrong_values(got: Tensor, want: Tensor, what: str) -> str | None:
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


def beyond_bound(got: Tensor, exact: Tensor, bound: Tensor, what: str) -> str | None:
    """Compare with float64; NaN is beyond any bound. ``exact`` and ``bound`` are on the host."""
    error = (got.detach().cpu().double() - exact).abs()
    beyond = (~(error <= bound)).nonzero()
    if len(beyond) == 0:
        return None
    place = tuple(beyond[0].tolist())
    return (
        f"{what}: {len(beyond)} of {error.numel()} values err too much; at {list(place)} by "
        f"{error[place]:.3g}, the bound is {bound[place]:.3g}"
    )


def first_of(*seen: str | None) -> str | None:
    """The first fault, if there is any."""
    return next((text for text in seen if text is not None), None)


def _name_of(source: int, token: int) -> str:
    return "zero padding" if source < 0 else f"token {token} of rank {source}"
