"""Sizes of models, more SMs than there are, streams that overlap: right, and within bounds."""

import pytest

from hybrid_ep import Config
from tests.ranks import sizes

pytestmark = pytest.mark.not_on("nodes", why="test_any_window of test_nodes.py has its sizes")


@pytest.mark.parametrize("tokens", [128, 4095, 8192, 16384])
def test_DeepEP_294_any_number_of_tokens(world, tokens):
    for compared in world(2).run(sizes.compare_with_torch, [tokens], 1, None):
        assert compared > tokens


def test_DeepEP_561_one_buffer_for_all_of_them(world):
    tokens = [4096, 1, 2049, 0, 4095]
    for compared in world(2).run(sizes.compare_with_torch, tokens, 128, None):
        assert compared > sum(tokens)


NEEDS_MORE = pytest.mark.not_on("nodes", why="its kernels have two and three roles, an SM each")


@pytest.mark.parametrize("num_sms", [pytest.param(1, marks=NEEDS_MORE), 3, 7, 1000])
def test_DeepEP_389_grids_fit_the_gpu(world, num_sms):
    config = Config(
        num_sms_publish=num_sms, num_sms_dispatch=num_sms, num_sms_combine=num_sms, timeout_s=20
    )
    for compared in world(2).run(sizes.compare_with_torch, [333, 2500], 1, config):
        assert compared > 2833


def test_Megatron_6800_overlap_does_not_let_memory_grow(world):
    for held in world(2).run(sizes.overlap_streams, 64):
        assert held[-1] == held[1], held
