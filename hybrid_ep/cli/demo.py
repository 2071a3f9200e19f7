"""Train a small mixture-of-experts transformer on this machine, communication included.

Starts its own ranks (the GPUs there are, else 4 on the CPU), compares the distributed layer with
plain arithmetic on one process, then trains on text that every machine has: the sources of Python's
standard library, byte by byte. Shows the loss, the share of time that dispatch and combine take,
and the load of the experts. The batch and every seed are the same for any number of ranks and any
backend, so two runs can be compared: --json writes what they did.

    hybrid-ep demo --backend torch --json torch.json --plot torch.png
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_ep.buffer import BACKENDS, Buffer
from hybrid_ep.demo.clock import TimedBuffer
from hybrid_ep.launch import default_num_ranks, run_ranks
from hybrid_ep.moe import GroupedExperts, MoELayer, MoEOutput, replicated_parameters

HELP = "train a small MoE transformer here and show what communication costs"

HIDDEN, FFN_HIDDEN, HEADS, LAYERS = 128, 128, 4, 3
NUM_EXPERTS, TOPK = 16, 2
SEQUENCE, BATCH = 128, 32  # of all ranks together
LEARNING_RATE, WARMUP_STEPS = 4e-3, 10
AUX_LOSS_WEIGHT = 0.02
VALID_WINDOWS = 64
NATS_PER_BIT = math.log(2)


@dataclass(frozen=True)
class Settings:
    """What the ranks are told."""

    backend: str
    steps: int


@dataclass
class Report:
    """What rank 0 saw; ``--json`` writes it.

    Attributes:
        failure: why there was no training at all, empty otherwise.
        device: name of rank 0's.
        layer_error: largest difference between the distributed layer and plain arithmetic, relative
            to the largest value; over outputs and all gradients.
        layer_tolerance: what is allowed.
        losses: nats per byte of each step's batch, mean over all ranks.
        valid: pairs (steps done, bits per byte of the held-out text).
        unigram: bits per byte of the held-out text, coded with the byte frequencies of the rest.
        step_seconds: wall time of each step on rank 0.
        comm_seconds: the part of it in route, dispatch and combine, forward and backward, with the
            waiting for peers.
        expert_load: ``[steps][layers][experts]``, rows of the expert over the mean of all experts.
    """

    failure: str = ""
    backend: str = ""
    why: str = ""
    device: str = ""
    num_ranks: int = 0
    parameters: int = 0
    layer_error: float = math.inf
    layer_tolerance: float = 0.0
    losses: list[float] = field(default_factory=list)
    valid: list[tuple[int, float]] = field(default_factory=list)
    unigram: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    comm_seconds: list[float] = field(default_factory=list)
    expert_load: list[list[list[float]]] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``demo``."""
    parser.add_argument("--ranks", type=int, help="processes; default: the GPUs, else 4")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (default 120)")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw loss and load, e.g. a .png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses, times and load")


def run(args: argparse.Namespace) -> int:
    """Check, train, report; returns 0, or 1 where the layer is wrong or the loss did not fall."""
    num_ranks = _checked_ranks(args)
    standard_library_files()  # their absence should show before any process starts
    began = time.monotonic()
    print(
        f"{ranks(num_ranks)}, {LAYERS} layers of {NUM_EXPERTS} experts, top-{TOPK}, hidden "
        f"{HIDDEN}, {BATCH} x {SEQUENCE} bytes a step; starting them",
        flush=True,
    )
    try:
        settings = Settings(args.backend, args.steps)
        report = run_ranks(train, num_ranks, settings, device=args.device, timeout_s=600)[0]
    except RuntimeError as error:
        report = Report(failure=str(error))
    if report.failure:
        print(f"hybrid-ep demo: {report.failure}", file=sys.stderr)
        return 1
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    if report.layer_error > report.layer_tolerance:
        print("demo: the distributed layer differs from one process: not training with it")
        return 1
    show_load(report)
    if args.plot:
        plot(report, args.plot)
        print(f"picture: {args.plot}")
    print(summary(report, time.monotonic() - began))
    return 0 if falling(report.losses) else 1


