"""Times of dispatch and combine, beside what the same bytes cost without the library.

What is timed is what a user calls, from the call until its result is there, on every rank; the time
of an iteration is that of its slowest rank. Bytes are those of copies (a token once per rank) that
leave their rank: the rank's own tokens, weights and indices are not counted, so GB/s can be held
against a link.

    dispatch fresh    routing and rows from topk_idx, as a training step does
    dispatch cached   the rows alone, by the handle of an earlier call
    combine fresh     rows home, by the handle that a dispatch made just before
    combine cached    the same by an older handle; a backward is the other op, by such a handle
    all_to_all        the bare all_to_all_single of the same copies: buffers there, rows in order
    nccl, gloo        all of it in plain torch: permute, all_to_all_single, permute (baselines.py)

The calls of one setting take turns, iteration by iteration, so that a busy machine slows them all,
and the inputs change from call to call, so that no cache keeps them. On GPUs a call starts on all
of them at once, behind work that the hosts queued before, as in a training step: what the host does
shows where the GPU would wait for it.

    options.py    what to measure             calls.py       the library's calls
    inputs.py     tokens, routing, bytes      baselines.py   plain torch's
    clock.py      timing                      ceilings.py    the hardware's
    phases.py     the kernels alone           fits.py        time against bytes
    sweep.py      all of it, on every rank    records.py, table.py, charts.py   what is told
    layer/        a whole MoE layer                 overlap/       beside matrix products
"""

from hybrid_ep.bench.inputs import NUM_INPUTS, make_topk
from hybrid_ep.bench.options import (
    BASELINES,
    SIZINGS,
    SWEEPS,
    Load,
    Options,
    gpu_sweeps,
)
from hybrid_ep.bench.sweep import measure

__all__ = [
    "BASELINES",
    "NUM_INPUTS",
    "SIZINGS",
    "SWEEPS",
    "Load",
    "Options",
    "gpu_sweeps",
    "make_topk",
    "measure",
]
