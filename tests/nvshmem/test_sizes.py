"""Rows of a model's size, through windows of every size: right, and never at a standstill."""

import pytest

from hybrid_ep import Config
from tests.nvshmem.shapes import SHAPES
from tests.ranks import sizes

# channels, tokens of a chunk, chunks of a channel, SMs of each kernel; numbers of tokens
WINDOWS = {
    "one_slot_of_one_token": (1, 1, 1, 3, [130, 33]),
    "slots_of_odd_chunks": (3, 5, 2, 7, [333, 0, 1001]),
    "slots_of_a_warp": (2, 32, 1, 16, [333, 1001]),
    "as_it_is": (8, 8, 4, 32, [4095, 1, 2500]),
}


@pytest.mark.parametrize("shape", ("1x2", "2x1", "2x2"))
@pytest.mark.parametrize("window", WINDOWS)
def test_any_window(world, window, shape):
    channels, chunk_tokens, chunks, num_sms, tokens = WINDOWS[window]
    config = Config(
        network_channels=channels,
        network_chunk_tokens=chunk_tokens,
        network_window_chunks=chunks,
        num_sms_publish=num_sms,
        num_sms_dispatch=num_sms,
        num_sms_combine=num_sms,
        timeout_s=20,
    )
    nodes, ranks_per_node = SHAPES[shape]
    pool = world(nodes * ranks_per_node)
    for compared in pool.run(sizes.compare_with_torch, tokens, 1, config, ranks_per_node):
        assert compared > sum(tokens)
