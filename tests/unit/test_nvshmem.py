"""What of the nvshmem backend shows without a GPU: sizes, messages, settings, how it is linked."""

import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid_ep import Config, config, shape
from hybrid_ep.backends.cuda import backend, nvshmem, nvshmem_library
from hybrid_ep.backends.cuda.fabric import Port, network_environment
from hybrid_ep.backends.cuda.settings import runtime_settings
from hybrid_ep.group import ranks_of_a_host
from hybrid_ep.layout.nodes_layout import nodes_handle_bytes, nodes_regions
from hybrid_ep.shape import Shape
from tests.ranks import fake_nvshmem

ACTIVE = (Port("mlx5_0", 1, gids=(0, 1)),)
RANK_1 = SimpleNamespace(rank=1, device=torch.device("cuda", 1))
SIZES = {"channels": 8, "queue_depth": 128, "heap_bytes": 1 << 30}


@pytest.fixture
def extension():
    if importlib.util.find_spec("hybrid_ep._nvshmem") is None:
        pytest.skip("hybrid_ep._nvshmem was not built: that takes nvcc and NVSHMEM")
    nvshmem.load_extension()
    return nvshmem._nvshmem


# ---- sizes


@pytest.mark.parametrize("tokens", [1, 130, 4096])
@pytest.mark.parametrize("nodes, ranks_per_node, topk", [(1, 3, 1), (2, 1, 7), (8, 8, 8)])
def test_sizes_are_those_of_the_extension(extension, tokens, nodes, ranks_per_node, topk):
    sizes = Shape(
        num_ranks=nodes * ranks_per_node,
        ranks_per_node=ranks_per_node,
        num_experts=5 * nodes * ranks_per_node,
        max_tokens=tokens,
        hidden=2880,
        topk=topk,
        scale_bytes=40,
    )
    assert (sizes.row_capacity, sizes.inbox_row_bytes) == (2 * 2880 + 48, 2 * 2880)
    windows = Config(network_channels=2, network_chunk_tokens=32, network_window_chunks=8)
    settings = runtime_settings(sizes, RANK_1, windows, number=0, last_call=0, most_sms=1)
    config = extension.RuntimeConfig(**settings, uses_mapped=True)
    assert sum(nodes_regions(sizes, windows).values()) == config.symmetric_bytes
    assert nodes_handle_bytes(sizes) == 4 * config.handle_words


def test_runtimes_take_their_settings_by_name_and_say_which_is_missing(extension):
    """Without a GPU: what the backends give is all that both runtimes read."""
    import hybrid_ep._nvlink as nvlink

    sizes = Shape(num_ranks=4, ranks_per_node=2, num_experts=8, max_tokens=16, hidden=32, topk=2)
    given = Config(timeout_s=None, num_sms_combine=64)
    settings = runtime_settings(sizes, RANK_1, given, number=5, last_call=3, most_sms=8)
    assert settings["num_sms_combine"] == 8
    nvlink.RuntimeConfig(**settings)
    extension.RuntimeConfig(**settings, uses_mapped=True)
    for module, name in ((nvlink, "slice_bytes"), (extension, "network_channels")):
        given = {key: value for key, value in settings.items() if key != name}
        with pytest.raises(TypeError, match=f"RuntimeConfig needs {name}"):
            module.RuntimeConfig(**given, uses_mapped=True)


def test_limits_are_those_of_the_extension(extension):
    assert shape.MAX_NODE_RANKS == extension.MAX_NODE_RANKS
    assert config.MAX_CHUNK_TOKENS == extension.MAX_CHUNK_TOKENS


def test_windows_do_not_grow_with_the_tokens_of_a_call():
    shape = Shape(
        num_ranks=64, ranks_per_node=8, num_experts=256, max_tokens=2048, hidden=7168, topk=8
    )
    config = Config(network_channels=4, network_chunk_tokens=32, network_window_chunks=4)
    few = nodes_regions(shape, config)
    many = nodes_regions(replace(shape, max_tokens=65_536), config)
    for region in ("relay_window", "push_window", "push_values", "outgoing", "home_window"):
        assert few[region] == many[region]


