"""Dispatch and combine between a Buffer and its backend.

    calls          dispatch and combine as called: the rules, then one of three ways
    rules          what tensors must be, for a Shape
    verbs          route, dispatch and combine: at once, and as ops of torch
    gradients      what is saved, and the two backward functions
    registration   how a verb becomes an op, and what keeps compiled verbs in program order
    checkpoint     recomputation that replays the routing
    topk           the choice of experts in a checkpointed region
    replay         what the forward of a region keeps, and its recomputations take
    round_trip     a token between every pair of ranks, when a Buffer of several nodes is made

A change of a fake implementation or of a gradient needs another schema or overload name: the
compile caches of torch do not notice it.
"""

from hybrid_ep.ops.calls import combine, dispatch
from hybrid_ep.ops.checkpoint import SAC_SAVE_OPS, checkpoint
from hybrid_ep.ops.registration import prepare_order
from hybrid_ep.ops.rules import wrong_type

__all__ = [
    "SAC_SAVE_OPS",
    "checkpoint",
    "combine",
    "dispatch",
    "prepare_order",
    "wrong_type",
]
