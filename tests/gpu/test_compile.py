"""torch.compile: as on the CPU."""

from tests.cpu.test_compile import (  # noqa: F401
    test_a_process_with_another_buffer_does_not_get_the_code_of_the_first,
    test_cuda_graphs_may_hold_a_graph_with_verbs,
    test_exact_sizes_without_fullgraph,
    test_three_forwards_of_one_graph_are_in_flight,
    test_verbs_keep_program_order,
)