def _checked_ranks(args: argparse.Namespace) -> int:
    num_ranks = args.ranks
    if num_ranks is None:
        most = 4 if args.device == "cpu" else default_num_ranks()
        num_ranks = max(n for n in range(1, most + 1) if NUM_EXPERTS % n == 0)
    if num_ranks < 1 or NUM_EXPERTS % num_ranks:
        raise ValueError(
            f"--ranks must divide the number of experts, {NUM_EXPERTS}, got {num_ranks}"
        )
    if args.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {args.steps}")
    for flag, path in (("--plot", args.plot), ("--json", args.json)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{flag} must name a file in a folder that exists, got {path}")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave --plot out")
    return num_ranks


# ---- one rank


def train(device: torch.device, settings: Settings) -> Report:
    """Check the layer, train the model; runs on every rank, rank 0's report counts."""
    _be_deterministic(device)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    payload = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        buffer = TimedBuffer(
            hidden=HIDDEN,
            num_experts=NUM_EXPERTS,
            max_tokens=BATCH // num_ranks * SEQUENCE,
            topk=TOPK,
            dtype=payload,
            device=device,
            backend=settings.backend,
        )
    except RuntimeError as error:  # on all ranks: what the backend lacks, without a traceback
        return Report(failure=str(error))
    name = "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    report = Report("", buffer.backend, buffer.backend_reason, name, num_ranks)
    say = print if rank == 0 else _say_nothing

    report.layer_tolerance = 2e-2 if payload == torch.bfloat16 else 1e-4
    report.layer_error = compare_with_one_process(buffer, payload)
    equal = report.layer_error <= report.layer_tolerance
    say(f"{report.backend} backend on {report.device}, because {report.why}")
    say(
        f"the distributed layer {'equals' if equal else 'DIFFERS FROM'} the same layer on one "
        f"process: outputs and gradients within {report.layer_error:.1e} "
        f"(allowed {report.layer_tolerance:.0e})",
        flush=True,
    )
    if not equal:
        return report

    training, held_out = (text.to(device) for text in load_text())
    report.unigram = unigram_bits(training, held_out)
    model = Transformer(buffer, payload).to(device)
    local = sum(p.numel() for p in model.parameters())
    dense = sum(p.numel() for p in replicated_parameters(model))
    report.parameters = dense + (local - dense) * num_ranks
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    say(
        f"{report.parameters / 1e6:.2f} M parameters; {len(training) / 1e6:.1f} MB of Python to "
        f"learn from, {len(held_out) / 1e6:.1f} MB held out",
        flush=True,
    )
    report.valid.append((0, valid_bits(model, held_out)))
    valid_every = max(1, settings.steps // 6)
    with Progress(settings.steps, enabled=rank == 0) as progress:
        for step in range(1, settings.steps + 1):
            buffer.take_seconds()
            began = time.perf_counter()
            loss, load = train_step(model, optimizer, training, step, settings.steps)
            report.step_seconds.append(time.perf_counter() - began)
            report.comm_seconds.append(buffer.take_seconds())
            report.losses.append(loss)
            report.expert_load.append(load)
            if step == settings.steps or step % valid_every == 0:
                report.valid.append((step, valid_bits(model, held_out)))
            progress.update(report)
    dist.barrier()
    buffer.destroy()
    return report


def train_step(
    model: Transformer, optimizer: torch.optim.Optimizer, text: Tensor, step: int, steps: int
) -> tuple[float, list[list[float]]]:
    """One optimizer step; returns the mean loss of all ranks and the load ``[layers][experts]``."""
    num_ranks = dist.get_world_size()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, steps)
    starts = torch.randint(
        len(text) - SEQUENCE, (BATCH,), generator=torch.Generator().manual_seed(step)
    )
    loss, routed = model.loss(windows(text, starts[dist.get_rank() :: num_ranks]))
    aux_loss = torch.stack([layer.aux_loss for layer in routed]).mean()
    # The objective is the mean over the ranks. Divided here, the experts have their whole gradient
    # after backward, and the parameters that all ranks hold lack only the sum.
    ((loss + AUX_LOSS_WEIGHT * aux_loss) / num_ranks).backward()
    sum_gradients(replicated_parameters(model))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    counts = torch.stack([layer.counts for layer in routed]).float()  # [layers, local experts]
    load = torch.cat(
        _gathered(counts / counts.new_tensor(BATCH * SEQUENCE * TOPK / NUM_EXPERTS)), 1
    )
    return _mean_over_ranks(loss), load.tolist()


