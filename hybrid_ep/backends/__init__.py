"""The ways of moving tokens, behind one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Route(NamedTuple):
    """Who sends what into which row; the fields are those of ``Handle``."""

    layout: Tensor
    counts: Tensor
    offsets: Tensor
    sizes: Tensor
    host_offsets: Sequence[int] | None = None


Moved = tuple[Tensor, Tensor | None, Tensor | None]
"""Rows, their weights and their scales."""


class Backend(Protocol):
    """What a backend does for a Buffer. Inputs were checked before; every call is collective.

    Route, dispatch and combine are the verbs: a fresh dispatch is route + dispatch, a cached one is
    dispatch alone, the backward of dispatch is combine and the backward of combine is dispatch. A
    backend may have a shorter way to route and dispatch at once, and to dispatch the gradients of a
    weighted combine, of the same effect.
    """

    name: str
    layout_size: int
    sms_of_a_call: tuple[int, int | None]  # at least, at most
    last_call: int  # by which layouts are told apart; the backend of a restore() goes on from it

    def route(
        self,
        topk_idx: Tensor,
        *,
        max_rows: int | None,
        align: int,
        most: Tensor | None = None,
        slots: int = 0,
    ) -> Route:
        """Agree with all ranks on the rows; `topk_idx` is ``[T, K]``, -1 for no expert.

        ``most``, int32 and dense, has the most experts of a token among its elements: more than
        ``slots`` on some rank end the call on all of them.
        """
        ...

    def dispatch(
        self,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        layout: Tensor,
        *,
        num_rows: int | None,
        num_sms: int = 0,
    ) -> Moved:
        """Move ``x [T, H]``, float32 ``weights [T, K]`` and ``scales [T, S]`` into rows.

        ``num_rows`` None means: as many as the layout needs, which may make the host wait.
        ``num_sms``, of each verb, is equal on all ranks; 0 means: that of the Config.
        """
        ...

    def dispatch_fresh(
        self,
        topk_idx: Tensor,
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        *,
        max_rows: int | None,
        align: int,
        most: Tensor | None = None,
        slots: int = 0,
        num_sms: int = 0,
    ) -> tuple[Route, Moved]:
        """What route returns, and what dispatch does.

        Of the tensors of the route all but the layout may share memory.
        """
        ...

    def combine(
        self,
        rows: Tensor,
        weights: Tensor | None,
        values: Tensor | None,
        layout: Tensor,
        *,
        num_tokens: int,
        num_sms: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Sum ``rows [M, H]``, weighted by float32 ``weights [M]``, at home: ``[T, H]``.

        ``values`` float32 ``[M]``, one per row, go home beside it unsummed: ``[T, K]``, each slot
        gets its row's value (zero where the slot has no row).
        """
        ...

    def combine_backward(
        self, grad_y: Tensor, rows: Tensor, weights: Tensor, layout: Tensor, *, num_sms: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The gradients ``[M, H]`` of ``rows`` and ``[M]`` of ``weights`` of such a combine.

        A dispatch of ``grad_y [T, H]``, dtype of rows: each row's gradient times its weight,
        rounded once, and the dot product of both rows in the order of ``row_dots``. Both are
        zero for rows that are padding, whatever those hold.
        """
        ...

    def check(self) -> None:
        """Raise the PeerError that a call left behind, if one did; does not wait."""
        ...

    def describe(self) -> str:
        """One line for people: what carries the bytes."""
        ...

    def destroy(self) -> None:
        """Give back what the backend holds; idempotent, waits for no peer."""
        ...

    def reclaim(self) -> None:
        """Free what `destroy` kept for peers; called once all ranks have destroyed theirs."""
        ...
