"""What the drop-in for DeepEP's HybridEPBuffer adds to dispatch and combine.

    PYTHONPATH=. python benchmarks/drop_in.py [--ranks N] [--experts E ...] [--json FILE]

The library with top-k routing beside ``dispatch_with_permute`` with a dense map and float32 probs,
both with a bound of rows, as many SMs for both, T 4096, H 7168, K 8. They take turns; times are
those of ``hybrid-ep bench``: us of the slowest rank, medians, and "more" is the median of the
differences of a turn. A rank alone sends itself its rows: what is added does not depend on links.
The aims, for dispatch: at most 30 us more in a forward (15 at E 64), 15 in its backward.

Then the waits of the host in a blocking ``dispatch_with_permute``: the library's own for the
offsets of the rows, and what torch notices (``torch.cuda.set_sync_debug_mode``). The aim is one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hybrid_ep.backends.cuda.backend import CudaBackend
from hybrid_ep.bench.calls import least_bound, make_buffer
from hybrid_ep.bench.clock import Call, Clock
from hybrid_ep.bench.inputs import NUM_INPUTS, Inputs, make_inputs
from hybrid_ep.bench.options import Load, Options
from hybrid_ep.bench.records import describe_machine
from hybrid_ep.buffer import Buffer, combine, dispatch
from hybrid_ep.config import Config
from hybrid_ep.group import Group
from hybrid_ep.integrations.deep_ep import HybridEPBuffer, configure, indices_to_map
from hybrid_ep.launch import run_ranks
from hybrid_ep.output.tables import print_table

WAYS = ("library", "drop-in")
AIMS = {("dispatch", "forward"): {64: 15, 256: 30}, ("dispatch", "backward"): {64: 15, 256: 15}}
HEAD = ("experts", "op", "direction", *(f"{way} us" for way in WAYS), "more us", "aim")
HOST_HEAD = tuple(f"host, {way} us" for way in WAYS)


class Library:
    """Top-k routing."""

    name = WAYS[0]

    def __init__(self, buffer: Buffer, inputs: list[Inputs], max_rows: int) -> None:
        self._buffer, self._inputs, self._max_rows = buffer, inputs, max_rows

    def leaves(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[i].x, self._inputs[i].topk_weights

    def dispatch(self, i: int, x: torch.Tensor, weights: torch.Tensor) -> tuple[Any, ...]:
        """Rows, their weights, and a handle."""
        topk_idx = self._inputs[i].topk_idx
        out = dispatch(self._buffer, x, topk_idx, weights, max_rows=self._max_rows)
        return out.rows, out.weights, out.handle

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        return combine(self._buffer, rows, handle)


class DropIn:
    """Dense maps of the same routing."""

    name = WAYS[1]

    def __init__(self, inputs: list[Inputs], max_rows: int, load: Load) -> None:
        local = load.num_experts // load.num_ranks
        self._buffer = HybridEPBuffer(dist.group.WORLD, load.hidden, load.max_tokens, local)
        self._max_rows = max_rows
        sizes = load.max_tokens, load.num_experts
        dense = [indices_to_map(each.topk_idx, each.topk_weights, *sizes) for each in inputs]
        self._maps, self._probs = zip(*dense, strict=True)
        self._x = [each.x for each in inputs]

    def leaves(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[i], self._probs[i]

    def dispatch(self, i: int, x: torch.Tensor, probs: torch.Tensor) -> tuple[Any, ...]:
        """Rows, their probs, and a handle."""
        rows, probs, _, _, handle = self._buffer.dispatch_with_permute(
            hidden=x,
            routing_map=self._maps[i],
            probs=probs,
            num_permuted_tokens=self._max_rows,
            non_blocking=True,
        )
        return rows, probs, handle

    def dispatch_exactly(self) -> None:
        """In blocking mode."""
        inputs = {"hidden": self._x[0], "routing_map": self._maps[0], "probs": self._probs[0]}
        self._buffer.dispatch_with_permute(**inputs)

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        return self._buffer.combine_with_unpermute(hidden=rows, handle=handle)[0]


def calls_of(way: Library | DropIn) -> Iterator[Call]:
    """Dispatch and combine, and their backward; all are for NUM_INPUTS inputs in turn."""
    sent = [way.dispatch(i, *way.leaves(i)) for i in range(NUM_INPUTS)]

    def graph_of_dispatch(i: int) -> tuple[Any, ...]:
        leaves = tuple(leaf.detach().requires_grad_() for leaf in way.leaves(i))
        outputs = way.dispatch(i, *leaves)[:2]
        return outputs, leaves, sent[i][:2]

    def graph_of_combine(i: int) -> tuple[Any, ...]:
        rows, _, handle = sent[i]
        leaf = rows.detach().requires_grad_()
        y = way.combine(leaf, handle)
        return (y,), (leaf,), (torch.randn_like(y),)

    graphs = {
        "dispatch": [graph_of_dispatch(i) for i in range(NUM_INPUTS)],
        "combine": [graph_of_combine(i) for i in range(NUM_INPUTS)],
    }

    def backward(op: str) -> Callable[[int], Callable[[], Any]]:
        return lambda i: lambda: torch.autograd.grad(*graphs[op][i], retain_graph=True)

    def call(op: str, begin: Callable[[int], Callable[[], Any]], direction: str) -> Call:
        return Call(way.name, op, "fresh", begin, 0, direction=direction)

    yield call("dispatch", lambda i: lambda: way.dispatch(i, *way.leaves(i)), "forward")
    yield call("combine", lambda i: lambda: way.combine(sent[i][0], sent[i][2]), "forward")
    yield call("dispatch", backward("dispatch"), "backward")
    yield call("combine", backward("combine"), "backward")


def count_waits(call: Callable[[], Any], device: torch.device) -> dict[str, int] | None:
    """Of the host, in one call; None without a GPU."""
    if device.type != "cuda":
        return None
    call()  # whatever is made once
    torch.cuda.synchronize()
    own = mock.patch.object(
        CudaBackend, "_await_offsets", autospec=True, side_effect=CudaBackend._await_offsets
    )
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with own as awaited, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    seen = sum("synchroniz" in str(warning.message) for warning in caught)
    return {"for offsets": awaited.call_count, "noticed by torch": seen}


def measure(device: torch.device, options: Options) -> dict[str, Any]:
    """Of each number of experts, one after the other."""
    clock, found = Clock(device), {"backend": "", "records": [], "waits": {}}
    for load in options.loads(dist.get_world_size()):
        (sms,) = options.sms
        config = Config(num_sms_publish=sms, num_sms_dispatch=sms, num_sms_combine=sms)
        configure(topk=load.topk, max_tokens=load.max_tokens, num_sms=sms)
        buffer = make_buffer(load, device, "auto", config)
        inputs = [make_inputs(load, dist.get_rank(), i, device) for i in range(NUM_INPUTS)]
        max_rows = least_bound(buffer, inputs)
        library, drop_in = Library(buffer, inputs, max_rows), DropIn(inputs, max_rows, load)
        found["records"] += compare(library, drop_in, clock, options, load.num_experts)
        told = Group().gather(count_waits(drop_in.dispatch_exactly, device))
        found["waits"][load.num_experts] = told
        found["backend"] = buffer.backend
        dist.barrier()
        buffer.destroy()
    return found


def compare(
    library: Library, drop_in: DropIn, clock: Clock, options: Options, experts: int
) -> list[dict[str, Any]]:
    """A record for each op and direction."""
    of_library, of_drop_in = (list(calls_of(way)) for way in (library, drop_in))
    pairs = list(zip(of_library, of_drop_in, strict=True))
    calls = [call for pair in pairs for call in pair]
    clock.take_turns(calls, iters=options.iters, warmup=options.warmup)
    clock.time_hosts(calls)
    return [
        {
            "experts": experts,
            "op": a.op,
            "direction": a.direction,
            "us": [statistics.median(call.us) for call in (a, b)],
            "more_us": statistics.median(y - x for x, y in zip(a.us, b.us, strict=True)),
            "host_us": [statistics.median(call.host_us or [0]) or None for call in (a, b)],
        }
        for a, b in pairs
    ]


def cells(record: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    aim = AIMS.get((record["op"], record["direction"]), {}).get(record["experts"])
    told = "-" if aim is None else f"{aim} {'met' if record['more_us'] <= aim else 'MISSED'}"
    hosts = ["-" if us is None else f"{us:.1f}" for us in record["host_us"]]
    us = [f"{us:.1f}" for us in record["us"]]
    first = str(record["experts"]), record["op"], record["direction"]
    return (*first, *us, f"{record['more_us']:+.1f}", told, *hosts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--experts", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--sms", type=int, default=48)
    parser.add_argument("--iters", type=int, default=50)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = Options(
        tokens=(args.tokens,),
        hidden=(args.hidden,),
        experts=tuple(args.experts),
        topk=(args.topk,),
        sms=(args.sms,),
        iters=args.iters,
    )
    try:
        options.check(args.ranks)
    except ValueError as error:
        parser.error(str(error))
    found = run_ranks(measure, args.ranks, options, device=args.device)[0]
    machine = describe_machine(args.device, args.ranks)
    title = f"drop-in beside {found['backend']}, {args.ranks} rank(s), {machine['device']}"
    rows = [cells(record) for record in found["records"]]
    print_table(title, (*HEAD, *HOST_HEAD), rows, texts=3, keys=3)
    for experts, told in found["waits"].items():
        print(f"waits of the host in a blocking dispatch, E {experts}, by rank: {told}")
    if args.json:
        args.json.write_text(
            json.dumps({**machine, "command": shlex.join(sys.argv), **found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
