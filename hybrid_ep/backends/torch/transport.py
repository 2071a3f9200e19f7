"""How the tables of a Buffer's calls travel: what a rank has of each token, for its peers.

    one rank             nothing travels
    one host, on a CPU   published in an outbox that the ranks share (host_memory.py)
    NCCL                 rows are picked and sent, all to all (collectives.py)
    else                 rows are picked and sent as messages (messages.py)

A table that is published, or does not travel, is whole: it has the tokens of all ranks. Of one that
is sent a rank gets its copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_ep.backends.torch.agreement import Calls
from hybrid_ep.backends.torch.carrier import NOTHING, choose_carrier
from hybrid_ep.backends.torch.collectives import Collectives
from hybrid_ep.backends.torch.fresh import Fresh, padded
from hybrid_ep.backends.torch.host_memory import HostOutbox, map_together
from hybrid_ep.backends.torch.layout import Layout
from hybrid_ep.backends.torch.messages import Messages, tag_of
from hybrid_ep.group import Group
from hybrid_ep.shape import Shape


class Transport:
    """See the module.

    Args:
        shape: the sizes of a call.
        group: the ranks.
        timeout_s: seconds to wait for a peer.
        number: as of ``TorchBackend``, like ``last_call``.

    Attributes:
        carrier: of what is sent.
        calls: by which the ranks agree that something comes.
        may_share: whether tables are published, as far as is known.

    Raises:
        SetupError: the group has no backend that carries tensors on its device.
    """

    def __init__(
        self, shape: Shape, group: Group, timeout_s: float, number: int, last_call: int
    ) -> None:
        self._shape, self._rank = shape, group.rank
        self.carrier = NOTHING
        if group.num_ranks > 1:
            self.carrier = choose_carrier(group.process_group, group.device, group.shares_gpus())
        exchange = Messages(group, timeout_s, tag_of(number))
        if self.carrier.is_nccl:
            exchange = Collectives(group, timeout_s)
            exchange.meet()
        self.calls = Calls(exchange, shape, number, last_call)
        on_cpu = group.device.type == "cpu"
        self.may_share = on_cpu and not (self.carrier.is_nothing or self.carrier.is_nccl)
        self._outbox: HostOutbox | None = None

    def __str__(self) -> str:
        way = "all_to_all_single" if self.carrier.is_nccl else "point-to-point messages"
        shared = ", tokens by shared memory on one host" if self.may_share else ""
        return f"{way}, carried by {self.carrier}{shared}"

    def drop(self) -> None:
        """Let go of memory and of what a failed exchange left."""
        self._outbox = None
        self.calls.exchange.drop()

    def share(
        self, phase: str, words: list[int], tables: list[Tensor | None]
    ) -> list[Tensor | None] | None:
        """Publish tables ``[T, W]`` of integers for the call that ``words`` will tell of.

        Returns:
            list: ``[R * max_tokens, W]``, the tables of all ranks once they have told each other;
            None where the ranks share no memory.
        """
        if not self.may_share:
            return None
        calls = self.calls
        needed = sum(t.shape[1] * t.element_size() for t in tables if t is not None)
        if self._outbox is None or self._outbox.token_bytes < needed:  # anew for wider tokens
            calls.compare(calls.tell(phase, words))  # so that all ranks are here
            size = HostOutbox.size(self._shape, needed)
            mapped = map_together(calls.exchange, size)
            self.may_share = mapped is not None
            self._outbox = mapped and HostOutbox(mapped, self._shape, self._rank, needed)
            if mapped is None:
                return None
        # a peer that is already in the call has its tokens there, at places that the widths give
        calls.exchange.call = phase, calls.last + 1
        calls.exchange.open()
        return self._outbox.publish(tables, calls.last)

    def pick(self, tables: list[Tensor | None], tokens: Tensor) -> list[Any]:
        """What ``Calls.send`` sends of tables: the rows of these tokens."""
        return [t if t is None else self.calls.exchange.pick(t, tokens) for t in tables]

    def receive(self, sent: list[Any]) -> list[Any]:
        """The tables that ``Calls.send`` sent; one that was not is what it is."""
        return [t if t is None else self.calls.exchange.receive(t) for t in sent]

    def send_experts(self, fresh: Fresh, by_place: Tensor | None = None) -> None:
        """Those of each copy to the rank that gets it, over NCCL; else all to all ranks.

        ``by_place``, weights, go along.
        """
        layout, experts = fresh.layout, fresh.experts
        if self.carrier.is_nccl:
            if by_place is not None:
                experts = torch.cat([experts, by_place.view(torch.int32)], dim=1)
            picked = self.pick([experts], layout.send_tokens)
            (fresh.arriving,) = self.calls.send(picked, layout, "route")
        else:
            if not self.carrier.is_nothing:
                mine = padded(experts, self._shape)
                experts = self.calls.exchange.gather(mine)
            fresh.find_copies(experts)

    def send_with_experts(self, fresh: Fresh, by_place: Tensor | None) -> list[Any]:
        """Send what was picked, as the ranks have agreed, and weights with the experts."""
        self.send_experts(fresh, by_place)
        self.calls.last += 1  # as the ranks have agreed
        sent = self.calls.send(fresh.picked, fresh.layout, "dispatch")
        return [*sent, None if by_place is None else fresh.arriving]

    def send_tokens(
        self, tables: list[Tensor | None], sizes: tuple[int, ...], layout: Layout
    ) -> tuple[list[Any], bool]:
        """Tell all ranks that a dispatch comes, and publish or send its tables.

        Returns:
            tuple: what ``receive`` makes the tables of; and whether they hold the tokens of all
            ranks.
        """
        calls = self.calls
        words = calls.describe("dispatch", sizes, layout)
        whole = tables if self.carrier.is_nothing else self.share("dispatch", words, tables)
        told = calls.tell("dispatch", words)
        if whole is not None:
            calls.hear(told)
            return whole, True
        picked = self.pick(tables, layout.send_tokens)
        calls.hear(told)
        return calls.send(picked, layout, "dispatch"), False
