"""Results are torch's own tensors at every size, and no default of torch reaches the calls."""

import pytest

from tests.cases import Case
from tests.checks import same_bytes
from tests.ranks import tensors

# rows and y of a few kB; of several MB, where large memory is treated apart
SMALL = Case("small", tokens=(20, 13), topk=3, num_scales=3)
LARGE = Case("large", tokens=(600, 512), topk=3, hidden=4096, num_scales=512)
SIZES = pytest.mark.parametrize("case", [SMALL, LARGE], ids=lambda case: case.name)
GRADIENTS = pytest.mark.parametrize("needs_grad", [False, True], ids=["no_grad", "grad"])


@SIZES
@GRADIENTS
@pytest.mark.parametrize("change", tensors.CHANGES)
def test_results_are_changed_in_place(world, case, change, needs_grad):
    for rank, pairs in enumerate(world(2).run(tensors.change_in_place, case, change, needs_grad)):
        for number, (in_place, in_copies) in enumerate(pairs):
            same_bytes(in_place, in_copies, f"result {number} on rank {rank}")


@SIZES
@GRADIENTS
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_results_own_memory_that_can_be_freed_early(world, case, needs_grad, num_ranks):
    for told in world(num_ranks).run(tensors.describe_results, case.on(num_ranks), needs_grad):
        assert len(told) == (7 if needs_grad else 4)
        for name, seen in told.items():
            assert seen == {
                "is a view": False,
                "bytes beyond it": 0,
                "resizable": True,
                "is contiguous": True,
                "bytes after it was freed": 0,
            }, name


@SIZES
def test_rows_are_freed_between_forward_and_backward(world, case):
    for rank, pairs in enumerate(world(2).run(tensors.free_rows_before_the_backward, case)):
        for name, (kept, freed) in zip(("y", "gradient of x"), pairs, strict=True):
            same_bytes(freed, kept, f"{name} on rank {rank}")
