"""Faults: what a kernel noted when it ended without its result, and the exception for it."""

from __future__ import annotations

from typing import Any

from hybrid_ep.errors import GIVE_UP_REASONS, PeerError, TooManyExperts, UnknownExpert
from hybrid_ep.shape import Shape

_PHASES = ("route", "dispatch", "combine", "combine")  # Phase in csrc/layout/buffer_layout.h
# FaultKind in csrc/layout/runtime_state.h
_OTHER_CALL, _BAD_EXPERT, _PEER_GAVE_UP, _IN_VAIN, _TOO_MANY_EXPERTS = 2, 3, 4, 5, 6
_ROUTES = (1 << 22) - 1  # the bits of a route's number in an announcement
_SIZED = {"route": "topk_idx", "dispatch": "x, scales or weights", "combine": "rows or values"}


def error_of(
    fault: Any, shape: Shape, rank: int, timeout_s: float, layout_base: int, *, is_alone: bool
) -> Exception:
    """What a call on the Buffer raises after a fault.

    Args:
        fault: a FaultReport of csrc/call_state.h.
        shape: of the Buffer.
        rank: this one.
        timeout_s: its deadline, seconds.
        layout_base: of the layouts of the Buffer.
        is_alone: this process has no other Buffer.
    """
    if fault.kind == _BAD_EXPERT:
        value = fault.seen - (1 << 64) if fault.seen >> 63 else fault.seen
        return UnknownExpert(
            f"topk_idx must lie in [-1, num_experts={shape.num_experts}), got {value} at token "
            f"{fault.peer}, top-k slot {fault.channel}; this Buffer cannot be used any more"
        )
    if fault.kind == _TOO_MANY_EXPERTS:
        return TooManyExperts(rank=fault.peer, experts=fault.seen, ends=True)
    phase = _PHASES[fault.phase]
    if fault.kind == _OTHER_CALL:
        reason = _difference(fault.seen, fault.mine, layout_base, phase)
    elif fault.kind == _PEER_GAVE_UP:
        reason = f"the peer makes no more calls, {GIVE_UP_REASONS[fault.seen]}"
    elif fault.kind == _IN_VAIN:
        reason = "no signal: another rank has given up waiting for it"
    else:
        reason = f"no signal within {timeout_s:g} s, its last was in call {fault.seen >> 16}"
        if shape.num_nodes > 1 and not is_alone:
            reason += (
                "; across nodes, calls of several Buffers at once must have the same order on all "
                "ranks"
            )
    where = {"peer": fault.peer, "phase": phase, "call": fault.epoch, "channel": fault.channel}
    return PeerError(rank=rank, reason=reason, **where)


def _difference(theirs: int, mine: int, base: int, phase: str) -> str:
    """In words, what two announcements of one verb say (csrc/layout/announcement.h).

    Args:
        theirs: what the peer announced.
        mine: what this rank announced; 0: a flag told, which knows no more than a signature.
        base: of the layouts of this Buffer.
        phase: that this rank waited in.
    """
    number = ""
    if mine != 0:
        announced = mine, theirs
        here, there = (_PHASES[word >> 16 & 3] for word in announced)
        number = f", call {mine >> 40:,} of the Buffer"  # the same: others are not compared
        if here != there:
            return f"the peer makes another call; here: {here}{number}; there: {there}{number}"
        routes = [(word >> 18) - base & _ROUTES for word in announced]
        if routes[0] != routes[1]:
            calls = (f"{here}{number}, the layout of route {route:,}" for route in routes)
            return "the peer makes this call with another layout; here: {}; there: {}".format(
                *calls
            )
    return (
        f"the peer makes this call with other sizes, dtypes or num_sms; here and there: {phase}"
        f"{number}; compare num_sms, and the shapes and dtypes of {_SIZED[phase]} on both ranks"
    )
