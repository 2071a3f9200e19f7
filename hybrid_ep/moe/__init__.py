"""A dropless mixture-of-experts layer on dispatch and combine, made to be copied and changed.

    x [T, H] --Router--> topk_idx, topk_weights [T, K]
      --dispatch--> rows [M, H] --GroupedExperts--> rows [M, H] --combine--> y [T, H]

Every rank calls the layer with its own tokens and holds the experts that the Buffer gives it. An
expert is drawn from a seed of its own, so the ranks' experts together are those of one process that
holds them all, whatever the number of ranks.

Gradients: an expert sees the tokens of all ranks and so gets the sum of all ranks' gradients with
nothing to reduce. For a loss that is the mean over R ranks, call ``(loss / R).backward()`` and
all-reduce (sum) the gradients of ``replicated_parameters(model)``.

    layer.py          MoELayer; which parameters are the experts'
    router.py         Router
    experts.py        GroupedExperts, and their gradients
    products.py       one matrix product per group of rows
    swiglu.py         the activation between the products, and its gradient, in torch ops
    swiglu_triton.py  the same in one kernel each; imported where Triton and a GPU exist
    seeds.py          weights drawn from a seed
"""

from hybrid_ep.moe.experts import GroupedExperts
from hybrid_ep.moe.layer import (
    WEIGHT_PLACES,
    MoELayer,
    MoEOutput,
    expert_parameters,
    replicated_parameters,
)
from hybrid_ep.moe.products import grouped_mm
from hybrid_ep.moe.router import Router

__all__ = [
    "WEIGHT_PLACES",
    "GroupedExperts",
    "MoELayer",
    "MoEOutput",
    "Router",
    "expert_parameters",
    "grouped_mm",
    "replicated_parameters",
]
