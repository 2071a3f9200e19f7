"""How a Buffer uses the GPU and how long it waits. No setting changes a result."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hybrid_ep.integers import as_integer, index_of

MAX_CHUNK_TOKENS = 32  # kMaxChunkTokens of csrc/layout/nodes_layout.h: a lane per token
MAX_SLICE_BYTES = 16384
# Longer than a peer takes to compile a model or to save a checkpoint. Shorter than the 600 s after
# which NCCL ends the process by default, so that the PeerError with the peer's name comes first,
# also where it comes half as late again (docs/several_nodes.md, Faults).
DEFAULT_TIMEOUT_S = 300.0
TUNED_FOR = "tuned_for"  # the one key of a file that is no setting
_COUNTS = (
    "num_sms_publish",
    "num_sms_dispatch",
    "num_sms_combine",
    "network_channels",
    "network_chunk_tokens",
    "network_window_chunks",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning of one Buffer; equal on all ranks of its group.

    A phase runs on at most the named number of streaming multiprocessors (SMs), one CUDA block per
    SM, and on fewer where a rank's GPU has fewer. Routing is two short kernels with grids of their
    own. The nvshmem backend needs at least 2 for dispatch and 3 for combine, one for each role of
    its blocks; a Buffer refuses fewer. The torch backend ignores them.

    Attributes:
        num_sms_publish: SMs that copy a rank's tokens into its outbox before an exact size is
            known; all other publishing is done by those of dispatch, beside pulling.
        num_sms_dispatch: SMs that pull tokens from the peers' outboxes into expert rows. With at
            most 32 of them the GPU's copy engine publishes 2,048 tokens and more (with more than 16
            all but the first 512), if all ranks are of one node, the size is not exact and no CUDA
            graph holds a dispatch of the Buffer: the GPU is faster then, and the call costs the
            host more (docs/lab/27-copy-engine-publishes-again.md).
        num_sms_combine: SMs that sum expert rows, push the sums home and add them there.
        network_channels: SMs that send to the other nodes, of those of dispatch, and so at most one
            fewer than these; each has a queue pair to every rail peer.
        network_chunk_tokens: tokens that go over the network with one signal and one credit, at
            most 32.
        network_window_chunks: chunks of a channel that may be under way to a rail peer.
        slice_bytes: largest piece of a row that a warp moves at once; a multiple of 16.
        timeout_s: deadline of a rank that waits for a peer, in seconds; at the deadline it raises
            ``PeerError``. ``math.inf`` or None means no deadline, and reads back as ``math.inf``.
        trace: the kernels note what each block did when, for ``Buffer.write_trace()``; costs 3 MB
            of GPU memory and about a microsecond a kernel.

    Raises:
        ValueError: a setting of another type, or out of range.
    """

    num_sms_publish: int = 32
    num_sms_dispatch: int = 32
    num_sms_combine: int = 32
    # 8 x 4 x 8 records of 14 kB are 7 times what 50 GB/s carry in 10 us. Chunks are small so that
    # each stage soon hands on what the next one needs.
    network_channels: int = 8
    network_chunk_tokens: int = 8
    network_window_chunks: int = 4
    slice_bytes: int = MAX_SLICE_BYTES
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    trace: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            self._set(name, as_integer(f"Config.{name}", getattr(self, name), 1))
        if self.network_chunk_tokens > MAX_CHUNK_TOKENS:
            raise ValueError(
                f"Config.network_chunk_tokens must be at most {MAX_CHUNK_TOKENS}, got "
                f"{self.network_chunk_tokens!r}"
            )
        size = index_of(self.slice_bytes)
        if size is None or not 16 <= size <= MAX_SLICE_BYTES or size % 16:
            raise ValueError(
                f"Config.slice_bytes must be a multiple of 16 from 16 to {MAX_SLICE_BYTES}, got "
                f"{self.slice_bytes!r}"
            )
        self._set("slice_bytes", size)
        self._set("timeout_s", _as_seconds(self.timeout_s))
        if not isinstance(self.trace, bool):
            raise ValueError(f"Config.trace must be True or False, got {self.trace!r}")

    def _set(self, name: str, value: Any) -> None:
        """Put a number of another type as its plain type, for JSON.

        Ranks compare the text of their settings, so equal numbers must read alike.
        """
        object.__setattr__(self, name, value)

    def save(
        self, path: str | os.PathLike[str], *, tuned_for: Mapping[str, Any] | None = None
    ) -> None:
        """Write the settings to a file that ``load`` and ``Buffer(config=path)`` read.

        Args:
            path: the file, JSON, a key for each setting; it is overwritten.
            tuned_for: what the settings were found for, to be kept beside them; JSON's types.
        """
        kept: dict[str, Any] = asdict(self)
        if self.timeout_s == math.inf:
            kept["timeout_s"] = None  # JSON has no infinity
        if tuned_for is not None:
            kept[TUNED_FOR] = dict(tuned_for)
        Path(path).write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Config:
        """Read what ``save`` wrote, or a user; a setting that the file leaves out is the default.

        Args:
            path: the file. Its ``tuned_for`` must be an object and is not looked into.

        Raises:
            ValueError: no JSON object, an unknown key or one that stands there twice, a value of
                another type or out of range; the text names file, key and value.
            OSError: the file cannot be read.
        """
        where = os.fspath(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
            kept = json.loads(text, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} must hold JSON: {error}") from None
        if not isinstance(kept, dict):
            raise ValueError(f"{where} must hold a JSON object, got {kept!r:.80}")
        tuned_for = kept.pop(TUNED_FOR, {})
        if not isinstance(tuned_for, dict):
            raise ValueError(f"{where}: {TUNED_FOR} must be an object, got {tuned_for!r:.80}")
        known = [field.name for field in fields(cls)]
        for key, value in kept.items():
            if key not in known:
                raise ValueError(
                    f"{where}: keys must be of {', '.join(known)} and {TUNED_FOR}, got {key!r} "
                    f"with {value!r:.80}"
                )
        try:
            return cls(**kept)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def as_config(config: Config | str | os.PathLike[str] | None) -> Config:
    """The Config that a user means, by itself or by the path of its file; None: the default."""
    if config is None or isinstance(config, Config):
        return config or Config()
    if not isinstance(config, (str, os.PathLike)):
        raise ValueError(f"config must be a Config or the path of its file, got {config!r}")
    return Config.load(config)


def _as_seconds(timeout_s: Any) -> float:
    """A deadline as a float: infinite for None and for integers that no float can hold."""
    seconds = math.inf if timeout_s is None else math.nan
    if isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool):
        try:
            seconds = float(timeout_s)
        except OverflowError:
            seconds = math.inf if timeout_s > 0 else math.nan
    if not seconds > 0:
        raise ValueError(
            "Config.timeout_s must be a positive number, or None for no deadline, got "
            f"{timeout_s!r:.80}"
        )
    return seconds


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in pairs:
        if key in kept:
            raise ValueError(f"{key!r} stands there twice, with {kept[key]!r} and {value!r}")
        kept[key] = value
    return kept