def sum_gradients(parameters: list[nn.Parameter]) -> None:
    """All-reduce as one message, through host memory, which any machine's gloo can send."""
    gradients = [p.grad for p in parameters]
    flat = torch.cat([g.flatten() for g in gradients]).cpu()
    dist.all_reduce(flat)
    parts = flat.to(gradients[0].device).split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    warm = min(1.0, step / WARMUP_STEPS)
    return LEARNING_RATE * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))


@torch.no_grad()
def valid_bits(model: Transformer, text: Tensor) -> float:
    """Bits per byte over ``VALID_WINDOWS`` windows spread over the text, shared among the ranks."""
    num_ranks, batch = dist.get_world_size(), BATCH // dist.get_world_size()
    starts = torch.linspace(0, len(text) - SEQUENCE - 1, VALID_WINDOWS, dtype=torch.float64).long()
    mine = starts[dist.get_rank() :: num_ranks]
    losses = [model.loss(windows(text, part))[0] for part in mine.split(batch)]
    return _mean_over_ranks(torch.stack(losses).mean()) / NATS_PER_BIT


def _gathered(tensor: Tensor) -> list[Tensor]:
    tensor = tensor.detach().cpu()
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, tensor)
    return everybody


def _mean_over_ranks(value: Tensor) -> float:
    values = [float(v) for v in _gathered(value.double())]
    return sum(values) / len(values)


def _say_nothing(*_: Any, **__: Any) -> None:
    pass


def _be_deterministic(device: torch.device) -> None:
    """So that two backends can be told apart by nothing but their time."""
    torch.manual_seed(0)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False


# ---- the model


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out; every feed-forward is a ``MoELayer``.

    Args:
        buffer: shared by all layers.
        payload: dtype of the matrix products and of what travels; parameters are float32.
    """

    def __init__(self, buffer: Buffer, payload: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)  # equal on all ranks
        self.payload = payload
        self.embed = nn.Embedding(256, HIDDEN)
        self.blocks = nn.ModuleList(Block(buffer, payload, seed) for seed in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 256, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def loss(self, text: Tensor) -> tuple[Tensor, list[MoEOutput]]:
        """Mean nats per byte of ``text`` ``[B, SEQUENCE + 1]``, and what each router did."""
        routed = []
        x = self.embed(text[:, :-1])
        with torch.autocast(x.device.type, self.payload, enabled=self.payload != torch.float32):
            for block in self.blocks:
                x, output = block(x)
                routed.append(output)
            logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten()), routed


class Block(nn.Module):
    """Causal attention with rotary positions, then experts."""

    def __init__(self, buffer: Buffer, payload: torch.dtype, seed: int) -> None:
        super().__init__()
        self.payload = payload
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.moe = MoELayer(buffer, FFN_HIDDEN, seed=seed)
        size = HIDDEN // HEADS
        frequency = 1000.0 ** (-torch.arange(0, size, 2) / size)
        angle = torch.outer(torch.arange(SEQUENCE), frequency)
        self.register_buffer("turn", torch.stack([angle.cos(), angle.sin()]), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, MoEOutput]:
        """Map ``[B, SEQUENCE, HIDDEN]`` to the same shape, and say what the router did."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(
            self._rotated(q), self._rotated(k), v, is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        routed = self.moe(self.norm2(x).to(self.payload))
        return x + routed.y, routed

    def _rotated(self, x: Tensor) -> Tensor:
        cos, sin = self.turn
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


# ---- the same layer on one process


