"""Frameworks' tests with more ranks than GPUs, which NCCL refuses; also a plugin of pytest.

They expect a GPU for each rank and NCCL. Where GPUs are shared, ``install`` deals the GPUs out in
turn, and gloo carries what is neither dispatch nor combine. Where each rank has a GPU it changes
no group and no device.

    torchrun ... -m pytest -p shared_gpus ...
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


def install(num_ranks: int) -> None:
    """Before the first process group is made; all ranks are on this host."""
    dist.all_to_all_single = _with_lists(dist.all_to_all_single)
    gpus = torch.cuda.device_count()
    if gpus == 0 or num_ranks <= gpus:
        return
    dist.init_process_group = _with_gloo(dist.init_process_group)
    dist.new_group = _with_gloo(dist.new_group)
    set_device = torch.cuda.set_device
    torch.cuda.set_device = lambda device: set_device(_index(device) % gpus)


def pytest_load_initial_conftests() -> None:
    """Ranks of torchrun. Tests of dispatchers need none of the data that Megatron-LM downloads."""
    install(int(os.environ["WORLD_SIZE"]))
    nothing = SimpleNamespace(download_and_extract_asset=lambda assets_dir: None)
    sys.modules["tests.test_utils.python_scripts.download_unit_tests_dataset"] = nothing


def _index(device: Any) -> int:
    return device if isinstance(device, int) else torch.device(device).index or 0


def _with_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    """``init_process_group`` or ``new_group``."""
    position = {"init_process_group": 0, "new_group": 2}[make.__name__]

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], "gloo", *args[position + 1 :])
        else:
            options["backend"] = "gloo"
        for name in ("device_id", "pg_options"):
            options.pop(name, None)
        return make(*args, **options)

    return made


def _with_lists(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-Core passes sizes as arrays of numpy, which not every version of torch takes."""

    @functools.wraps(exchange)
    def exchanged(*args: Any, **options: Any) -> Any:
        lists = {n: v.tolist() for n, v in options.items() if hasattr(v, "tolist")}
        return exchange(*args, **{**options, **lists})

    return exchanged
