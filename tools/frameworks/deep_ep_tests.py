"""A test file of DeepEP, as it is, with hybrid_ep in the place of DeepEP.

    python deep_ep_tests.py test_hybrid_ep|test_graphed_hybrid_ep RANKS

The file is found on PYTHONPATH, which also has what `hybrid-ep deep-ep-path` prints. Its times are
left out where they come from a profiler that must find kernels of DeepEP's names.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import shared_gpus
import torch.multiprocessing as mp


def work(rank: int, name: str, num_ranks: int) -> None:
    shared_gpus.install(num_ranks)
    options = SimpleNamespace(num_processes=num_ranks, nsys_profile=True)
    importlib.import_module(name).test_main(rank, num_ranks, options)


if __name__ == "__main__":
    name, num_ranks = sys.argv[1], int(sys.argv[2])
    mp.spawn(work, args=(name, num_ranks), nprocs=num_ranks)
    print(f"{name}: passed on {num_ranks} ranks")
