"""A model of dispatch across nodes: chunks over the network, pulled over NVLink as they arrive.

```
sender    chunk --network card--> latency --> window at the rail peer
receiver                                      window --passed on--> --pull over NVLink--> rows
sender    credit <------------- latency <---- free
```

No measurement has confirmed this model (``plan.UNCONFIRMED``). It is what the nvshmem backend does
(docs/several_nodes.md), with the rates that it is given:

- All ranks are alike and start at once, their tokens published. Then what comes to a rank from the
  node d before its own is what it sends to the node d behind, at the same times, so one rank stands
  for all: one network card that sends, one NVLink that pulls. No receiving card is ever crowded,
  as those of a cluster may be, where ranks are late and routing is uneven.
- A chunk holds records that one node needs; the chunks go to the rail peers in turn. To send one
  takes a credit of that peer, which comes back when all ranks there have pulled the chunk.
- Records whose tokens follow each other are a run, and each run is one put with a signal. The card
  starts the next put while bytes of the last are under way, so a chunk takes as long as its bytes
  or as its puts, whichever is longer. Runs are counted as their expectation over even routing.
- The owner of a window waits for all runs of a chunk and tells the other ranks of its node.
- The pull takes chunks in the order of arrival. The node's own tokens are there from the start and
  are pulled in the gaps between chunks (row by row, so they delay none).
- A link carries its bytes one chunk at a time at its full rate; latency delays, occupies nothing.
  Credits take no time of the card. The stores of rows by SMs, routing and the publish copy are
  left out.

Times are microseconds, rates GB/s (1e9 bytes), both per rank and direction.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from hybrid_ep.integers import check_counts
from hybrid_ep.plan.plan import NETWORK_GBS, NVLINK_GBS, Plan

NETWORK_LATENCY_US = 5.0  # assumed: a put with its signal, or a credit, one way
NVLINK_LATENCY_US = 2.0  # assumed: from the signal to the last bytes of a pull, beside their rate
PUT_US = 0.1  # assumed: of the card for a put and its signal, however few the bytes
PASS_ON_US = 2.0  # assumed: until the owner has seen a signal and the other ranks see the owner's

Interval = tuple[float, float]
Verb = Callable[[int], None]


@dataclass(frozen=True)
class Pipeline:
    """What one rank sends and pulls in a dispatch, and over what.

    Attributes:
        num_peers: rail peers, one on each other node.
        tokens_per_peer: records that each of them gets.
        record_bytes: bytes of one over the network.
        pull_bytes: bytes over NVLink that one causes where it arrives; a mean, as routing is even.
        local_pull_bytes: bytes over NVLink of the node's own tokens, there from the start.
        chunk_tokens: records of a chunk; the last one to a peer has what is left.
        credits: chunks that may be under way to a peer, all channels together; None: any number.
        network_gbs: rate of the network card.
        nvlink_gbs: rate of NVLink.
        network_latency_us: of a chunk, and again of a credit.
        nvlink_latency_us: of a pull.
        density: share of the tokens that a peer gets, above 0 and at most 1.
        put_us: time of the card for a put with its signal.
        pass_on_us: from the arrival of a chunk to when all ranks of the node know of it.

    Raises:
        ValueError: a value breaks a rule.
    """

    num_peers: int
    tokens_per_peer: int
    record_bytes: int
    pull_bytes: float
    local_pull_bytes: float
    chunk_tokens: int
    credits: int | None = None
    network_gbs: float = NETWORK_GBS
    nvlink_gbs: float = NVLINK_GBS
    network_latency_us: float = NETWORK_LATENCY_US
    nvlink_latency_us: float = NVLINK_LATENCY_US
    density: float = 1.0
    put_us: float = PUT_US
    pass_on_us: float = PASS_ON_US

    def __post_init__(self) -> None:
        check_counts(
            num_peers=self.num_peers,
            tokens_per_peer=self.tokens_per_peer,
            record_bytes=self.record_bytes,
            chunk_tokens=self.chunk_tokens,
            credits=1 if self.credits is None else self.credits,
        )
        for name in ("network_gbs", "nvlink_gbs"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density!r}")
        for name in (
            *("pull_bytes", "local_pull_bytes", "network_latency_us", "nvlink_latency_us"),
            *("put_us", "pass_on_us"),
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}")

    @property
    def chunks_per_peer(self) -> int:
        """Chunks that each peer gets."""
        return -(-self.tokens_per_peer // self.chunk_tokens)

    @property
    def network_us(self) -> float:
        """Time that the network card takes for its bytes."""
        return self.send_us(self.num_peers * self.tokens_per_peer)

    @property
    def nvlink_us(self) -> float:
        """Time that NVLink takes for its bytes."""
        return self.local_us + self.pull_us(self.num_peers * self.tokens_per_peer)

    @property
    def local_us(self) -> float:
        """The part of it that needs no network."""
        return self.local_pull_bytes / self.nvlink_gbs / 1e3

    def send_us(self, num_tokens: int) -> float:
        """Time that the network card takes for the bytes of so many records."""
        return num_tokens * self.record_bytes / self.network_gbs / 1e3

    def chunk_us(self, num_tokens: int) -> float:
        """Time that the network card is busy with a chunk of so many records, by its runs.

        A record begins a run where the token before it does not go to the same node.
        """
        runs = 1 + (num_tokens - 1) * (1 - self.density)
        return max(self.send_us(num_tokens), runs * self.put_us)

    def pull_us(self, num_tokens: int) -> float:
        """Time that NVLink is busy with so many records that arrived."""
        return num_tokens * self.pull_bytes / self.nvlink_gbs / 1e3


@dataclass(frozen=True)
class Outcome:
    """What the model gives for a dispatch.

    Attributes:
        total_us: from the first send to the last row.
        network_busy_us: time that the network card was busy.
        nvlink_busy_us: time that NVLink was busy.
        both_busy_us: time that both were.
        most_under_way: chunks that were under way to one peer at once, at most.
        chunks: chunks sent and pulled.
    """

    total_us: float
    network_busy_us: float
    nvlink_busy_us: float
    both_busy_us: float
    most_under_way: int
    chunks: int

    @property
    def network_utilisation(self) -> float:
        """Share of the time that the network card was busy."""
        return self.network_busy_us / self.total_us

    @property
    def nvlink_utilisation(self) -> float:
        """Share of the time that NVLink was busy."""
        return self.nvlink_busy_us / self.total_us

    @property
    def overlap(self) -> float:
        """Share of the shorter side's work that hid behind the longer one's; 1 is the best."""
        shorter = min(self.network_busy_us, self.nvlink_busy_us)
        return self.both_busy_us / shorter if shorter else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields and what follows from them."""
        return {
            **asdict(self),
            "network_utilisation": self.network_utilisation,
            "nvlink_utilisation": self.nvlink_utilisation,
            "overlap": self.overlap,
        }