# ---- what it says


def test_no_NVSHMEM_is_said(monkeypatch):
    monkeypatch.setattr(nvshmem_library, "find_home", lambda environment: None)
    with pytest.raises(ImportError, match=r"install the wheel nvidia-nvshmem-cu13 .* NVSHMEM_HOME"):
        nvshmem_library.load_host_library({})


def test_an_NVSHMEM_HOME_without_the_library_is_said(tmp_path):
    with pytest.raises(ImportError, match=f"cannot be loaded: .*{tmp_path}"):
        nvshmem_library.load_host_library({"NVSHMEM_HOME": str(tmp_path)})


def test_another_version_than_it_was_built_with_is_said(extension, monkeypatch):
    class Other:
        __file__ = extension.__file__
        built_version = staticmethod(lambda: "3.4.5")
        loaded_version = staticmethod(lambda: "3.6.1")

    import hybrid_ep

    monkeypatch.setattr(nvshmem, "_nvshmem", None)
    monkeypatch.setattr(hybrid_ep, "_nvshmem", Other, raising=False)
    monkeypatch.setitem(sys.modules, "hybrid_ep._nvshmem", Other)
    with pytest.raises(ImportError, match=r"built with NVSHMEM 3\.4\.5, this process has 3\.6\.1"):
        nvshmem.load_extension()


def test_a_failure_of_NVSHMEM_is_an_exception(extension):
    """It starts without a GPU and would end the process at the first use."""
    script = (
        "import os; from hybrid_ep.backends.cuda import nvshmem as n; n.load_extension();\n"
        "try: n._nvshmem.start(n._nvshmem.unique_id(), 0, 1)\n"
        "except RuntimeError as error: print(error); os._exit(0)"
    )
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here, and the text under test is for machines without one")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "NVSHMEM found no GPU to start on" in done.stdout, done.stderr


def test_limits_are_said_by_name():
    def beyond(num_nodes, ranks_per_node):
        num_ranks = num_nodes * ranks_per_node
        sizes = {"num_experts": 2 * num_ranks, "max_tokens": 16, "hidden": 32, "topk": 2}
        made = Shape(num_ranks=num_ranks, ranks_per_node=ranks_per_node, **sizes)
        return made.beyond("nvshmem")

    assert beyond(2, 3) == beyond(128, 8) == []
    assert beyond(129, 8) == ["the number of ranks must be at most 1024, got 1032"]
    assert beyond(1, 33) == ["ranks_per_node must be at most 32, got 33"]


# ---- where ranks are


@pytest.mark.parametrize(
    "hosts, expected",
    [("a", 1), ("aa", 2), ("ab", 1), ("aabb", 2), ("aabbcc", 2), ("abab", 4), ("aab", 3)],
)
def test_hosts_are_nodes_where_they_are_equal_and_in_order(hosts, expected):
    assert ranks_of_a_host(hosts) == expected


# ---- what NVSHMEM is told


def test_a_card_means_IBGDA_with_a_queue_pair_a_channel():
    told = network_environment({}, **SIZES, ports=ACTIVE)
    assert told["NVSHMEM_IB_ENABLE_IBGDA"] == "1"
    assert told["NVSHMEM_IBGDA_NUM_RC_PER_PE"] == "8"
    assert told["NVSHMEM_IBGDA_RC_MAP_BY"] == "cta"
    assert told["NVSHMEM_QP_DEPTH"] == "128"
    assert "NVSHMEM_SYMMETRIC_SIZE" not in told, "the heap grows by itself"


def test_without_a_card_NVSHMEM_chooses():
    assert network_environment({}, **SIZES, ports=()) == {
        "NVSHMEM_DISABLE_NVLS": "1",
        "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1",
    }


