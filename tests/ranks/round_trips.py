"""The round trip between all ranks, whole and with a backend that spoils bytes."""

from __future__ import annotations

from typing import Any
from unittest import mock

from hybrid_ep.ops import round_trip
from tests.launch import Rank
from tests.ranks.raised import what_it_raises


def verify(me: Rank, sizes: dict[str, Any], spoils: str | None = None, on_rank: int = 1) -> str:
    """What the round trip says; on one rank the first row that a verb hands out may be spoiled."""
    buffer = me.buffer(**sizes)
    if spoils is not None and me.rank == on_rank:
        verb = {"dispatch": "dispatch_fresh", "combine": "combine"}[spoils]
        good = getattr(buffer.communicator.verbs, verb)

        def spoiled(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            made = good(*args, **kwargs)
            rows = made[1][0] if spoils == "dispatch" else made[0]
            rows[0, -1] += 1
            return made

        setattr(buffer.communicator.verbs, verb, spoiled)
    said = what_it_raises(lambda: round_trip.verify(buffer.communicator))
    buffer.destroy()
    return said


def verify_in_turn(me: Rank, sizes: dict[str, Any]) -> list[int]:
    """How often the round trip had been made after each of four times that it was asked for."""
    counts = []
    with (
        mock.patch.object(round_trip, "verify") as made,
        mock.patch.object(round_trip, "_verified", set()),
    ):
        buffer = me.buffer(**sizes)
        made.reset_mock()  # a Buffer of several nodes makes one
        round_trip._verified.clear()
        for hosts in (["a", "b"], ["a", "b"], ["a", "c"], ["a", "c"]):
            if me.rank == 0 and len(counts) == 3:
                round_trip._verified.clear()  # as a process that was started anew
            buffer.communicator.group.hosts = hosts
            round_trip.verify_once(buffer.communicator)
            counts.append(made.call_count)
        buffer.destroy()
    return counts
