"""A Buffer as a context manager."""

from __future__ import annotations

import logging
import time
from unittest import mock

import hybrid_ep
from tests.cases import Case
from tests.launch import Rank
from tests.ranks.raised import what_it_raises
from tests.ranks.verbs import send

CASE = Case("context", tokens=(5, 7), topk=3)


def leave(me: Rank) -> tuple[str, bool, str]:
    """Leave the block: the repr then, whether all ranks had reached its end, a late call."""
    case = CASE.on(me.num_ranks)
    with me.buffer(**case.sizes()) as buffer:
        send(me, buffer, case.inputs(me.rank))
        if me.rank == me.num_ranks - 1:
            time.sleep(0.2)
        reached_the_end = time.monotonic()  # a clock that all ranks of a host share
    left = time.monotonic()
    latest = max(buffer.communicator.group.gather(reached_the_end))
    late = what_it_raises(lambda: send(me, buffer, case.inputs(me.rank)))
    return repr(buffer), left >= latest, late


def leave_after_an_exception(me: Rank) -> tuple[str, str]:
    """Rank 0 alone raises in the block: it must not wait for the others."""
    told = ""
    sizes = CASE.on(me.num_ranks).sizes()
    buffer = me.buffer(**sizes)
    with mock.patch.object(
        buffer.communicator.group, "gather", side_effect=AssertionError("it waits")
    ):
        try:
            with buffer as entered:
                assert entered is buffer
                raise KeyError("of the user")
        except KeyError as error:
            told = str(error)
    return repr(buffer), told


def leave_with_a_failure(me: Rank) -> str:
    """A call of the last rank has failed, and nothing has told so until the block ends."""
    failure = hybrid_ep.PeerError(rank=0, peer=1, phase="route", call=3, reason="made up")
    try:
        with me.buffer(**CASE.on(me.num_ranks).sizes()) as buffer:
            backend = buffer.communicator.backend
            if me.rank == me.num_ranks - 1:
                backend.check = mock.Mock(side_effect=failure)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}; {buffer!r}"
    return "nothing"


def texts(me: Rank) -> dict[str, str]:
    """The reprs of a Buffer in each state and of a handle, and what the logger got meanwhile."""
    case, records = CASE.on(me.num_ranks), []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("hybrid_ep")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        buffer = me.buffer(**case.sizes())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    told = {"live": repr(buffer), "handle": repr(send(me, buffer, case.inputs(me.rank)).handle)}
    buffer.release()
    told["released"] = repr(buffer)
    buffer.destroy()
    told["destroyed"] = repr(buffer)
    try:
        me.buffer(**{**case.sizes(), "topk": 0})
    except ValueError as error:
        frame = error.__traceback__
        while "self" not in frame.tb_frame.f_locals or not isinstance(
            frame.tb_frame.f_locals["self"], hybrid_ep.Buffer
        ):
            frame = frame.tb_next
        told["not made"] = repr(frame.tb_frame.f_locals["self"])
    (record,) = [each for each in records if each.levelno == logging.INFO]
    told["log"] = record.getMessage()
    told["described"] = record.name
    return told
