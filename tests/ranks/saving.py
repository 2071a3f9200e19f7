"""Models with experts that are trained, saved and loaded; what the ranks then hold."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from examples import resume_moe
from hybrid_ep.moe import MoELayer, expert_parameters, replicated_parameters
from hybrid_ep.saving import save_by_expert
from tests.launch import Rank
from tests.ranks.raised import what_it_raises

HIDDEN, FFN_HIDDEN, NUM_EXPERTS, TOPK, TOKENS = 16, 8, 8, 2, 64  # tokens of all ranks


class Model(nn.Module):
    """A dense layer and an MoE layer; each seed is another one."""

    def __init__(self, me: Rank, seed: int = 0, num_experts: int = NUM_EXPERTS, group: Any = None):
        super().__init__()
        self.me = me
        buffer = me.buffer(
            group,
            hidden=HIDDEN,
            num_experts=num_experts,
            max_tokens=TOKENS,
            topk=TOPK,
            dtype=torch.float32,
        )
        torch.manual_seed(seed)
        self.dense = nn.Linear(HIDDEN, HIDDEN, device=me.device)
        self.moe = MoELayer(buffer, FFN_HIDDEN, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.dense(x)).y


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    me: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, wrapped: str = ""
) -> list[float]:
    """The losses; the tokens of a step are the same for any number of ranks."""
    losses = []
    for step in steps:
        batch = torch.Generator().manual_seed(step)
        x, wanted = torch.randn(2, TOKENS, HIDDEN, generator=batch).chunk(me.num_ranks, dim=1)[
            me.rank
        ]
        loss = (model(x.to(me.device)) - wanted.to(me.device)).square().mean()
        loss.backward()
        for parameter in expert_parameters(model).values():
            parameter.grad /= me.num_ranks
        for parameter in () if wrapped else replicated_parameters(model):
            parameter.grad /= me.num_ranks
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().cpu()
        dist.all_reduce(total)
        losses.append(total.item() / me.num_ranks)
    return losses


def held(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Weights and moments of the experts of this rank, which must be plain tensors."""
    found: dict[str, Tensor] = {}
    for name, weight in expert_parameters(model).items():
        assert type(weight) is nn.Parameter
        found[name] = weight.detach().clone()
        for kind, value in optimizer.state[weight].items() if optimizer else ():
            assert type(value) is Tensor
            found[f"{kind} of {name}"] = value.clone()
    return found


def save(me: Rank, folder: Path) -> dict[str, Tensor]:
    """What is in the checkpoint, which is of two steps of training."""
    model = Model(me)
    optimizer = adam(model)
    train(me, model, optimizer, range(2))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return held(model, optimizer)


def load(me: Rank, folder: Path) -> dict[str, Tensor]:
    model = Model(me, seed=1)
    optimizer = adam(model)
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    found = held(model, optimizer)
    train(me, model, optimizer, range(2, 3))
    return found


def save_state_dict(me: Rank, folder: Path, num_groups: int = 1) -> dict[str, Tensor]:
    """By ``model.state_dict()`` alone, with groups of ranks that hold the same experts."""
    groups = [dist.new_group(list(range(me.num_ranks))[i::num_groups]) for i in range(num_groups)]
    model = Model(me, group=groups[me.rank % num_groups])
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return held(model)


def load_state_dict(me: Rank, folder: Path) -> dict[str, Tensor]:
    model = Model(me, seed=1)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    return held(model)


def error_of_other_experts(me: Rank, folder: Path, num_experts: int) -> str:
    state = Model(me, num_experts=num_experts).state_dict()
    with pytest.raises(dcp.api.CheckpointException) as error:
        dcp.load(state, checkpoint_id=folder)
    return str(error.value)


def save_plain(me: Rank, folder: Path) -> dict[str, Tensor]:
    """By ``torch.save``, a file per rank."""
    model = Model(me)
    optimizer = adam(model)
    train(me, model, optimizer, range(2))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / f"{me.rank}.pt")
    return held(model, optimizer)


def error_of_plain(me: Rank, folder: Path) -> str:
    model = Model(me)
    state = torch.load(folder / f"{me.rank}.pt", weights_only=True)
    with pytest.raises(ValueError) as error:
        model.load_state_dict(state["model"])
    return str(error.value)


def load_the_file_of_rank_0(me: Rank, folder: Path) -> str:
    """What it raises, if it does."""
    state = torch.load(folder / "0.pt", weights_only=True)
    return what_it_raises(lambda: Model(me).load_state_dict(state["model"]), ValueError)


