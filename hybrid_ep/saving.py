"""State dicts of experts, the same for any number of ranks.

Each rank holds experts of its own under the same names. ``torch.distributed.checkpoint`` takes
tensors of one name for copies and saves those of one rank. So a state dict has each weight of the
experts as a ``DTensor``, sharded by experts over the ranks of the Buffer:

    parameter [E_local, H, F]
      state_dict       DTensor [E, H, F], which shares the parameter's memory: loaded in place
      load_state_dict  its local tensor [E_local, H, F]

Parameters, gradients and the state of an optimizer stay plain tensors. The forward, the optimizer's
step and the compiler see nothing of this.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hybrid_ep.buffer import Buffer

_all: weakref.WeakSet[_Experts] = weakref.WeakSet()
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def save_by_expert(module: nn.Module, buffer: Buffer) -> None:
    """Make the state dicts of experts independent of the number of ranks.

    The state dicts of modules that contain this one, and of optimizers that have made a step, then
    hold a ``DTensor [E, ...]`` for each tensor ``[E_local, ...]`` of the experts. What is loaded
    may be such a DTensor, or a plain tensor of the experts of this rank or of all. With one rank,
    and after ``torch.distributed`` was destroyed, the state dicts hold plain tensors.

    Args:
        module: its parameters have the experts of this rank in dimension 0. Its buffers are taken
            to be equal on all ranks.
        buffer: says which experts these are.

    Raises:
        ValueError: a parameter has another size in dimension 0, or went through this before.
    """
    known = owners()
    for name, parameter in module.named_parameters():
        if parameter in known:
            raise ValueError(f"{name} went through save_by_expert before: call it once")
        if parameter.shape[:1] != (buffer.num_local_experts,):
            raise ValueError(
                f"dimension 0 of {name} must be the {buffer.num_local_experts} experts of this "
                f"rank, got shape {list(parameter.shape)}"
            )
    if buffer.topology.num_ranks > 1:
        import torch.distributed.tensor  # noqa: F401  else torch.load refuses a DTensor
    experts = _Experts(module, buffer)
    module.register_state_dict_post_hook(functools.partial(_save_module, experts))
    module.register_load_state_dict_pre_hook(functools.partial(_load_module, experts))


def owners() -> dict[nn.Parameter, _Experts]:
    """All parameters of modules that went through ``save_by_expert``."""
    return {parameter: experts for experts in _all for parameter in experts.parameters()}


class _Experts:
    """A module whose state dicts are made here, and its Buffer; a hook of the module owns it."""

    def __init__(self, module: nn.Module, buffer: Buffer) -> None:
        self._module, self._buffer = weakref.ref(module), buffer
        self._meshes: dict[str, Any] = {}
        _all.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """A deep copy is of the copied module; to pickle one is refused by the Buffer."""
        return _Experts, (self._module(), self._buffer)

    def parameters(self) -> Iterator[nn.Parameter]:
        module = self._module()
        return iter(()) if module is None else module.parameters()

    def whole(self, name: str, part: Any) -> Any:
        """The DTensor of all ranks, of which this tensor is the part of this rank."""
        buffer = self._buffer
        if not _has_dimensions(part) or buffer.topology.num_ranks == 1 or not dist.is_initialized():
            return part
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        if isinstance(part, DTensor):
            raise ValueError(
                f"{name} must be a plain tensor, got a DTensor: each rank has experts of its own, "
                "so exclude hybrid_ep.moe.expert_parameters(model) from FSDP"
            )
        if part.shape[0] != buffer.num_local_experts:
            warnings.warn(
                f"{name} of an expert's weight is saved as if it were equal on all ranks: its "
                f"dimension 0 must be the {buffer.num_local_experts} experts of this rank, got "
                f"shape {list(part.shape)}",
                stacklevel=2,
            )
            return part
        kind = buffer.device.type if part.is_meta else part.device.type
        if kind not in self._meshes:
            self._meshes[kind] = DeviceMesh.from_group(buffer.group, kind)
        shape = torch.Size((buffer.num_experts, *part.shape[1:]))
        return DTensor.from_local(
            part, self._meshes[kind], [Shard(0)], run_check=False, shape=shape, stride=part.stride()
        )

    def part(self, name: str, saved: Any) -> Any:
        """What this rank holds of a tensor of a state dict."""
        if not _has_dimensions(saved):
            return saved
        num_experts, num_local = self._buffer.num_experts, self._buffer.num_local_experts
        if hasattr(saved, "to_local"):
            whole, saved = saved, saved.to_local()
            saver, rank = whole.device_mesh.get_coordinate() or (), self._buffer.topology.rank
            if saved.shape[0] != num_experts and len(saver) == 1 and saver[0] != rank:
                raise ValueError(
                    f"{name} must hold the experts of rank {rank}, got those of rank {saver[0]}: "
                    "each rank loads the file that it has saved itself"
                )
            if whole.shape[0] != num_experts or saved.shape[0] not in (num_local, num_experts):
                raise ValueError(
                    f"{name} must hold {num_local} of {num_experts} experts, got "
                    f"{saved.shape[0]} of {whole.shape[0]}: torch.distributed.checkpoint loads "
                    "what another number of ranks has saved"
                )
        if saved.shape[0] == num_experts:
            # a copy, as a view would keep the memory of all experts
            saved = saved.narrow(0, self._buffer.topology.rank * num_local, num_local).clone()
        return saved


def _has_dimensions(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _save_module(
    experts: _Experts, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for name, _ in module.named_parameters(remove_duplicate=False):
        weight = state.get(prefix + name)
        if weight is not None and not isinstance(weight, nn.Parameter):  # keep_vars
            state[prefix + name] = experts.whole(prefix + name, weight)


def _load_module(
    experts: _Experts, module: nn.Module, state: dict[str, Any], prefix: str, *others: Any
) -> None:
    for name, _ in module.named_parameters(remove_duplicate=False):
        if prefix + name in state:
            state[prefix + name] = experts.part(prefix + name, state[prefix + name])


# ---- optimizers, which know nothing of modules: each gets its hooks when it makes a step


@torch._disable_dynamo  # as the rest of a step is not compiled either
def _hook_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _optimizers:
        return
    _optimizers.add(optimizer)
    optimizer.register_state_dict_post_hook(_save_optimizer)
    optimizer.register_load_state_dict_pre_hook(_load_optimizer)
    for parameter, experts in owners().items():  # what was loaded before
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            optimizer.state[parameter] = {name: experts.part(name, v) for name, v in state.items()}


def _save_optimizer(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _changed(optimizer, state_dict, _Experts.whole)


def _load_optimizer(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _changed(optimizer, state_dict, _Experts.part)


def _changed(
    optimizer: Optimizer, state_dict: dict[str, Any], change: Callable[..., Any]
) -> dict[str, Any]:
    """The state dict with the states of experts changed; its tensors are those of the optimizer."""
    experts_of = owners()
    if not any(p in experts_of for group in optimizer.param_groups for p in group["params"]):
        return state_dict  # of whatever form: nothing of ours is in it
    states = dict(state_dict["state"])
    # the keys are numbers, or names in torch.distributed.checkpoint.state_dict
    keys, parameters = (
        itertools.chain.from_iterable(group["params"] for group in groups)
        for groups in (state_dict["param_groups"], optimizer.param_groups)
    )
    for key, parameter in zip(keys, parameters, strict=False):  # torch compares the lengths
        if parameter in experts_of and key in states:
            experts, state = experts_of[parameter], states[key]
            states[key] = {name: change(experts, name, value) for name, value in state.items()}
    return {**state_dict, "state": states}


register_optimizer_step_pre_hook(_hook_optimizer)
