"""Times of a whole MoE layer: forward, backward and a training step.

A layer is the router, dispatch, the experts and combine. Ways of running it share the router, the
experts and the tokens, and take turns:

    hybrid_ep      MoELayer on the backend named, for each sizing and number of SMs
    nccl, gloo     plain torch: sort, all_to_all_single and their gradients (plain.py)
    experts        no communication and no router: the same experts on the same rows
    products       the experts' grouped products alone, on the same rows

A step is forward, backward and plain SGD of the router and the experts; its learning rate is 0, so
that routing stays what it was and the memory traffic is that of any rate. The share of
communication is the time beyond that of ``experts``: routing, moving rows, summing them.

    options.py    what to measure, the named shapes     plain.py    the layer in plain torch
    ways.py       the four ways                         sweep.py    all of it, on every rank
    table.py, chart.py   what is told
"""

from hybrid_ep.bench.layer.options import SHAPES, LayerOptions, LayerShape
from hybrid_ep.bench.layer.sweep import measure_layers

__all__ = ["SHAPES", "LayerOptions", "LayerShape", "measure_layers"]
