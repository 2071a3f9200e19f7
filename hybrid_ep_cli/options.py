"""Options that several commands have, and the names that the library has for options."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

# What the library knows too, without its imports; tests/unit/test_commands.py compares them.
BACKENDS = ("auto", "torch", "nvlink", "nvshmem")
STDOUT = "-"  # --json without a file
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}

_OPTIONS = {
    "num_ranks": "--ranks",
    "ranks_per_node": "--ranks-per-node",
    "max_tokens": "--tokens",
    "hidden": "--hidden",
    "num_experts": "--experts",
    "topk": "--topk",
    "dtype": "--dtype",
    "scale_bytes": "--scale-bytes",
    "align": "--align",
    "node_limit": "--node-limit",
    "num_sms": "--sms",
    "num_sms_dispatch": "--sms",
    "num_sms_combine": "--sms",
    "network_channels": "--channels",
    "network_chunk_tokens": "--chunk",
    "network_window_chunks": "--window",
    "nvlink_gbs": "--nvlink-gbs",
    "network_gbs": "--network-gbs",
    "network_latency_us": "--network-latency-us",
    "nvlink_latency_us": "--nvlink-latency-us",
    "put_us": "--put-us",
    "pass_on_us": "--pass-on-us",
}
_NAME = re.compile(rf"(?<![\w./-])(?:Config\.)?({'|'.join(_OPTIONS)})(?![\w/-])(=)?")


def as_typed(text: str) -> str:
    """An error of the library in the user's words: ``num_ranks=3`` is ``--ranks 3``."""
    for name, of_torch in DTYPES.items():
        text = text.replace(f"torch.{of_torch}", name)
    return _NAME.sub(lambda name: _OPTIONS[name[1]] + (" " if name[2] else ""), text)


def add_count(parser: argparse._ActionsContainer, name: str, help: str, **others: Any) -> None:
    """``--name N``, or several N where ``nargs`` says so."""
    parser.add_argument(f"--{name}", help=help, **{"type": int, "metavar": "N", **others})


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """``--ranks``, of a command that starts them."""
    told = "number of ranks (default: one per GPU where there are several GPUs, else 4)"
    add_count(parser, "ranks", told)


def add_align(parser: argparse._ActionsContainer) -> None:
    """``--align``, of a command whose groups of rows may be padded."""
    told = "pad the rows of each expert to a multiple of N (default: 1)"
    add_count(parser, "align", told, default=1)


def add_commit(parser: argparse.ArgumentParser, where: str) -> None:
    """``--commit``, of a command that says in a file what it measured."""
    told = f"commit to name in {where} (default: what git says)"
    parser.add_argument("--commit", metavar="HASH", help=told)


def add_backend(parser: argparse.ArgumentParser) -> None:
    """``--backend``, of a command that takes one."""
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="what moves the tokens; nvshmem is experimental: it has run between virtual nodes of "
        "one host, on no network yet (default: auto)",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """``--device``."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu"),
        default="auto",
        help="auto: the GPUs if there are any, else the CPU (default: auto)",
    )


def add_files(parser: argparse.ArgumentParser, *, json: str, plot: str | None = None) -> None:
    """``--json`` and ``--plot``; each says what the file holds."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help=f"write {json} as JSON to FILE; without FILE to stdout, instead of the text "
        "(default: the text alone)",
    )
    if plot is not None:
        parser.add_argument(
            "--plot",
            type=Path,
            metavar="FILE",
            help=f"draw {plot} to FILE, whose ending names the format, such as .png; needs "
            "matplotlib (default: no file)",
        )
