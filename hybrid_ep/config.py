"""How a Buffer uses the GPU. Nothing here changes a result, only its speed and its patience."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning of one Buffer; equal on all ranks of its group.

    A phase runs on at most the named number of streaming multiprocessors (SMs), one CUDA block per
    SM, and on fewer where a rank's GPU has fewer. Routing is two short kernels with grids of their
    own. The torch backend ignores them.

    Attributes:
        num_sms_publish: SMs that copy a rank's tokens into its outbox.
        num_sms_dispatch: SMs that pull tokens from the peers' outboxes into expert rows.
        num_sms_combine: SMs that sum expert rows, push the sums home and add them there.
        slice_bytes: largest piece of a row that a warp moves at once; a multiple of 16.
        timeout_s: seconds that a rank waits for a peer before it raises ``PeerError``.
        trace: the kernels note what each block did when, for ``Buffer.write_trace()``; costs 3 MB
            of GPU memory and about a microsecond a kernel.

    Raises:
        ValueError: a number of SMs, a slice or a timeout that is out of range.
    """

    num_sms_publish: int = 32
    num_sms_dispatch: int = 32
    num_sms_combine: int = 32
    slice_bytes: int = 16384
    timeout_s: float = 60.0
    trace: bool = False

    def __post_init__(self) -> None:
        for name in ("num_sms_publish", "num_sms_dispatch", "num_sms_combine"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Config.{name} must be an integer of at least 1, got {value!r}")
        if not 16 <= self.slice_bytes <= 16384 or self.slice_bytes % 16:
            raise ValueError(
                "Config.slice_bytes must be a multiple of 16 from 16 to 16384, got "
                f"{self.slice_bytes!r}"
            )
        if not self.timeout_s > 0:
            raise ValueError(f"Config.timeout_s must be positive, got {self.timeout_s!r}")
