"""The language model of examples/lm, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from examples.lm import parallel
from examples.lm.model import Routed
from examples.lm.options import Options
from examples.lm.train import train
from examples.lm.trainer import Trainer
from tests.launch import Rank


def run(me: Rank, options: Options) -> dict[str, Any]:
    """The results of a run."""
    return asdict(train(options, me.device))


def losses(me: Rank, options: Options) -> list[float]:
    """Of the steps alone: no lines, no files, nothing held out."""
    trainer = Trainer(options, me.device)
    found = [trainer.mean(trainer.step()[0]).item() for _ in range(options.steps)]
    trainer.close()
    return found


def gradients(me: Rank, options: Options, largest: float) -> dict[str, Any]:
    """Of one step: what each rank has of the experts, what is equal on all, and the norm.

    ``clipped`` is the same after clipping to ``largest``.
    """
    trainer = Trainer(options, me.device)
    text = trainer.windows.take(me.rank * options.sizes.micro_batch, options.sizes.micro_batch)
    loss, routed = trainer.model(text)
    assert isinstance(routed, Routed)
    (loss + options.aux * routed.aux_loss).backward()
    parallel.average_gradients(trainer.held)
    before = _whole(trainer)
    norm = parallel.clip_gradients(trainer.held, largest)
    after = _whole(trainer)
    trainer.close()
    return {"norm": norm, "unclipped": before, "clipped": after}


def _whole(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of this rank's experts, and those that all ranks share, by name."""
    mine = {id(weight) for weight in trainer.held.experts}
    experts, shared = {}, {}
    for name, weight in trainer.model.named_parameters():
        grad = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        (experts if id(weight) in mine else shared)[name] = grad.clone()
    return experts, shared


def shares_of_time(me: Rank, options: Options) -> tuple[float, int]:
    """Seconds in dispatch and combine of one step, and how many spans they are."""
    trainer = Trainer(options, me.device)
    trainer.spans.enabled = True
    trainer.step()
    ended = sum(None not in span for span in trainer.spans._spans)
    seconds = trainer.spans.take_seconds()
    trainer.spans.enabled = False
    trainer.step()
    assert trainer.spans.take_seconds() == 0.0
    trainer.close()
    return seconds, ended


def dtypes_of_what_is_held(me: Rank, options: Options) -> set[torch.dtype]:
    """Of all parameters: masters are float32."""
    trainer = Trainer(options, me.device)
    held = trainer.held
    dtypes = {weight.dtype for weight in (*held.experts, *held.sharded, *held.copied)}
    trainer.close()
    return dtypes


def settings_of_groups(me: Rank, options: Options) -> list[dict[str, Any]]:
    """Of the optimizer of a run that may have been resumed."""
    trainer = Trainer(options, me.device)
    groups = trainer.optimizer.param_groups
    assert trainer.progress["step"] > 0 and len(trainer.optimizer.state) > 0
    trainer.close()
    return [{name: group[name] for name in ("lr", "weight_decay", "betas")} for group in groups]


def has_a_group_of_its_own(me: Rank, options: Options) -> bool:
    """Whether plain torch moves tokens over another communicator than FSDP's."""
    trainer = Trainer(options, me.device)
    group = trainer.moves.group
    found = group is not dist.group.WORLD and group.size() == me.num_ranks
    trainer.close()
    return found


def order_of_calls(me: Rank, options: Options) -> tuple[list[str], list[str]]:
    """One layer: its calls as the host makes them, and the nodes where it begins to recompute.

    M is what is before the dispatch, S the shared expert, and a dash marks a backward.
    """
    trainer = Trainer(options, me.device)
    block = trainer.model.blocks[0]
    made: list[str] = []
    nodes: list[str] = []

    def note(name: str, place: Any, attribute: str, result: Callable[[Any], Tensor]) -> None:
        called = getattr(place, attribute)

        def noting(*inputs: Any) -> Any:
            node = torch._C._current_autograd_node()
            if node is not None and not nodes:
                nodes.extend([node.name(), node.next_functions[0][0].name()])
            made.append(name)
            results = called(*inputs)
            if node is None or options.recompute:
                result(results).register_hook(lambda _: made.append(f"{name}'"))
            return results

        setattr(place, attribute, noting)

    note("M", block, "_mix", lambda results: results[1])
    note("D", block, "_dispatch", lambda arrived: arrived.rows)
    note("E", block, "_compute", lambda rows: rows)
    note("C", block, "_combine", lambda y: y)
    note("S", block.shared, "forward", lambda y: y)
    trainer.step()
    trainer.close()
    return made, nodes


def settings_after_a_step_that_raises(me: Rank, options: Options) -> list[int | None]:
    """SMs left free: before, where the shared expert raises, and behind the step."""
    trainer = Trainer(options, me.device)
    carveout = torch._C._get_sm_carveout_experimental
    seen = [carveout()]

    def fail(x: Tensor) -> Tensor:
        seen.append(carveout())
        raise RuntimeError("no memory")

    trainer.model.blocks[-1].shared.forward = fail
    with pytest.raises(RuntimeError, match="no memory"):
        trainer.step()
    seen.append(carveout())
    trainer.close()
    return seen
