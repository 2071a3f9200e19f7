"""Runs a Python block of the documentation with the names that the text around it stands for."""

from __future__ import annotations

import contextlib
import io
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hybrid_ep
from hybrid_ep.moe import MoELayer, expert_parameters
from tests.launch import Rank

SIZES = {"hidden": 1024, "num_experts": 16, "max_tokens": 512, "topk": 2}


GIVEN = {"hybrid_ep", "torch", "dist", "group"} | {"buffer", "weights", "model", "optimizer"}


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
    }


def trained_layer(me: Rank) -> dict[str, Any]:
    """An MoE layer after a backward, its optimizer, and a folder that all ranks share."""
    return _layer(me, torch.float32, main_grad=False)


def layer_with_main_grad(me: Rank) -> dict[str, Any]:
    """The same with gradients in float32, and a loss whose backward is to come."""
    return _layer(me, torch.bfloat16, main_grad=True)


def _layer(me: Rank, dtype: torch.dtype, main_grad: bool) -> dict[str, Any]:
    buffer = me.buffer(hidden=64, num_experts=4, max_tokens=32, topk=2)
    model = MoELayer(buffer, ffn_hidden=32, dtype=dtype, main_grad=main_grad, seed=1)
    y = model(torch.randn(32, 64, dtype=torch.bfloat16)).y
    loss = y.float().square().mean()
    optimizer = torch.optim.AdamW(model.parameters())
    if not main_grad:
        loss.backward()
        optimizer.step()
    folder = [tempfile.mkdtemp() if me.rank == 0 else None]
    dist.broadcast_object_list(folder)
    return {
        "buffer": buffer,
        "model": model,
        "loss": loss,
        "optimizer": optimizer,
        "step": 1,
        "folder": folder[0],
        "expert_parameters": expert_parameters,
        "DDP": DistributedDataParallel,
        "fully_shard": mock.Mock(),  # the other way: a model cannot be wrapped twice
    }


def run(me: Rank, code: str, context: str) -> dict[str, str]:
    """Run a block; what each name that it set holds then, by repr."""
    given = {"hybrid_ep": hybrid_ep, "torch": torch, "dist": dist, "group": None}
    if context:
        given |= globals()[context](me)
    names = dict(given)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "a block of the documentation", "exec"), names)
    for value in (given.get("buffer"), names.get("buffer")):
        if isinstance(value, hybrid_ep.Buffer):
            value.destroy()
    names.pop("__builtins__")
    return {name: repr(value)[:200] for name, value in names.items() if name not in given}
