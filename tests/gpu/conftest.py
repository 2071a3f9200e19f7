"""What exists only on GPUs: the kernels, their memory, streams and graphs."""

from tests import targets

pytest_generate_tests = targets.each_of(targets.KERNELS)
