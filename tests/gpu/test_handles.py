"""Handles in any order, again and with other strides; several Buffers and groups: as on the CPU."""

from tests.cpu.test_handles import (  # noqa: F401
    test_groups_beside_the_world,
    test_no_rank_runs_ahead_of_one_it_gets_nothing_from,
    test_order_does_not_matter,
    test_strides_do_not_matter,
    test_torchtitan_2273_memory_does_not_grow,
    test_uccl_878_many_buffers,
)