def pipeline_of(plan: Plan, *, credits: int | None, chunk_tokens: int, **costs: float) -> Pipeline:
    """The pipeline of a plan's dispatch with its expected traffic and its rates.

    Args:
        plan: of several nodes.
        credits: chunks that may be under way to a peer; None: any number.
        chunk_tokens: tokens of a chunk.
        costs: the latencies, ``put_us`` and ``pass_on_us`` of a Pipeline, where they are not its
            defaults.

    Raises:
        ValueError: the plan has one node.
    """
    if plan.shape.num_nodes == 1:
        raise ValueError("a pipeline across nodes must have at least 2 nodes, got 1")
    phase = plan.dispatch
    rates = {bound.limit: bound.gbs for bound in phase.bounds}
    arriving = phase.network.expected / phase.row_bytes
    local_pull_bytes = phase.nvlink.expected / plan.shape.num_nodes
    tokens_per_peer = max(1, round(arriving / (plan.shape.num_nodes - 1)))
    return Pipeline(
        num_peers=plan.shape.num_nodes - 1,
        tokens_per_peer=tokens_per_peer,
        record_bytes=phase.row_bytes,
        pull_bytes=(phase.nvlink.expected - local_pull_bytes) / arriving,
        local_pull_bytes=local_pull_bytes,
        chunk_tokens=chunk_tokens,
        credits=credits,
        network_gbs=rates["network"],
        nvlink_gbs=rates["NVLink"],
        density=min(1.0, tokens_per_peer / plan.shape.max_tokens),
        **costs,
    )


def simulate(pipeline: Pipeline) -> Outcome:
    """Run the pipeline to its end; the same pipeline always gives the same outcome."""
    run = _Run(pipeline)
    run.to_the_end()
    pulls = fill_gaps(run.pulls, pipeline.local_us)
    return Outcome(
        total_us=pulls[-1][1] + pipeline.nvlink_latency_us,
        network_busy_us=_length(run.sends),
        nvlink_busy_us=_length(pulls),
        both_busy_us=overlap_of(run.sends, pulls),
        most_under_way=run.most_under_way,
        chunks=len(run.sends),
    )


