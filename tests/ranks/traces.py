"""Calls of a Buffer that traces."""

from hybrid_ep import Config, combine, dispatch
from tests.cases import Case
from tests.launch import Rank


def write(me: Rank, case: Case, calls: int, path: str) -> None:
    inputs = case.inputs(me.rank)
    buffer = me.buffer(**case.sizes(), config=Config(timeout_s=20, trace=True))
    for _ in range(calls):
        out = dispatch(buffer, inputs.x.to(me.device), inputs.topk_idx.to(me.device), max_rows=2000)
        combine(buffer, out.rows, out.handle)
    buffer.write_trace(path)
    buffer.destroy()
