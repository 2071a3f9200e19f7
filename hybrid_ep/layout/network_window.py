"""What a rank of several nodes has under way over the network, and the queues that it takes."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep.config import Config

# of a queue pair, as NVSHMEM's IBGDA has it, in powers of two
MIN_QUEUE_DEPTH, MAX_QUEUE_DEPTH = 128, 32768


@dataclass(frozen=True)
class Window:
    """What is under way over the network at once; bounded by credits, so it does not grow with T.

    Tokens go to the rail peers in chunks, each channel on queue pairs of its own, and a chunk is
    sent when its slot at the receiver is free.

    Attributes:
        channels: queue pairs to each rail peer.
        chunk_tokens: tokens that share a signal and a credit.
        window_chunks: chunks of a channel under way to a rail peer, at most.
        queue_pairs: of one rank.
        entries: of a queue in use at once, where all are used alike: a combine has a put and a
            signal for each token, a dispatch fewer.
        queue_depth: what NVSHMEM_QP_DEPTH must be at least.
    """

    channels: int
    chunk_tokens: int
    window_chunks: int
    queue_pairs: int
    entries: int
    queue_depth: int


def network_window(config: Config, *, num_nodes: int) -> Window:
    """The windows of a rank of several nodes.

    Args:
        config: says how many channels there are, and how many chunks of how many tokens.
        num_nodes: nodes, each with one rail peer.

    Returns:
        Window: its sizes; the number of tokens of a call is not among what they depend on.

    Raises:
        ValueError: the queues would be deeper than a network card has them.
    """
    channels, chunk_tokens = config.network_channels, config.network_chunk_tokens
    window_chunks = config.network_window_chunks
    entries = 2 * window_chunks * chunk_tokens
    if entries > MAX_QUEUE_DEPTH:
        raise ValueError(
            f"2 * network_window_chunks * network_chunk_tokens must be at most {MAX_QUEUE_DEPTH}, "
            f"the deepest queue of NVSHMEM's IBGDA, got {entries} (network_window_chunks="
            f"{window_chunks}, network_chunk_tokens={chunk_tokens})"
        )
    rail_peers = num_nodes - 1
    return Window(
        channels=channels,
        chunk_tokens=chunk_tokens,
        window_chunks=window_chunks,
        queue_pairs=rail_peers * channels,
        entries=entries,
        queue_depth=max(MIN_QUEUE_DEPTH, 1 << (entries - 1).bit_length()),
    )
