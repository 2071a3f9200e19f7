"""Windows of a few slots, over each network: calls in succession do not disturb each other."""

import pytest

from hybrid_ep import Config
from tests.ranks import windows
from tests.ranks.networks import NETWORKS

pytestmark = pytest.mark.only_on("nodes", why="one node of nvlink has no windows")

# channels, tokens of a chunk, chunks of a channel; tokens, and of those that go nowhere in a row.
# What stays in the node has four times as many slots.
NARROW = {
    "chunks_that_are_no_multiple_of_the_slots": (1, 4, 3, 41, 4),
    "one_slot_of_one_token": (1, 1, 1, 12, 5),
    "padding_longer_than_the_window": (1, 2, 1, 30, 9),
}
ON_NODES = [(2, 1, name) for name in NETWORKS if name != "loopback"]  # delaying is that and more
SHAPES = [(2, 2, "mapped"), *ON_NODES, (4, 2, "delaying"), (4, 2, "puts")]


@pytest.mark.parametrize("num_ranks, ranks_per_node, network", SHAPES)
@pytest.mark.parametrize("window", NARROW)
def test_calls_in_succession(world, window, num_ranks, ranks_per_node, network):
    channels, chunk_tokens, chunks, tokens, stretch = NARROW[window]
    config = Config(
        network_channels=channels,
        network_chunk_tokens=chunk_tokens,
        network_window_chunks=chunks,
        num_sms_publish=8,
        num_sms_dispatch=8,
        num_sms_combine=12,
        timeout_s=20,
    )
    arguments = (network, ranks_per_node, config, tokens, stretch, 4)
    for compared in world(num_ranks).run(windows.back_to_back, *arguments):
        assert compared > 0


@pytest.mark.parametrize("routes", range(4))
@pytest.mark.parametrize("network", NETWORKS)
def test_routes_go_on_after_a_restore(world, network, routes):
    world(2).run(windows.restore_between_routes, network, 1, routes)
