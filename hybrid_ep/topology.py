"""Which rank lives where: experts on ranks, ranks on nodes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Topology:
    """The group's ranks, in nodes of equal size; rank r is local rank ``r % ranks_per_node``.

    Attributes:
        rank: this process.
        num_ranks: size of the group.
        ranks_per_node: ranks that reach each other's memory by load and store.
    """

    rank: int
    num_ranks: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if not 1 <= self.ranks_per_node <= self.num_ranks or self.num_ranks % self.ranks_per_node:
            raise ValueError(
                f"ranks_per_node must divide the number of ranks, got ranks_per_node="
                f"{self.ranks_per_node} with {self.num_ranks} ranks"
            )

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the group."""
        return self.num_ranks // self.ranks_per_node

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """The place of this rank within its node."""
        return self.rank % self.ranks_per_node


def host_name() -> str:
    """Names this host: ranks with the same name can map each other's memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


def gpu_uuid(device: torch.device) -> str:
    """Names a GPU, whatever index a process has it under."""
    return str(torch.cuda.get_device_properties(device).uuid)


def ranks_of_a_host(hosts: Sequence[str]) -> int:
    """The ranks of a node, by the hosts of all ranks.

    Hosts are nodes where each has as many ranks as any other and they follow each other, as
    launchers number them; otherwise there is one node.
    """
    ranks = len(hosts) // len(set(hosts))
    runs = [set(hosts[begin : begin + ranks]) for begin in range(0, len(hosts), ranks)]
    follow = all(len(run) == 1 for run in runs) and len(runs) == len(set(hosts))
    return ranks if follow else len(hosts)