@pytest.mark.parametrize("value", ["eth0", "=eth0", "^docker", "^=docker0,lo", "eth,ib"])
@pytest.mark.parametrize("ports", [(), ACTIVE], ids=["no_card", "card"])
def test_NVSHMEM_starts_over_the_interfaces_that_NCCL_was_told(ports, value):
    given = {"NCCL_SOCKET_IFNAME": value, "NCCL_SOCKET_FAMILY": "AF_INET6"}
    told = network_environment(given, **SIZES, ports=ports)
    assert told["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] == value
    assert told["NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY"] == "AF_INET6"
    own = {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "ib0"}
    told = network_environment(given | own, **SIZES, ports=ports)
    assert "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME" not in told, "NVSHMEM's own setting wins"


def test_what_the_user_set_is_left_alone():
    mine = {
        "NVSHMEM_IB_ENABLE_IBGDA": "0",
        "NVSHMEM_IBGDA_NUM_RC_PER_PE": "2",
        "NVSHMEM_QP_DEPTH": "1024",
        "NVSHMEM_DISABLE_NVLS": "0",
        "NVSHMEM_DISABLE_CUDA_VMM": "1",
    }
    told = network_environment(mine, **SIZES, ports=ACTIVE)
    assert told == {"NVSHMEM_IBGDA_RC_MAP_BY": "cta", "NVSHMEM_SYMMETRIC_SIZE": str(1 << 30)}


@pytest.mark.parametrize("tokens", [0, 33, 1.5])
def test_chunks_are_of_at_most_a_token_a_lane(tokens):
    with pytest.raises(ValueError, match=f"network_chunk_tokens must be .* got {tokens}"):
        Config(network_chunk_tokens=tokens)


# ---- how it is linked


def test_it_has_what_the_verbs_call(extension):
    """The verbs are inherited: a call that one runtime gets, the other must have, alike."""
    import hybrid_ep._nvlink as other

    called = set(re.findall(r"_runtime\.(\w+)", inspect.getsource(backend)))
    called -= {"ipc_handle", "open_peers", "copy_peer"}
    assert {"route", "dispatch", "combine"} < called
    for name in called:
        theirs = getattr(other.Runtime, name).__doc__
        ours = getattr(extension.Runtime, name).__doc__
        assert ours.replace("_nvshmem.", "_nvlink.") == theirs


@pytest.fixture
def cuobjdump():
    wheel = Path(nvshmem_library.find_home({}) or "/", "..", "cu13", "bin", "cuobjdump")
    found = shutil.which("cuobjdump") or (str(wheel) if wheel.exists() else None)
    if found is None:
        pytest.skip("no cuobjdump to look into the extension with (pip: nvidia-cuda-cuobjdump)")
    return found


def test_the_kernels_hold_the_IBGDA_path(extension, cuobjdump):
    symbols = subprocess.run(
        [cuobjdump, "-symbols", extension.__file__], capture_output=True, text=True, check=True
    ).stdout
    for code in symbols.split("Fatbin elf code:")[1:]:
        if "NvshmemNetwork" in code:
            assert "nvshmemi_ibgda_device_state_d" in code
            assert "nvshmemi_transfer_put_signal" in code
            assert "nvshmemi_transfer_fence" not in code, "a put's signal is ordered by the put"
    assert symbols.count("nvshmemi_ibgda_device_state_d") >= 2, "for Hopper and for Blackwell"


# ---- how a Buffer sets it up, on fake GPUs


APART = ("a host", "another host", "a third")


def build(world, backend, fails=None, hosts=APART, unmapped=-1):
    return world(3).run(fake_nvshmem.build, backend, fails or {}, list(hosts), unmapped)


def test_ranks_of_several_hosts_get_nvshmem(world):
    for rank, told in enumerate(build(world, "auto")):
        assert told["backend"] == "nvshmem", told
        assert "3, 3 node(s) of 1" in told["describe"]
        assert f"start {rank} of 3" in told["calls"]
        assert told["calls"].count("unique_id") == (rank == 0)


@pytest.mark.parametrize("call", ["unique_id", "start 0 of 3", "Runtime", "allocate"])
def test_a_failure_on_one_rank_raises_on_all(world, call):
    for told in build(world, "nvshmem", {0: {call: "NVSHMEM says no"}}):
        assert told["error"] == "the nvshmem backend cannot run: rank 0: NVSHMEM says no"
    for told in build(world, "auto", {0: {call: "NVSHMEM says no"}}):
        assert told["backend"] == "torch"
        assert "because the nvshmem backend cannot run: rank 0: NVSHMEM" in told["describe"]


def test_a_node_that_is_none_is_named(world):
    for told in build(world, "nvshmem", hosts=("a host",), unmapped=2):
        assert "rank 0: the memory of rank 2 cannot be mapped" in told["error"]
        assert "ranks_per_node=3 is too large" in told["error"]


def test_Buffers_share_the_heap(world):
    results = world(3).run(fake_nvshmem.share_the_heap)
    for asked in results:
        assert asked["first"] == ["allocate 16000"]
        assert asked["beside it"] == ["allocate 16000"]
        # a part that all ranks gave back is used again, once no late signal can land in it
        assert asked["after it"] == ["complete_puts"]
        assert asked["larger"] == ["allocate 32000"], "one rank alone gave a part back"
        assert asked["larger still"] == ["complete_puts", "free", "free", "allocate 64000"]
        assert asked["to be dropped"] == ["allocate 8000"]
        assert asked["after one was dropped"] == ["complete_puts"], "what is dropped is given back"
        assert asked["after a fault"] == ["allocate 32000"], "puts may still come for the old one"
        assert asked["release"] == ["destroy", "complete_puts", "free"]
        assert asked["restore"] == ["Runtime", "allocate 32000", "attach"]
    for asked in results[:2]:
        assert "the ranks were [0, 1, 2], this Buffer has [0, 1]" in asked["pair"]


# ---- how NVSHMEM starts


@pytest.mark.parametrize(
    ("gpus", "hosts"),
    [("AAB", "xxx"), ("ABB", "xxx"), ("AABBC", "xxxxy"), ("AAABBC", "xxxyyy")],
    ids=str,
)
def test_ranks_that_share_GPUs_unevenly_are_refused_before_NVSHMEM_starts(world, gpus, hosts):
    for seen in world(len(gpus)).run(fake_nvshmem.build_on_gpus, list(gpus), list(hosts)):
        most, fewest = max(gpus, key=gpus.count), min(gpus, key=gpus.count)
        assert not seen["started"]
        assert "the same number of ranks on each GPU in use, got " in seen["told"]
        for gpu in (most, fewest):
            ranks = [rank for rank, theirs in enumerate(gpus) if theirs == gpu]
            assert f"{len(ranks)} on GPU {gpu} of " in seen["told"]
            assert f"(ranks {ranks})" in seen["told"]
        assert "start one rank per GPU, or equally many on each" in seen["told"]


@pytest.mark.parametrize(
    ("gpus", "hosts"), [("AAA", "xxx"), ("ABAB", "xxxx"), ("ABC", "xxy"), ("A", "x")], ids=str
)
def test_ranks_that_share_GPUs_evenly_start(world, gpus, hosts):
    for seen in world(len(gpus)).run(fake_nvshmem.build_on_gpus, list(gpus), list(hosts)):
        assert seen == {"told": "", "started": True}


def test_signals_through_several_ports_are_refused_before_NVSHMEM_starts(world):
    arguments = fake_nvshmem.start_with, nvshmem.MULTI_PORT
    for told, started in world(2).run(*arguments, "1"):
        assert "NVSHMEM_IBGDA_ENABLE_MULTI_PORT must be 0 or unset, got '1'" in told
        assert not started
    assert world(2).run(*arguments, "0") == [("", True)] * 2


@pytest.mark.parametrize(
    ("owner", "name", "error", "kind"),
    [
        ("nvshmem", "gpu_uuid", RuntimeError("CUDA error: device busy"), "SetupError"),
        ("nvshmem", "read_ports", OSError("no sysfs"), "OSError"),
        ("nvshmem", "_set_environment", ValueError("NCCL_IB_TC must be a number"), "ValueError"),
        ("nvshmem", "_set_environment", RuntimeError("not now"), "SetupError"),
        ("settings", "num_sms", RuntimeError("CUDA error: device busy"), "SetupError"),
        ("torch.cuda", "get_device_capability", AssertionError("Invalid device id"), "SetupError"),
    ],
    ids=["uuid", "ports", "setting", "runtime", "sms", "device"],
)
def test_a_rank_that_cannot_start_NVSHMEM_raises_on_all_before_it_starts(
    world, owner, name, error, kind
):
    results = world(2).run(fake_nvshmem.prepare_in_vain, owner, name, error)
    for rank, (raised, text, started) in enumerate(results):
        assert raised == kind
        assert str(error) in text
        assert rank == 1 or "rank 1: " in text
        assert not started


def test_a_rank_that_waits_long_inside_NVSHMEM_says_so(world):
    slow, quick = world(2).run(fake_nvshmem.start_slowly)
    waited = "rank 0 of 2 has waited 0.1 s for "
    assert slow.count(waited) == 2
    assert f"{waited}NVSHMEM's start, which takes all ranks" in slow
    assert "bytes of NVSHMEM's heap, which takes all ranks" in slow
    assert quick == ""


# In place of a part of NVSHMEM's start: it says something, hangs until a file exists, and fails.
HANGING_START = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void say(const char *text) { if (write(2, text, strlen(text)) < 0) _exit(9); }
int nvshmemx_set_attr_uniqueid_args(int rank, int num_ranks, const void *id, void *attributes) {
    say("the network is down\n");
    while (access(getenv("HANG_UNTIL"), F_OK) != 0) usleep(10000);
    say("and stays so\n");
    if (getenv("THEN_EXIT") != NULL) exit(3);
    return 7;
}
"""


@pytest.fixture
def hanging_start(extension, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make an NVSHMEM that hangs")
    source, library, end = (tmp_path / name for name in ("hangs.c", "hangs.so", "end"))
    source.write_text(HANGING_START)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    script = (
        "from hybrid_ep.backends.cuda import nvshmem as n; n.load_extension()\n"
        "try: n._nvshmem.start(n._nvshmem.unique_id(), 0, 1)\n"
        "except RuntimeError as error: print(error)\n"
        "import os, sys; print('stderr works', file=sys.stderr, flush=True)\n"
        "sys.stdout.flush(); os._exit(0)"
    )
    started = []

    def start(**environment):
        environment |= {"LD_PRELOAD": str(library), "HANG_UNTIL": str(end)}
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        started.append(process)
        return process, end

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_NVSHMEM_says_while_it_hangs_reaches_stderr(hanging_start):
    process, end = hanging_start()
    assert process.stderr.readline() == "the network is down\n", "it is hidden until the end"
    assert process.poll() is None and not end.exists()
    end.touch()
    told, said = process.communicate(timeout=60)
    assert said == "and stays so\nstderr works\n", "each line once"
    assert told == "NVSHMEM refused the unique id: the network is down\nand stays so\n\n"


def test_what_NVSHMEM_says_before_it_ends_the_process_reaches_stderr(hanging_start):
    process, end = hanging_start(THEN_EXIT="1")
    end.touch()
    told, said = process.communicate(timeout=60)
    assert (process.returncode, told) == (3, "")
    assert said == "the network is down\nand stays so\n"


@pytest.mark.parametrize("backend", ["nvshmem", "auto"])
@pytest.mark.parametrize("name, least", [("num_sms_dispatch", 2), ("num_sms_combine", 3)])
def test_fewer_SMs_than_roles_are_refused_before_anything_starts(world, name, least, backend):
    """Not raised in silence, and not a reason for auto to take the slow backend."""
    for few in range(1, least):
        told = world(2).run(fake_nvshmem.build_with, {name: few}, backend)
        for rank, (kind, text, calls) in enumerate(told):
            assert kind == "ValueError", rank
            assert f"Config.{name} must be at least {least} with the nvshmem backend" in text
            assert text.endswith(f"got {few}")
            assert calls == []
    for kind, _, calls in world(2).run(fake_nvshmem.build_with, {name: least}, backend):
        assert kind == ""
        assert "destroy" in calls


def test_the_least_SMs_are_those_that_the_runtime_takes(extension):
    assert nvshmem.LEAST_SMS == extension.LEAST_SMS
