"""The frameworks' own dispatchers over this library, on ranks that have them on their path.

Each function returns a list of what is wrong: nothing. Experts multiply or bend their rows, so the
result of a layer is known from the tokens and the routing of its rank alone.
"""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybrid_ep.integrations import deep_ep
from tests.launch import Rank
from tools.fetch_consumers import paths_of

HIDDEN = 64


def call(me: Rank, framework: str, name: str, *args: Any) -> list[str]:
    """The function of this module of that name, with the framework on the path."""
    for path in reversed([str(path) for path in paths_of(framework)]):
        if path not in sys.path:
            sys.path.append(path)
    deep_ep.install()
    waiting = mock.patch.object(torch.cuda, "synchronize", lambda device=None: None)
    try:
        with _CudaIsTheCpu(), waiting:
            return globals()[name](me, *args)
    finally:
        deep_ep.settings.forget()


class _CudaIsTheCpu(TorchFunctionMode):
    """Some of their tensors are made on "cuda", wherever the others are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _far(found: dict[str, tuple[Tensor, Tensor]], tolerance: float = 2e-2) -> list[str]:
    """The results that are not close, relative to the largest value."""
    faults = []
    for name, (got, wanted) in found.items():
        if got.shape != wanted.shape:
            faults.append(f"{name}: {list(got.shape)} is not {list(wanted.shape)}")
            continue
        size = wanted.float().abs().max().clamp(min=1e-3)
        worst = float((got.float() - wanted.float()).abs().max() / size) if got.numel() else 0.0
        if not worst <= tolerance:
            faults.append(f"{name}: off by {worst:.1e}")
    return faults


# ---- Megatron-Core: the manager of its flex dispatcher


def _megatron_manager(me: Rank, experts: int, align: int = 16, **options: Any) -> Any:
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    fused_a2a.reset_hybrid_ep_buffer()
    token_dispatcher.get_align_size_for_quantization = lambda config: align  # with rank budgets
    config = {
        "moe_router_topk": 2,
        "moe_permute_fusion": False,
        "moe_permute_fusion_into_hybridep": False,
        "moe_expert_capacity_factor": None,
        "moe_pad_expert_input_to_capacity": False,
        "moe_expert_rank_capacity_factor": None,
        "moe_hybridep_pad_uneven_dispatch_inputs": False,
        "moe_hybridep_num_blocks_permute": None,
        "moe_hybridep_num_blocks_unpermute": None,
        "moe_hybridep_num_sms_preprocessing": 108,
        "moe_flex_dispatcher_num_sms": None,
        "use_transformer_engine_op_fuser": False,
        "fp8": None,
        "fp4": None,
    }
    config = SimpleNamespace(**{**config, **options})
    local = experts // me.num_ranks
    return token_dispatcher._HybridEPManager(dist.group.WORLD, local, experts, config)


class _Routed:
    """Tokens, dense probs that require gradients, and the map of a rank."""

    def __init__(self, me: Rank, tokens: int, experts: int, seed: int = 0, hidden: int = HIDDEN):
        generator = torch.Generator().manual_seed(1000 * seed + me.rank)
        self.x = torch.randn(tokens, hidden, generator=generator).bfloat16().requires_grad_()
        probs = torch.rand(tokens, experts, generator=generator)
        self.map = torch.zeros(tokens, experts, dtype=torch.bool)
        self.map.scatter_(1, probs.topk(2).indices, True)
        self.probs = (probs * self.map).requires_grad_()

    def dispatch(self, manager: Any) -> Tensor:
        manager.setup_metadata(self.map, self.probs)
        return manager.dispatch(self.x)

    def plain(self) -> Tensor:
        return self.x.detach().float() * (self.probs * self.map).detach().sum(1, keepdim=True)

    def faults(self, y: Tensor, name: str) -> list[str]:
        """What is wrong with y and, after ``y.sum().backward()``, with both gradients."""
        y.float().sum().backward()
        gate = (self.probs * self.map).detach().sum(1, keepdim=True)
        of_probs = self.x.detach().float().sum(1, keepdim=True) * self.map
        return _far(
            {
                f"{name}, y": (y, self.plain()),
                f"{name}, gradient of x": (self.x.grad, gate.expand_as(self.x)),
                f"{name}, gradient of probs": (self.probs.grad, of_probs),
            }
        )


def _weighted(manager: Any, rows: Tensor, probs: Tensor) -> Tensor:
    return manager.combine((rows.float() * probs.unsqueeze(1)).to(rows.dtype))


def _step(manager: Any, routed: _Routed) -> Tensor:
    rows = routed.dispatch(manager)
    return _weighted(manager, rows, manager.dispatched_probs)


def megatron_identity(me: Rank) -> list[str]:
    """Dropless; then tokens that a capacity has dropped; then more tokens, wider tokens, none."""
    experts = 4 * me.num_ranks
    manager, faults = _megatron_manager(me, experts), []
    for tokens, hidden, kept in (
        (24, 64, 1.0),
        (24, 64, 0.5),
        (90, 64, 1.0),
        (16, 128, 1.0),
        (24, 64, 0.0),
    ):
        routed = _Routed(me, tokens, experts, seed=tokens, hidden=hidden)
        generator = torch.Generator().manual_seed(me.rank)
        routed.map &= torch.rand(routed.map.shape, generator=generator) < kept
        y = _step(manager, routed)
        faults += routed.faults(y, f"T {tokens}, H {hidden}, kept {kept}")
    return faults


def megatron_budget(me: Rank, factor: float) -> list[str]:
    """A budget of rows per rank: the flag says exactly whether rows were dropped."""
    experts = 4 * me.num_ranks
    manager = _megatron_manager(me, experts, moe_expert_rank_capacity_factor=factor)
    routed = _Routed(me, 64, experts)
    y = _step(manager, routed)
    counts = routed.map.sum(dim=0)
    dist.all_reduce(counts)
    needed = int(counts.view(me.num_ranks, -1)[me.rank].sum())
    budget = -(-int(64 * 2 * factor) // 16) * 16
    y.float().sum().backward()
    found = {
        "a finite gradient": (bool(torch.isfinite(routed.x.grad).all()), True),
        "rows": (int(manager.tokens_per_expert.sum()), min(needed, budget)),
        "flag": (bool(manager.over_budget.item()), needed > budget),
    }
    faults = [
        f"{name}: {got}, not {wanted}" for name, (got, wanted) in found.items() if got != wanted
    ]
    # then the same step without a budget, as the replay of a step that overflowed
    again = _Routed(me, 64, experts)
    manager.moe_expert_rank_capacity_factor = None
    return faults + again.faults(_step(manager, again), "without a budget")


def megatron_uneven(me: Rank, pads: bool) -> list[str]:
    """Another number of tokens on each rank, with Megatron's padding and without."""
    experts = 4 * me.num_ranks
    manager = _megatron_manager(me, experts, moe_hybridep_pad_uneven_dispatch_inputs=pads)
    routed = _Routed(me, 17 + 30 * me.rank, experts)
    return routed.faults(_step(manager, routed), f"padded: {pads}")


