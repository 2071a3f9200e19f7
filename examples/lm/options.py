"""The command line of the example, and sizes that have names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

WAYS = ("hybrid_ep", "nccl")
OVERLAPS = ("none", "shared", "halves")
DENSE = ("auto", "fsdp", "copies")
DTYPES = ("auto", "bf16", "fp32")


@dataclass(frozen=True)
class Sizes:
    """Of the model and of a batch.

    Attributes:
        hidden, layers, heads, kv_heads: of the transformer; queries share keys and values.
        experts, topk, ffn_hidden: E, K, F.
        shared_hidden: inner size of the shared expert, which sees every token.
        sequence: bytes of a sequence.
        micro_batch: sequences of a rank in a forward.
        batch: sequences of an optimizer step, of all ranks.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    experts: int
    topk: int
    ffn_hidden: int
    shared_hidden: int
    sequence: int
    micro_batch: int
    batch: int


PRESETS = {
    "h200x2": Sizes(2048, 12, 16, 4, 64, 8, 768, 1536, 4096, 2, 16),
    "small": Sizes(64, 2, 4, 2, 8, 2, 64, 64, 64, 2, 8),
}


@dataclass(frozen=True)
class Options:
    """What to train, and how.

    Attributes:
        sizes: of model and batch.
        way: how tokens move, of ``WAYS``.
        overlap: what runs beside dispatch and combine, of ``OVERLAPS``.
        num_sms: of a dispatch or a combine of hybrid_ep; None: as Config says.
        leave_free: SMs that matrix products beside dispatch and combine leave free, on GPUs.
        room: bound on the rows of a rank, as a multiple of what even routing gives; None: exact.
        recompute: keep the input of each layer only, and run it again in the backward.
        dense: how parameters that are not the experts' are held, of ``DENSE``.
        dtype: of products and of moved tokens, of ``DTYPES``; the weights are float32.
        backend: of the Buffer.
        device: "auto" or "cpu".
        steps: of the whole run, those before a resume among them.
        lr, warmup, weight_decay, clip, aux: learning rate after ``warmup`` steps; largest norm of
            all gradients; weight of the routers' loss.
        seed: of the weights and of the order of the text.
        folder: of the checkpoints; a run goes on from the newest. None: nothing is saved.
        save_every, log_every: in steps; 0: only at the end.
        profiled: so many steps, the last ones before the first line, time dispatch and combine.
        json: file of the results.
    """

    sizes: Sizes = PRESETS["h200x2"]
    way: str = "hybrid_ep"
    overlap: str = "shared"
    num_sms: int | None = None
    leave_free: int = 0
    room: float | None = None
    recompute: bool = True
    dense: str = "auto"
    dtype: str = "auto"
    backend: str = "auto"
    device: str = "auto"
    steps: int = 100
    lr: float = 6e-4
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    aux: float = 0.01
    seed: int = 0
    folder: Path | None = None
    save_every: int = 0
    log_every: int = 10
    profiled: int = 2
    json: Path | None = None

    def check(self, num_ranks: int) -> None:
        """Raise ValueError where a rule is broken that no other place states."""
        sizes = self.sizes
        for name, value in [(f.name, getattr(sizes, f.name)) for f in fields(sizes)]:
            if value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if sizes.hidden % (2 * sizes.heads) or sizes.heads % sizes.kv_heads:
            raise ValueError(
                "--hidden must be a multiple of twice --heads, and --heads one of --kv-heads, got "
                f"{sizes.hidden}, {sizes.heads} and {sizes.kv_heads}"
            )
        if sizes.batch % (num_ranks * sizes.micro_batch):
            raise ValueError(
                f"--batch must be a multiple of {num_ranks} ranks x --micro-batch "
                f"{sizes.micro_batch}, got {sizes.batch}"
            )
        if self.overlap == "halves" and sizes.micro_batch % 2:
            raise ValueError(
                f"--micro-batch must be even with --overlap halves, got {sizes.micro_batch}"
            )
        if self.room is not None and (self.way == "nccl" or self.room <= 0):
            raise ValueError(f"--room must be positive and of --way hybrid_ep, got {self.room:g}")
        if self.leave_free < 0 or (self.leave_free and self.overlap == "none"):
            raise ValueError(
                f"--leave-free must be at least 0, and 0 with --overlap none, got {self.leave_free}"
            )
        if self.steps < 1:
            raise ValueError(f"--steps must be at least 1, got {self.steps}")
        if self.way == "nccl":
            for name, given in (("num-sms", self.num_sms), ("backend", self.backend)):
                if given not in (None, "auto"):
                    raise ValueError(
                        f"--{name} must be left out with --way nccl, which does not use it, got "
                        f"{given}"
                    )

    def check_device(self, total_sms: int) -> None:
        """Raise ValueError where an option asks for more than the GPU has."""
        if self.leave_free >= total_sms:
            raise ValueError(
                f"--leave-free must be below the {total_sms} SMs of this GPU, got {self.leave_free}"
            )


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options of a command line."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node RANKS -m examples.lm",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Train a mixture-of-experts language model on bytes of Python's own sources.",
    )
    new = parser.add_argument
    default = Options()
    new("--preset", choices=PRESETS, default="h200x2", help="sizes; the next ones change single")
    for field in fields(Sizes):
        new(f"--{field.name.replace('_', '-')}", type=int, help="of the preset")
    new("--way", choices=WAYS, default=default.way, help="nccl: plain torch all_to_all_single")
    new(
        "--overlap",
        choices=OVERLAPS,
        default=default.overlap,
        help="beside dispatch and combine: the shared expert, or also the other half of the batch",
    )
    new("--num-sms", type=int, help="SMs of a dispatch or a combine; left out: as Config says")
    new("--leave-free", type=int, default=0, help="SMs that products beside them leave free")
    new("--room", type=float, help="rows of a rank / rows of even routing; left out: exact sizes")
    new("--recompute", action=argparse.BooleanOptionalAction, default=True)
    new("--dense", choices=DENSE, default="auto", help="auto: copies where FSDP cannot run")
    new("--dtype", choices=DTYPES, default="auto", help="auto: bf16 on a GPU, else fp32")
    new("--backend", default="auto", help="of the Buffer")
    new("--device", choices=("auto", "cpu"), default="auto")
    for name in ("steps", "warmup", "seed", "save_every", "log_every", "profiled"):
        new(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    for name in ("lr", "weight_decay", "clip", "aux"):
        new(f"--{name.replace('_', '-')}", type=float, default=getattr(default, name))
    new("--folder", type=Path, help="of checkpoints; the run goes on from the newest")
    new("--json", type=Path, help="file of the results")
    given = vars(parser.parse_args(arguments))
    sizes = {f.name: given.pop(f.name) for f in fields(Sizes)}
    chosen = {name: value for name, value in sizes.items() if value is not None}
    return Options(sizes=replace(PRESETS[given.pop("preset")], **chosen), **given)
