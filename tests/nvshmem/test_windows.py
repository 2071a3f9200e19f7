"""Windows of a few slots, over each network: calls in succession do not disturb each other."""

import pytest

from hybrid_ep import Config
from tests.nvshmem.shapes import SHAPES
from tests.ranks import windows
from tests.ranks.networks import NETWORKS

# channels, tokens of a chunk, chunks of a channel; tokens, and of those that go nowhere in a row.
# What stays in the node has four times as many slots.
NARROW = {
    "chunks_that_are_no_multiple_of_the_slots": (1, 4, 3, 41, 4),
    "one_slot_of_one_token": (1, 1, 1, 60, 5),
    "padding_longer_than_the_window": (1, 2, 1, 150, 9),
}


@pytest.mark.parametrize(
    "shape, network",
    # on one node nothing is put
    [("1x2", "loopback"), *((s, n) for s in ("2x1", "2x2", "4x1") for n in NETWORKS)],
)
@pytest.mark.parametrize("window", NARROW)
def test_calls_in_succession(world, window, shape, network):
    channels, chunk_tokens, chunks, tokens, stretch = NARROW[window]
    nodes, ranks_per_node = SHAPES[shape]
    config = Config(
        network_channels=channels,
        network_chunk_tokens=chunk_tokens,
        network_window_chunks=chunks,
        num_sms_publish=8,
        num_sms_dispatch=8,
        num_sms_combine=12,
        timeout_s=20,
    )
    pool = world(nodes * ranks_per_node)
    arguments = (network, ranks_per_node, config, tokens, stretch, 6)
    for compared in pool.run(windows.back_to_back, *arguments):
        assert compared > 0
