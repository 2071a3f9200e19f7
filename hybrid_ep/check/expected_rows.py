"""The rows that a rank must get, from everybody's routing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_ep.check.case import EXPERTS_PER_RANK, Case
from hybrid_ep.integers import round_up

Row = tuple[int, int, int]  # (source, token, expert)
PADDING: Row = (-1, 0, 0)


@dataclass(frozen=True)
class Rows:
    """Rows of a rank.

    Attributes:
        source, token, expert: int64 ``[M]``; source -1 is padding.
        counts, offsets: of the rank's experts, as of Dispatched.
        required: rows that nothing dropped would have needed.
    """

    source: Tensor
    token: Tensor
    expert: Tensor
    counts: list[int]
    offsets: list[int]
    required: int

    def __len__(self) -> int:
        return len(self.source)

    @property
    def is_padding(self) -> Tensor:
        """Bool ``[M]``."""
        return self.source < 0

    @property
    def triples(self) -> list[Row]:
        """The rows one by one."""
        columns = (self.source.tolist(), self.token.tolist(), self.expert.tolist())
        return list(zip(*columns, strict=True))


def expected_rows(case: Case, rank: int) -> Rows:
    """Grouped by expert, then by source, then by token; padded; cut where ``max_rows`` says."""
    rows: list[Row] = []
    counts, offsets = [], [0]
    for expert in range(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK):
        group = [
            (source, token, expert)
            for source, topk_idx in enumerate(case.topk_idx)
            for token in (topk_idx == expert).any(dim=1).nonzero().flatten().tolist()
        ]
        counts.append(len(group))
        rows += group + [PADDING] * (round_up(len(group), case.align) - len(group))
        offsets.append(len(rows))
    required = len(rows)
    if case.max_rows is not None:
        counts = [
            min(count, max(0, case.max_rows - begin))
            for count, begin in zip(counts, offsets[:-1], strict=True)
        ]
        offsets = [min(offset, case.max_rows) for offset in offsets]
        rows = (rows + [PADDING] * case.max_rows)[: case.max_rows]
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    return Rows(*table.unbind(dim=1), counts, offsets, required)


def kept_rows(case: Case) -> set[Row]:
    """The rows of all ranks that no bound drops."""
    everybody = (expected_rows(case, rank) for rank in range(case.num_ranks))
    return {row for rows in everybody for row in rows.triples if row[0] >= 0}


def row_weights(case: Case, rows: Rows) -> Tensor:
    """float32 ``[M]``, zero on padding."""
    values = [0.0 if row[0] < 0 else row_weight(case, *row) for row in rows.triples]
    return torch.tensor(values, dtype=torch.float32)


def row_weight(case: Case, source: int, token: int, expert: int) -> float:
    """Its slots' weights, added in slot order in float32."""
    slots = (case.topk_idx[source][token] == expert).nonzero().flatten().tolist()
    total = case.weights[source][token, slots[0]]
    for slot in slots[1:]:
        total = total + case.weights[source][token, slot]
    return total.item()
