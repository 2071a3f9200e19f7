"""The targets of the suite: a backend, a kind of device, and how ranks are divided into nodes.

A test of tests/suite or tests/gpu runs once on each target of its folder. A test, or one of its
parameters, that a target cannot run names the target and says why:

    @pytest.mark.not_on("nodes", why="a process takes part in one NVSHMEM job")
    pytest.param(4, marks=pytest.mark.only_on("nodes", why="two nodes of two ranks"))

Such a pair of test and target is not collected. ``-m nvlink`` selects a target, ``-m gpu`` all but
``torch_cpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
import torch

from hybrid_ep.launch import rank_device
from tests.cases import Case


@dataclass(frozen=True)
class Target:
    """What a test runs on.

    Attributes:
        name: also the marker of its tests.
        backend: of the Buffers.
        device: ``"cpu"`` or ``"cuda"``; ranks may outnumber GPUs.
        nodes: ``"any"`` (a case has its own), ``"one"`` (a case's nodes do not count) or
            ``"several"`` (ranks are divided where the case does not say how).
        group: backend of the ranks' group, as ``init_process_group`` takes it; None names none.
    """

    name: str
    backend: str
    device: str
    nodes: str
    group: str | None = "gloo"

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def has_kernels(self) -> bool:
        return self.backend != "torch"

    @property
    def widest(self) -> torch.dtype:
        """The most exact dtype of a payload that can be summed."""
        return torch.float32 if self.has_kernels else torch.float64

    def ranks_per_node(self, num_ranks: int) -> int | None:
        """The division of a Buffer that asks for none: 2x1, 3x1, 2x2, 3x2, 2x4."""
        if self.nodes != "several":
            return None
        return {4: 2, 6: 2, 8: 4}.get(num_ranks, 1)

    def divided(self, case: Case) -> Case:
        """The case on the nodes that it has on this target."""
        if self.nodes == "one":
            return replace(case, ranks_per_node=None)
        ranks_per_node = case.ranks_per_node or self.ranks_per_node(case.num_ranks)
        return replace(case, ranks_per_node=ranks_per_node)

    def rank_device(self, rank: int, num_ranks: int) -> torch.device:
        """The device of a rank; GPUs are dealt out in turn."""
        if not self.on_gpu or not torch.cuda.is_available():
            return torch.device("cpu")
        if self.backend == "nvshmem":  # it wants equally many ranks on each GPU in use
            gpus = torch.cuda.device_count()
            used = max(n for n in range(1, gpus + 1) if num_ranks % n == 0 or num_ranks < n)
            return torch.device("cuda", rank % used)
        return rank_device(rank)


TORCH_CPU = Target("torch_cpu", "torch", "cpu", nodes="any")
# over NCCL where each rank has a GPU of its own
TORCH_GPU = Target("torch_gpu", "torch", "cuda", nodes="any", group="cpu:gloo,cuda:nccl")
NVLINK = Target("nvlink", "nvlink", "cuda", nodes="one")
NODES = Target("nodes", "nvshmem", "cuda", nodes="several")

SAME_PYTHON = "what it checks does not depend on the tensors' device: torch_cpu shows it"

SAME_OPS = "a compiler sees the ops, which nvlink and nodes share: nvlink shows it"

ALL = (TORCH_CPU, TORCH_GPU, NVLINK, NODES)
KERNELS = (NVLINK, NODES)


def as_param(target: Target, *values: object, id: str = "") -> object:
    """The target, and values of other arguments, as a parameter of a test."""
    marks = [getattr(pytest.mark, target.name)]
    if target.on_gpu:
        marks.append(pytest.mark.gpu)
    return pytest.param(target, *values, id=f"{target.name}{id and '-'}{id}", marks=marks)


def each_of(targets: Iterable[Target]) -> Callable[[pytest.Metafunc], None]:
    """``pytest_generate_tests`` of a folder whose tests run on these targets."""

    def generate(metafunc: pytest.Metafunc) -> None:
        named = [m.args[0] for m in metafunc.definition.iter_markers("parametrize")]
        if "target" in metafunc.fixturenames and not any("target" in names for names in named):
            metafunc.parametrize("target", list(map(as_param, targets)), indirect=True)

    return generate


def can_run(item: pytest.Item) -> bool:
    """Whether no mark of the test or of its parameters keeps it from its target."""
    callspec = getattr(item, "callspec", None)
    target = callspec.params.get("target") if callspec else None
    if target is None:
        return True
    for mark in [*item.iter_markers("not_on"), *item.iter_markers("only_on")]:
        unknown = set(mark.args) - {each.name for each in ALL}
        assert not unknown and mark.kwargs["why"], f"{item.nodeid}: {mark}"
        if (target.name in mark.args) == (mark.name == "not_on"):
            return False
    return True


def place(item: pytest.Item) -> tuple[int, int]:
    """Sorts tests by target and number of ranks, so that a worker keeps few ranks alive."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    target = params.get("target", TORCH_CPU)
    if target is TORCH_CPU:  # its ranks cost little: files in order
        return 0, 0
    case = params.get("case")
    by_name = [each.name for each in ALL].index(target.name)
    return by_name, params.get("num_ranks") or getattr(case, "num_ranks", 0)
