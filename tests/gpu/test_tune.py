"""What tune decides between real times: whatever it is, every rank decides it."""

from tests.cpu.test_tune import test_ranks_decide_alike  # noqa: F401
