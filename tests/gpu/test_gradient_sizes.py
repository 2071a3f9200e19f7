"""Gradients that a Buffer cannot carry: as on the CPU."""

from tests.cpu.test_gradient_sizes import (  # noqa: F401
    test_a_second_derivative_is_refused_in_the_first_backward,
    test_a_verb_of_a_backward_checks_it_again,
    test_refused_in_the_forward,
    test_weights_alone_get_their_gradient_whatever_x_is,
    test_works_where_no_gradient_is_wanted,
)