def fewest_credits(pipeline: Pipeline, *, share: float = 0.98) -> int:
    """The fewest credits with which unlimited ones save at most ``1 - share`` of the time.

    Args:
        pipeline: its own credits do not matter.
        share: of the speed with unlimited credits, above 0 and at most 1.

    Raises:
        ValueError: the share is none.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share!r}")
    bound = simulate(replace(pipeline, credits=None)).total_us / share * (1 + 1e-12)
    fewest, enough = 1, pipeline.chunks_per_peer
    while fewest < enough:  # more credits are never slower
        middle = (fewest + enough) // 2
        if simulate(replace(pipeline, credits=middle)).total_us <= bound:
            enough = middle
        else:
            fewest = middle + 1
    return fewest


class _Run:
    """The queue of events and the state that they change."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.now = 0.0
        self.sends: list[Interval] = []
        self.pulls: list[Interval] = []
        self.most_under_way = 0
        self._events: list[tuple[float, int, Verb, int]] = []
        self._num_events = 0
        self._under_way = [0] * pipeline.num_peers
        self._card_busy = self._nvlink_busy = False
        self._arrived: deque[int] = deque()

    def to_the_end(self) -> None:
        """Handle the events by time, and of those at one time in the order they were made."""
        self._send_next()
        while self._events:
            self.now, _, verb, chunk = heapq.heappop(self._events)
            verb(chunk)

    def _at(self, time: float, verb: Verb, chunk: int) -> None:
        heapq.heappush(self._events, (time, self._num_events, verb, chunk))
        self._num_events += 1

    def _peer(self, chunk: int) -> int:
        """The chunks go round the peers."""
        return chunk % self.pipeline.num_peers

    def _tokens(self, chunk: int) -> int:
        begin = chunk // self.pipeline.num_peers * self.pipeline.chunk_tokens
        return min(self.pipeline.chunk_tokens, self.pipeline.tokens_per_peer - begin)

    def _send_next(self) -> None:
        """Credits come back in the order of the sends, so no later chunk could go before this."""
        chunk, limit = len(self.sends), self.pipeline.credits
        peer = self._peer(chunk)
        no_credit = limit is not None and self._under_way[peer] == limit
        all_sent = chunk == self.pipeline.num_peers * self.pipeline.chunks_per_peer
        if self._card_busy or no_credit or all_sent:
            return
        self._card_busy = True
        self._under_way[peer] += 1
        self.most_under_way = max(self.most_under_way, self._under_way[peer])
        end = self.now + self.pipeline.chunk_us(self._tokens(chunk))
        self.sends.append((self.now, end))
        self._at(end, self._sent, chunk)

    def _sent(self, chunk: int) -> None:
        self._card_busy = False
        way = self.pipeline.network_latency_us + self.pipeline.pass_on_us
        self._at(self.now + way, self._arrive, chunk)
        self._send_next()

    def _arrive(self, chunk: int) -> None:
        self._arrived.append(chunk)
        self._pull_next()

    def _pull_next(self) -> None:
        if self._nvlink_busy or not self._arrived:
            return
        self._nvlink_busy = True
        chunk = self._arrived.popleft()
        end = self.now + self.pipeline.pull_us(self._tokens(chunk))
        self.pulls.append((self.now, end))
        self._at(end, self._pulled, chunk)

    def _pulled(self, chunk: int) -> None:
        self._nvlink_busy = False
        way_home = self.pipeline.nvlink_latency_us + self.pipeline.network_latency_us
        self._at(self.now + way_home, self._credit, chunk)
        self._pull_next()

    def _credit(self, chunk: int) -> None:
        self._under_way[self._peer(chunk)] -= 1
        self._send_next()


def fill_gaps(busy: Iterable[Interval], amount: float) -> list[Interval]:
    """Put ``amount`` of work, there from time 0, where a resource is not busy, as early as may be.

    Args:
        busy: intervals of other work, ascending, none over another.
        amount: time that the work takes.

    Returns:
        list: all intervals, ascending.
    """
    filled: list[Interval] = []
    free_from = 0.0
    for begin, end in busy:
        take = min(amount, begin - free_from)
        if take > 0:
            filled.append((free_from, free_from + take))
            amount -= take
        filled.append((begin, end))
        free_from = end
    if amount > 0:
        filled.append((free_from, free_from + amount))
    return filled


def overlap_of(some: list[Interval], others: list[Interval]) -> float:
    """Time that lies in an interval of both lists, each ascending and without overlap in itself."""
    i = j = 0
    both = 0.0
    while i < len(some) and j < len(others):
        begin = max(some[i][0], others[j][0])
        end = min(some[i][1], others[j][1])
        both += max(0.0, end - begin)
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return both


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
