"""What the kernels of several nodes meet outside the plain case; the ranks are one node."""

import pytest

from tests.gpu.test_conditions import (  # noqa: F401
    test_a_deadline_of_never_is_never,
    test_a_fault_that_warps_of_a_block_see_at_different_times,
    test_a_launch_that_fails_ends_the_buffer_and_peers_hear_who_failed,
    test_another_thread_calls_while_an_exact_dispatch_waits,
    test_interrupt_while_an_exact_dispatch_waits,
    test_scales_at_an_address_that_is_no_multiple_of_4,
    test_sizes_that_reach_the_runtime_past_all_rules_are_refused_before_a_launch,
    test_two_buffers_of_100_sms_launched_in_opposite_order,
    test_two_streams_inside_one_capture,
)
from tests.ranks import conditions


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_out_of_memory_between_the_parts_of_an_exact_dispatch(world, num_ranks):
    for rank, seen in enumerate(world(num_ranks).run(conditions.out_of_memory_between_the_parts)):
        assert ("OutOfMemoryError" in seen["raised"]) == (rank == num_ranks - 1)
        assert seen["values"] == [[2.0], [3.0], [1.0]]