def megatron_interleaved(me: Rank) -> list[str]:
    """1F1B: two micro-batches in flight, the backward of one among the forward of others."""
    experts = 4 * me.num_ranks
    first, second = (_megatron_manager(me, experts) for _ in range(2))
    a, b, c = (_Routed(me, 32, experts, seed) for seed in (1, 2, 3))
    rows_a, rows_b = a.dispatch(first), b.dispatch(second)
    probs_a, probs_b = first.dispatched_probs, second.dispatched_probs
    y_a = _weighted(first, rows_a, probs_a)
    y_b = _weighted(second, rows_b, probs_b)
    faults = b.faults(y_b, "second")
    rows_c = c.dispatch(second)
    probs_c = second.dispatched_probs
    faults += a.faults(y_a, "first")
    return faults + c.faults(_weighted(second, rows_c, probs_c), "third")


def megatron_drop_and_pad(me: Rank) -> list[str]:
    """A fixed number of tokens for each expert: a token may have any number of experts."""
    experts = 4 * me.num_ranks
    capacity = {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
    manager = _megatron_manager(me, experts, **capacity)
    routed = _Routed(me, 32, experts)
    each = -(-32 * 2 * 3 // (2 * experts))
    chosen = (routed.probs.detach()).topk(each, dim=0).indices
    routed.map = torch.zeros_like(routed.map).scatter_(0, chosen, True)
    y = _step(manager, routed)
    faults = [] if int(manager.tokens_per_expert.sum()) == each * experts else ["other counts"]
    return faults + routed.faults(y, "drop and pad")


# ---- NeMo Automodel: its flex dispatcher


def automodel(me: Rank) -> list[str]:
    """Dense maps, compact routing, fused, replay of a recorded dispatch: the same bits."""
    from nemo_automodel.components.moe.megatron import fused_a2a
    from nemo_automodel.components.moe.megatron.token_dispatcher import (
        MoEFlexTokenDispatcher,
        TokenDispatcherConfig,
    )

    local = 4
    experts, tokens = local * me.num_ranks, 40 + 7 * me.rank  # it pads to the most of all ranks
    generator = torch.Generator().manual_seed(me.rank)
    x0 = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    weights0, topk_idx = torch.rand(tokens, experts, generator=generator).topk(2)
    topk_idx[3, 1] = -1
    topk_idx[5] = -1

    def run(replay: bool = False, **options: Any) -> list[Tensor]:
        fused_a2a.reset_hybrid_ep_buffer()
        config = TokenDispatcherConfig(
            moe_router_topk=2,
            num_moe_experts=experts,
            moe_flex_dispatcher_backend="hybridep",
            moe_share_token_dispatcher=False,
            **options,
        )
        mine = list(range(me.rank * local, (me.rank + 1) * local))
        dispatcher = MoEFlexTokenDispatcher(local, mine, config, dist.group.WORLD)
        x, weights = x0.clone().requires_grad_(), weights0.clone().requires_grad_()

        def block() -> Tensor:
            rows, _, probs = dispatcher.token_permutation2(x, tokens, weights, topk_idx)
            rows = (torch.tanh(rows.float()) * probs.unsqueeze(1)).to(rows.dtype)
            return dispatcher.token_unpermutation(rows)

        if replay:  # as its checkpointing does
            recorder = fused_a2a.HybridEPDispatchReplayRecorder()
            with torch.no_grad(), fused_a2a.hybridep_dispatch_replay_scope(recorder, "record"):
                block()
            recorder.finalize()
            recorder.rewind()
            with fused_a2a.hybridep_dispatch_replay_scope(recorder, "replay"):
                y = block()
            assert recorder.replay_misses == 0
        else:
            y = block()
        y.float().square().sum().backward()
        return [y.detach(), x.grad, weights.grad]

    dense = run()
    gate = torch.where(topk_idx >= 0, weights0, 0.0).sum(dim=1, keepdim=True)
    faults = _far({"y": (dense[0], torch.tanh(x0.float()) * gate)})
    ways = {
        "compact": {"moe_hybridep_compact_routing": True},
        "fused": {"moe_hybridep_permute_fusion": True},
        "replay": {"replay": True},
        "replay, compact": {"replay": True, "moe_hybridep_compact_routing": True},
    }
    for name, options in ways.items():
        if not all(map(torch.equal, run(**options), dense)):
            faults.append(f"{name}: other bits")
    return faults


# ---- torchtitan


def _titan_tokens(me: Rank, experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(me.rank)
    x = torch.randn(48, HIDDEN, generator=generator).to(dtype).requires_grad_()
    scores, experts_of = torch.rand(48, experts, generator=generator).topk(2)
    return x, scores.clone().requires_grad_(), experts_of


def _titan_step(me: Rank, dispatcher: Any, dtype: torch.dtype) -> list[Tensor]:
    """Expert e multiplies by e + 1; y and the gradients of tokens and scores."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (me.num_ranks,), mesh_dim_names=("ep",))
    dispatcher.wire_meshes(ep_mesh=mesh)
    experts = dispatcher.num_experts
    x, scores, experts_of = _titan_tokens(me, experts, dtype)
    counts = torch.bincount(experts_of.flatten(), minlength=experts)
    rows, counts, metadata = dispatcher.dispatch(x, scores, experts_of, counts)
    first = me.rank * (experts // me.num_ranks) + 1
    factor = torch.arange(first, first + len(counts)).repeat_interleave(counts.cpu())
    factor = torch.nn.functional.pad(factor, (0, len(rows) - len(factor))).to(rows.dtype)
    y = dispatcher.combine(rows * factor.unsqueeze(1), metadata, x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, scores.grad]


def _titan_plain(me: Rank, experts: int, dtype: torch.dtype) -> list[Tensor]:
    x, scores, experts_of = _titan_tokens(me, experts, dtype)
    y = x * (scores * (experts_of + 1)).sum(dim=1, keepdim=True).to(dtype)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, scores.grad]


TITAN_WAYS = ({}, {"pad_multiple": 16}, {"non_blocking_capacity_factor": 1.0})


def _titan_sizes(me: Rank) -> dict[str, int]:
    experts = 4 * me.num_ranks
    return {
        "num_experts": experts,
        "top_k": 2,
        "hidden_dim": HIDDEN,
        "num_max_tokens_per_rank": 48,
    }


def titan_unchanged(me: Rank) -> list[str]:
    """torchtitan's own dispatcher and ops. They are registered for CUDA alone: here for the CPU."""
    plain = torch.library.custom_op

    def custom_op(*args: Any, device_types: Any = None, **options: Any) -> Any:
        return plain(*args, **options)

    with mock.patch.object(torch.library, "custom_op", custom_op):
        from torchtitan.distributed.deepep import hybridep  # noqa: F401
        from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher

    faults, sizes = [], _titan_sizes(me)
    for way in TITAN_WAYS:
        config = HybridEPTokenDispatcher.Config(**sizes, **way)
        got = _titan_step(me, HybridEPTokenDispatcher(config), torch.bfloat16)
        pairs = zip(got, _titan_plain(me, sizes["num_experts"], torch.bfloat16), strict=True)
        faults += _far({f"{way} {i}": pair for i, pair in enumerate(pairs)})
    return faults


def _overridden(me: Rank, targets: list[Any], **way: Any) -> Any:
    """The config that torchtitan's overrides make of its dispatcher's and its checkpointing's."""
    from dataclasses import dataclass

    from torchtitan.config import Configurable, OverrideConfig, apply_overrides
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher

    class Model(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            token_dispatcher: HybridEPTokenDispatcher.Config
            checkpointing: SelectiveAC.Config

    tree = Model.Config(
        token_dispatcher=HybridEPTokenDispatcher.Config(**_titan_sizes(me), **way),
        checkpointing=SelectiveAC.Config(),
    )
    apply_overrides(OverrideConfig(imports=targets), tree)
    return tree


MODULE = "hybrid_ep.integrations.torchtitan"


def titan_override(me: Rank) -> list[str]:
    """The dispatcher that the override puts in the place of torchtitan's."""
    from hybrid_ep.integrations.torchtitan import HybridEpDispatcher

    faults = []
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
        plain = _titan_plain(me, 4 * me.num_ranks, dtype)
        for way in TITAN_WAYS:
            for weighted in (True, False):
                target = f"{MODULE}.dispatcher", {"weighted_combine": weighted}
                dispatcher = _overridden(me, [target], **way).token_dispatcher.build()
                if type(dispatcher) is not HybridEpDispatcher:
                    faults.append(f"it is a {type(dispatcher)}")
                pairs = zip(_titan_step(me, dispatcher, dtype), plain, strict=True)
                named = {f"{dtype} {way} {weighted} {i}": pair for i, pair in enumerate(pairs)}
                faults += _far(named, tolerance)
    if "torchtitan.distributed.deepep.hybridep" in sys.modules:
        faults.append("torchtitan's own ops were imported")
    return faults


def titan_checkpointing(me: Rank) -> list[str]:
    """Under torchtitan's selective checkpointing with our ops, nothing is sent again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    tree = _overridden(me, [f"{MODULE}.dispatcher", f"{MODULE}.selective_ac"])
    saved = tree.checkpointing.build().get_save_ops()
    dispatcher = tree.token_dispatcher.build()
    mesh = init_device_mesh("cpu", (me.num_ranks,), mesh_dim_names=("ep",))
    dispatcher.wire_meshes(ep_mesh=mesh)
    verbs = dispatcher._buffer_for(torch.bfloat16).communicator.verbs

    def policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        keep = CheckpointPolicy.MUST_SAVE
        return keep if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    x0, scores0, experts_of = _titan_tokens(me, 4 * me.num_ranks, torch.bfloat16)

    def block(x: Tensor, scores: Tensor) -> Tensor:
        rows, _, metadata = dispatcher.dispatch(x, scores, experts_of, None)
        return dispatcher.combine(torch.tanh(rows), metadata, x)

    results, calls = [], []
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for checkpointed in (False, True):
        x, scores = (each.detach().clone().requires_grad_() for each in (x0, scores0))
        before = verbs.last_call
        if checkpointed:
            y = checkpoint(block, x, scores, use_reentrant=False, context_fn=contexts)
        else:
            y = block(x, scores)
        y.float().square().sum().backward()
        calls.append(verbs.last_call - before)
        results.append((y.detach(), x.grad, scores.grad))
    faults = [] if all(map(torch.equal, *results)) else ["other bits"]
    if calls[0] != calls[1]:
        faults.append(f"{calls[1]} calls in place of {calls[0]}")
    return faults
