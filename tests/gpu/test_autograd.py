"""Gradients and recomputation: as on the CPU."""

from tests.cpu.test_autograd import (  # noqa: F401
    test_Automodel_3156_recompute_replays_the_layout,
    test_Megatron_4500_gradient_reaches_the_router,
)
