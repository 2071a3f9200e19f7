"""How much of dispatch and combine hides behind matrix products on another stream.

A rank has two streams: one of high priority for dispatch and combine, one of the default priority
for the products. Each is timed alone, and both together from the same moment on.

    shorter = min(communication alone, products alone)
    hidden  = (communication alone + products alone - both) / shorter
    allowed = the same for an ideal machine, in which work is a number of SMs times a time:
              the products take all SMs that communication leaves, and lose nothing else

cuBLAS and CUTLASS launch one block per SM, and each block has its fixed share of the tiles. Blocks
that find no free SM start when others end, so that a product beside communication can take twice as
long. Therefore products run in two ways: on ``all`` SMs, or on the ``rest``, where those that are
launched while communication lasts leave its SMs free (``products.py``).

    options.py    what to measure           streams.py   the two streams and their clock
    products.py   the products              sweep.py     all of it, on every rank
    hiding.py     the arithmetic above      table.py, chart.py   the report
"""

from hybrid_ep.bench.overlap.options import OverlapOptions
from hybrid_ep.bench.overlap.sweep import measure_overlap

__all__ = ["OverlapOptions", "measure_overlap"]
