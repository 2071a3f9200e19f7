"""Handles in any order, again and with other strides; several Buffers and groups: as on the CPU."""

from tests.cpu.test_handles import test_order_does_not_matter  # noqa: F401
