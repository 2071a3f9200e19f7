"""Runs a Python block of the documentation with the names that the text around it stands for."""

from __future__ import annotations

import contextlib
import io
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hybrid_ep
from hybrid_ep.moe import MoELayer, expert_parameters
from tests.launch import Rank

SIZES = {"hidden": 1024, "num_experts": 16, "max_tokens": 512, "topk": 2}


GIVEN = {"hybrid_ep", "torch", "dist", "group"} | {
    "buffer", "budget", "model", "optimizer", "weights",
}  # fmt: skip


def buffer_and_tokens(me: Rank) -> dict[str, Any]:
    """A Buffer, tokens with their routing and weights, and experts."""
    torch.manual_seed(me.rank)
    weights, topk_idx = torch.rand(64, 16).softmax(dim=1).topk(2)
    return {
        "buffer": me.buffer(**SIZES),
        "x": torch.randn(64, 1024, dtype=torch.bfloat16),
        "scales": torch.rand(64, 8),
        "topk_idx": topk_idx,
        "weights": weights,
        "topk_weights": weights,
        "experts": lambda rows, *_: rows.to(torch.bfloat16),
        "shared_expert": torch.tanh,
        "generate": lambda: None,
        "budget": 16,  # fewer than 64 tokens of each rank need
        "path": Path(tempfile.mkdtemp()) / "config.json",
    }


def layer_and_tokens(me: Rank) -> dict[str, Any]:
    """An MoE layer, tokens of which a gradient is wanted, and what a checkpoint is put around."""
    # with a bound, as torch before 2.10 compiles exact sizes by a setting alone
    given = _layer(me, torch.float32, main_grad=False, max_rows=128)
    layer = given["model"]
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    return {"buffer": given["buffer"], "layer": layer, "x": x, "block": lambda x: x + layer(x).y}


def trained_layer(me: Rank) -> dict[str, Any]:
    """An MoE layer after a backward, its optimizer, and a folder that all ranks share."""
    given = _layer(me, torch.float32, main_grad=False)
    given.pop("loss").backward()
    given["optimizer"].step()
    folder = [tempfile.mkdtemp() if me.rank == 0 else None]
    dist.broadcast_object_list(folder)
    return {
        **given,
        "step": 1,
        "folder": folder[0],
        "DDP": DistributedDataParallel,
        "fully_shard": mock.Mock(),  # the other way: a model cannot be wrapped twice
    }


def layer_before_backward(me: Rank) -> dict[str, Any]:
    """An MoE layer, its optimizer, and a loss whose backward is to come."""
    return _layer(me, torch.float32, main_grad=False)


def layer_with_main_grad(me: Rank) -> dict[str, Any]:
    """The same with gradients in float32, and a loss whose backward is to come."""
    return _layer(me, torch.bfloat16, main_grad=True)


def _layer(
    me: Rank, dtype: torch.dtype, *, main_grad: bool, max_rows: int | None = None
) -> dict[str, Any]:
    buffer = me.buffer(hidden=64, num_experts=4, max_tokens=32, topk=2)
    model = MoELayer(
        buffer, ffn_hidden=32, max_rows=max_rows, dtype=dtype, main_grad=main_grad, seed=1
    )
    y = model(torch.randn(32, 64, dtype=torch.bfloat16)).y
    loss = y.float().square().mean()
    return {
        "buffer": buffer,
        "model": model,
        "loss": loss,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "expert_parameters": expert_parameters,
    }


def run(me: Rank, code: str, context: str) -> dict[str, str]:
    """Run a block; what each name that it set holds then, by repr."""
    given = {"hybrid_ep": hybrid_ep, "torch": torch, "dist": dist, "group": None}
    if context:
        given |= globals()[context](me)
    names = dict(given)
    # inductor takes 20 s, and tests/suite has it
    compiler = mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))
    with contextlib.redirect_stdout(io.StringIO()), compiler:
        exec(compile(code, "a block of the documentation", "exec"), names)
    for value in {**given, **names}.values():
        if isinstance(value, hybrid_ep.Buffer):
            value.destroy()
    names.pop("__builtins__")
    return {name: repr(value)[:200] for name, value in names.items() if name not in given}