def compare_with_one_process(buffer: Buffer, payload: torch.dtype) -> float:
    """Largest relative difference, on any rank, of outputs and gradients to plain arithmetic.

    The reference holds all experts on every rank and sends nothing, so each rank can follow its own
    tokens through all of them; the sum of its gradients over the ranks is the experts' gradient.
    """
    rank, device = buffer.topology.rank, buffer.device
    layer = MoELayer(buffer, FFN_HIDDEN, seed=7)
    everyone = GroupedExperts(NUM_EXPERTS, HIDDEN, FFN_HIDDEN, seed=7, device=device)
    generator = torch.Generator().manual_seed(rank)
    x, grad = torch.randn(2, 61 + 2 * rank, HIDDEN, generator=generator).to(device, payload)
    x.requires_grad_()

    y = layer(x).y
    y.backward(grad)
    found = [y, x.grad, layer.router.weight.grad, *(w.grad for w in layer.experts.parameters())]
    x.grad = layer.router.weight.grad = None
    y = _plain_moe(layer, everyone, x)
    y.backward(grad)
    wanted = [y, x.grad, layer.router.weight.grad]
    sum_gradients(list(everyone.parameters()))
    mine = slice(rank * buffer.num_local_experts, (rank + 1) * buffer.num_local_experts)
    wanted += [w.grad[mine] for w in everyone.parameters()]

    errors = torch.stack(
        [
            (a - b).abs().max() / b.abs().max().clamp(min=1e-6)
            for a, b in zip((t.double() for t in found), (t.double() for t in wanted), strict=True)
        ]
    )
    worst = float(torch.stack(_gathered(errors)).max())
    return math.inf if math.isnan(worst) else worst


def _plain_moe(layer: MoELayer, experts: GroupedExperts, x: Tensor) -> Tensor:
    """Sum over experts of weight * expert(x), each expert over all tokens, in float32."""
    topk_idx, topk_weights, _ = layer.router(x)
    gates = torch.zeros(len(x), NUM_EXPERTS, device=x.device).scatter(1, topk_idx, topk_weights)
    y = torch.zeros(x.shape, device=x.device)
    for expert in range(NUM_EXPERTS):
        w1, w3, w2 = (w[expert].to(x.dtype) for w in (experts.w1, experts.w3, experts.w2))
        y = y + gates[:, expert, None] * ((F.silu(x @ w1) * (x @ w3)) @ w2)
    return y.to(x.dtype)


# ---- the text


def standard_library_files() -> list[Path]:
    """Python's own modules, in an order that depends on nothing but their names.

    Raises:
        ValueError: this Python came without its sources.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    if len(files) < 20:
        raise ValueError(
            "the demo learns from the sources of Python's standard library, and this Python has "
            f"none in {sysconfig.get_paths()['stdlib']}"
        )
    return files


def load_text() -> tuple[Tensor, Tensor]:
    """Bytes to learn from and bytes of other files, every tenth, held out; both int64 ``[N]``."""
    files = standard_library_files()
    held_out = files[5::10]
    learned = [file for file in files if file not in set(held_out)]
    return _bytes_of(learned), _bytes_of(held_out)


def _bytes_of(files: list[Path]) -> Tensor:
    text = bytearray(b"\n".join(file.read_bytes() for file in files))
    return torch.frombuffer(text, dtype=torch.uint8).long()


def windows(text: Tensor, starts: Tensor) -> Tensor:
    """``[B, SEQUENCE + 1]`` bytes from each start on."""
    return text[starts[:, None].to(text.device) + torch.arange(SEQUENCE + 1, device=text.device)]


def unigram_bits(training: Tensor, held_out: Tensor) -> float:
    """Bits per byte of a code that knows how often each byte occurs, and nothing else."""
    seen = torch.bincount(training.cpu(), minlength=256).double() + 1
    bits = -(seen / seen.sum()).log2()
    return float(bits[held_out.cpu()].mean())


# ---- what people see


class Progress:
    """A bar on a terminal with rich, a line now and then elsewhere."""

    def __init__(self, steps: int, *, enabled: bool) -> None:
        self._steps, self._enabled = steps, enabled
        self._bar = self._task = None
        if enabled and sys.stdout.isatty() and importlib.util.find_spec("rich"):
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("step {task.completed}/{task.total}"),
                progress.BarColumn(),
                progress.TextColumn("{task.description}"),
                progress.TimeRemainingColumn(),
            )

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, report: Report) -> None:
        """Show the last step of the report."""
        if not self._enabled:
            return
        step = len(report.losses)
        share = f"{100 * comm_share(report):.0f}% dispatch+combine"
        text = f"loss {report.losses[-1]:.6f} nats/byte, {share}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif step in (1, self._steps) or step % max(1, self._steps // 8) == 0:
            print(f"step {step:4}/{self._steps}  {text}", flush=True)


def ranks(count: int) -> str:
    """The count with its noun."""
    return f"{count} rank" if count == 1 else f"{count} ranks"


def comm_share(report: Report) -> float:
    """Share of the steps' time in dispatch and combine, without the first step, which warms up."""
    begin = 1 if len(report.step_seconds) > 1 else 0
    return sum(report.comm_seconds[begin:]) / sum(report.step_seconds[begin:])


