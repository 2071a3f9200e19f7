"""Does it work here? A round trip on this topology, each property of the contract by itself.

    result = hybrid_ep.check.run(group)     # on every rank, at start-up; a few seconds
    if not result.ok: ...

    properties      one function each: make a trial, say what is wrong with what came
      trial         a case on this rank: its calls, and comparisons with what must be
        case        routing and payload of all ranks, as functions of (rank, token)
        expected_*  the rows and sums that follow from them, by plain loops on the host
      world         the ranks and their Buffers; a property fails on all ranks if it fails on one

Every rank recomputes what it must receive, so the comparison needs no second communication that
might fail the same way. What combine sums is made from what should have arrived, not from what did:
a fault of dispatch fails the properties of dispatch and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hybrid_ep.check.properties import PROPERTIES
from hybrid_ep.check.result import CheckResult, Property
from hybrid_ep.check.world import World

__all__ = ["PROPERTIES", "CheckResult", "Property", "run"]

TIMEOUT_S = 30.0


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
    world = World(
        group,
        backend=backend,
        device=device,
        ranks_per_node=ranks_per_node,
        timeout_s=TIMEOUT_S,
    )
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
