"""A Buffer is gone when it is dropped, and gives nothing back while a CUDA graph is captured."""

import pytest

from tests.ranks import endings


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("backend", endings.FAKES)
def test_a_Buffer_is_freed_when_it_is_dropped_without_the_collector(world, backend, num_ranks):
    for is_gone, destroyed in world(num_ranks).run(endings.drop, backend):
        assert is_gone, "the Buffer is in a cycle"
        assert destroyed == (backend != "torch")


@pytest.mark.parametrize("then", ["called", "called in the capture", "made", "destroyed"])
@pytest.mark.parametrize("way", ["dropped", "destroyed"])
@pytest.mark.parametrize("backend", ["nvlink", "nvshmem"])
def test_a_Buffer_that_ends_in_a_capture_gives_back_afterwards(world, backend, way, then):
    for in_it, after_it, once_used in world(3).run(endings.end_in_a_capture, backend, way, then):
        assert (in_it, after_it, once_used) == (0, 0, 1)


def test_what_waits_for_the_GPU_is_refused_in_a_capture(world):
    for told in world(3).run(endings.what_waits):
        for what, text in told.items():
            assert f"must not be {what} while a CUDA graph is captured" in text