def load_plain(me: Rank, folder: Path) -> dict[str, Tensor]:
    model = Model(me, seed=1)
    optimizer = adam(model)
    for step in (2, 3):  # the optimizer has made no step, and then one
        state = torch.load(folder / f"{me.rank}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if step == 2:
            train(me, model, optimizer, range(step, step + 1))
    return held(model, optimizer)


def load_tensors(me: Rank, of_all: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Wanted and found, from plain tensors: those of this rank, or of all experts."""
    alone = [dist.new_group([rank]) for rank in range(me.num_ranks)][me.rank]
    wanted, model = Model(me), Model(me, seed=1)
    source = Model(me, group=alone) if of_all else wanted
    model.load_state_dict(dict(source.named_parameters()))
    return held(wanted), held(model)


def load_full(me: Rank, backend: str | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Wanted and found, by full state dicts that rank 0 alone keeps, as for an export."""
    group = dist.new_group(backend=backend) if backend else None
    wanted, model = Model(me, group=group), Model(me, seed=1, group=group)
    used, optimizer = adam(wanted), adam(model)
    train(me, wanted, used, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_state_dict(wanted, used, options=options)
    shapes = [states[0][name].shape[0] for name in expert_parameters(wanted)] if states[0] else []
    assert shapes == ([NUM_EXPERTS] * 3 if me.rank == 0 else [])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, states[0], options=options)
    set_optimizer_state_dict(model, optimizer, states[1], options=options)
    return held(wanted, used), held(model, optimizer)


def copies(me: Rank) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A deep copy's state dict is of the copy's weights, and global as well."""
    model = Model(me)
    twin = copy.deepcopy(model)
    for weight in twin.parameters():
        weight.data += 1.0
    shapes = [
        [list(state[f"moe.experts.{name}"].shape) for name in ("w1", "w2", "w3")]
        for state in (twin.state_dict(), copy.deepcopy(twin.state_dict()))
    ]
    assert shapes[0] == shapes[1] and shapes[0][0][0] == NUM_EXPERTS
    assert set(expert_parameters(twin)) == set(expert_parameters(model))
    model.load_state_dict(twin.state_dict())
    return held(twin), held(model)


def wrap(me: Rank, model: Model, by: str) -> nn.Module:
    """The dense part averaged by torch, the experts left alone."""
    if by == "DDP":
        ignored = list(expert_parameters(model))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(me.device.type, (me.num_ranks,))
    if "ignored_params" in inspect.signature(fully_shard).parameters:
        return fully_shard(model, mesh=mesh, ignored_params=set(expert_parameters(model).values()))
    for part in (model.dense, model.moe.router):
        fully_shard(part, mesh=mesh)
    return model


def train_wrapped(me: Rank, by: str, folder: Path) -> dict[str, Any]:
    """Losses of five steps: of the plain model, of the wrapped one, and resumed after two."""
    plain, model, resumed = Model(me), Model(me), Model(me, seed=1)
    model, resumed = (wrap(me, each, by) for each in (model, resumed))
    optimizer = adam(model)
    losses = train(me, model, optimizer, range(2), by)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    losses += train(me, model, optimizer, range(2, 5), by)

    optimizer = adam(resumed)
    weights, moments = get_state_dict(resumed, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(resumed, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return {
        "plain": train(me, plain, adam(plain), range(5)),
        "wrapped": losses,
        "resumed": train(me, resumed, optimizer, range(2, 5), by),
    }


def refusal(me: Rank, what: str) -> str:
    """The text of an error or a warning."""
    model = Model(me)
    if what == "experts_in_FSDP":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh(me.device.type, (me.num_ranks,)))
    elif what == "moments_of_another_form":
        optimizer = adam(model)
        train(me, model, optimizer, range(1))
        optimizer.state[model.moe.experts.w1]["row"] = torch.zeros(NUM_EXPERTS + 1)
        with pytest.warns(UserWarning) as caught:
            optimizer.state_dict()
        return str(caught[0].message)
    with pytest.raises(ValueError) as error:
        if what == "no_experts_in_dimension_0":
            save_by_expert(nn.Linear(3, 3), model.moe.buffer)
        elif what == "twice":
            save_by_expert(model.moe.experts, model.moe.buffer)
        else:
            model.state_dict()
    return str(error.value)


def compiled_step(me: Rank) -> list[int]:
    """Experts in the state dict of an optimizer whose step is compiled."""
    model = Model(me)
    optimizer = adam(model)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    torch._dynamo.reset()
    torch.compile(optimizer.step, backend="eager")()
    states = optimizer.state_dict()["state"].values()
    return sorted(state["exp_avg"].shape[0] for state in states if state["exp_avg"].dim() == 3)


def resume(me: Rank, folder: Path, steps: int, save_every: int) -> list[float]:
    """The example, on the target of the tests."""
    buffer = me.buffer(
        hidden=resume_moe.HIDDEN,
        num_experts=resume_moe.EXPERTS,
        max_tokens=resume_moe.TOKENS,
        topk=resume_moe.TOPK,
        dtype=torch.float32,
    )
    return resume_moe.train(buffer, folder, steps, save_every)
