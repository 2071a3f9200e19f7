"""A step that fails on one rank raises on all: that rank its own exception, the others its name."""

import pytest

from tests.ranks import one_rank_fails

pytestmark = pytest.mark.not_on(
    "torch_gpu", why="a Buffer is built as on torch_cpu, and its device has no part in it"
)
GOOD = ("", "")
FAULTS = {
    "hidden": ({"hidden": 0}, "ValueError", "hidden must be an integer of at least 1, got 0"),
    "topk": ({"topk": True}, "ValueError", "topk must be an integer of at least 1, got True"),
    "num_experts": ({"num_experts": 7}, "ValueError", "num_experts must be divisible by"),
    "scale_bytes": ({"scale_bytes": -1}, "ValueError", "scale_bytes must be an integer"),
    "backend": ({"backend": "nccl"}, "ValueError", "backend must be one of auto, torch"),
    "ranks_per_node": ({"ranks_per_node": 5}, "ValueError", "ranks_per_node must divide"),
    "ranks_per_node_type": ({"ranks_per_node": "2"}, "ValueError", "at least 1, got '2'"),
    "config_type": ({"config": 3}, "ValueError", "config must be a Config or the path"),
    "config_file": ({"config": "no/such/file"}, "FileNotFoundError", "no/such/file"),
    "device_name": ({"device": "gpu"}, "ValueError", "device must be a torch.device or its name"),
    "dtype": ({"dtype": "bf16"}, "TypeError", "dtype must be a torch.dtype like"),
    "too_many_slots": ({"topk": 19}, "ValueError", "topk must be at most num_experts="),
}


def check_named(results, kind, text, peers_kind=None, victim=1):
    """The victim raises its own, the others name it; afterwards the group works."""
    own = results[victim][0]
    assert own[0] == kind and text in own[1], own
    for rank, (seen, after) in enumerate(results):
        assert after == GOOD
        if rank != victim:
            repeats = ("OSError" if kind == "FileNotFoundError" else peers_kind or kind), own[1]
            assert seen[0] == repeats[0]
            assert seen[1].startswith(f"rank {victim}: ") and repeats[1] in seen[1], seen


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_a_rule_broken_on_one_rank_raises_on_all(world, name, num_ranks):
    wrong, kind, text = FAULTS[name]
    by_rank = [wrong if rank == 1 else {} for rank in range(num_ranks)]
    results = world(num_ranks).run(one_rank_fails.build, by_rank)
    check_named(results, kind, text)


def test_two_ranks_with_different_faults_raise_their_own(world):
    wrong = [{"hidden": 0}, {}, {"topk": 0}]
    first, second, third = (told for told, _ in world(3).run(one_rank_fails.build, wrong))
    assert first == ("ValueError", "hidden must be an integer of at least 1, got 0")
    assert second == ("ValueError", f"rank 0: {first[1]}")
    assert third == ("ValueError", "topk must be an integer of at least 1, got 0")


def test_a_failed_step_keeps_nothing_of_its_callers_alive(world):
    assert world(2).run(one_rank_fails.fail_and_go_on) == [False, False]


@pytest.mark.parametrize(
    ("error", "peers"),
    [
        (MemoryError(), ("MemoryError", "rank 1: MemoryError")),
        (RuntimeError("CUDA error: out of memory"), ("RuntimeError", "rank 1: CUDA error: out of")),
        (TypeError("a bug"), ("TypeError", "rank 1: a bug")),
        (KeyError("a bug"), ("Exception", "rank 1: KeyError: 'a bug'")),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(
            "build_the_backend",
            marks=pytest.mark.not_on(
                "nvlink",
                "nodes",
                why="such a backend is one that cannot run: tests/unit/test_nvlink.py",
            ),
        ),
        "release",
        "restore",
    ],
)
def test_an_exception_on_one_rank_raises_on_all(world, step, error, peers):
    results = world(2).run(getattr(one_rank_fails, step), error)
    assert results[1] == [(type(error).__name__, str(error)), GOOD]
    (kind, text), after = results[0]
    assert kind == peers[0] and text.startswith(peers[1]), text
    assert after == GOOD


def test_a_trace_that_cannot_be_written_raises_on_all(world, tmp_path):
    paths = [str(tmp_path / "none" / "trace.json"), str(tmp_path / "trace.json")]
    results = world(2).run(one_rank_fails.write_trace, paths)
    check_named(results, "FileNotFoundError", paths[0], victim=0)
    assert (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("name", ["release", "restore"])
def test_a_Buffer_destroyed_on_one_rank_raises_on_all(world, name):
    results = world(2).run(one_rank_fails.use_after_destroy, name)
    check_named(results, "RuntimeError", "this hybrid_ep.Buffer was destroyed")
