"""The three ways to run a verb, with the kernels below them."""

from tests.cpu.test_ways import (  # noqa: F401
    test_a_compiled_graph_holds_the_ops,
    test_a_dispatch_mode_sees_forward_and_backward,
    test_all_ways_give_the_same,
    test_eager_calls_make_no_ops,
    test_hooks_see_everything_that_is_saved,
    test_scales_come_back_without_a_gradient,
    test_weighted_gradient_makes_no_large_copies,
    test_weights_get_their_gradient_beside_rows_of_fp8,
)