def falling(losses: list[float]) -> bool:
    """Whether the end is below the beginning, and finite."""
    return math.isfinite(losses[-1]) and (len(losses) == 1 or final_loss(losses) < losses[0])


def final_loss(losses: list[float]) -> float:
    """Mean of the last tenth of the steps, at most ten: one batch alone is noisy."""
    last = losses[-max(1, min(10, len(losses) // 10)) :]
    return sum(last) / len(last)


def late_load(report: Report) -> Tensor:
    """``[layers, experts]``, mean over the last quarter of the steps."""
    load = torch.tensor(report.expert_load)
    return load[-max(1, len(load) // 4) :].mean(dim=0)


def show_load(report: Report) -> None:
    """One line a layer."""
    print("load of the experts at the end (each bar one expert, full height twice the mean):")
    for layer, load in enumerate(late_load(report).tolist()):
        bars = "".join("▁▂▃▄▅▆▇█"[min(7, int(4 * value))] for value in load)
        busiest = torch.tensor(load).view(report.num_ranks, -1).mean(dim=1).max()
        print(
            f"  layer {layer}  {bars}  busiest expert {max(load):.2f}x, least busy "
            f"{min(load):.2f}x, busiest rank {busiest:.2f}x the mean"
        )


def summary(report: Report, seconds: float) -> str:
    """The last line."""
    step_ms = sorted(report.step_seconds)[len(report.step_seconds) // 2] * 1e3
    return (
        f"demo: loss {report.losses[0]:.4f} -> {final_loss(report.losses):.4f} nats/byte in "
        f"{len(report.losses)} steps of {step_ms:.0f} ms, held-out text {report.valid[-1][1]:.3f} "
        f"bits/byte (byte frequencies alone: {report.unigram:.3f}), "
        f"{100 * comm_share(report):.0f}% of the time in dispatch and combine; {report.backend} "
        f"backend, {ranks(report.num_ranks)} on {report.device}, {seconds:.0f} s"
    )


def plot(report: Report, path: Path) -> None:
    """Draw the loss and the load of every expert over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    steps = range(1, len(report.losses) + 1)
    bits = [loss / NATS_PER_BIT for loss in report.losses]
    left.plot(steps, bits, color="tab:blue", linewidth=1.2, label="training batch")
    left.plot(*zip(*report.valid, strict=True), "o-", color="tab:orange", label="held-out text")
    left.axhline(
        report.unigram, color="gray", linestyle="--", linewidth=1, label="byte frequencies alone"
    )
    left.set(xlabel="step", ylabel="bits per byte", title="Loss")
    left.set_ylim(bottom=0)
    left.grid(alpha=0.3)
    left.legend()

    load = torch.tensor(report.expert_load).flatten(1).t()  # [layers * experts, steps]
    image = right.imshow(
        load.tolist(),
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        vmin=0,
        vmax=2,
        extent=(0.5, len(report.losses) + 0.5, len(load) - 0.5, -0.5),
    )
    for layer in range(1, LAYERS):
        right.axhline(layer * NUM_EXPERTS - 0.5, color="black", linewidth=1)
    middles = [layer * NUM_EXPERTS + (NUM_EXPERTS - 1) / 2 for layer in range(LAYERS)]
    right.set_yticks(middles, [f"layer {layer}" for layer in range(LAYERS)])
    right.tick_params(axis="y", length=0)
    right.set(xlabel="step", ylabel=f"{NUM_EXPERTS} experts a layer", title="Load of the experts")
    figure.colorbar(image, ax=right, extend="max", label="tokens, over the mean of the experts")
    figure.suptitle(
        f"hybrid_ep demo: {ranks(report.num_ranks)} on {report.device}, "
        f"{report.backend} backend, {100 * comm_share(report):.0f}% of the time in dispatch and "
        "combine"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
