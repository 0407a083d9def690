"""What KernelConformance tries by itself for kernels of several operands."""

import numpy as np
import pytest

from interception_core.testing import KernelConformance

REFERENCES = {
    "sum": lambda x, y: x + y,
    "matmul": np.matmul,
    "distance": lambda x, y: np.square(x[:, None] - y).sum(-1),
    "by row": lambda x, y: x * y[:, None],
}


def suite(reference, *shapes):
    class Suite(KernelConformance):
        def cases(self):
            return [(tuple(map(np.ones, shapes)), {"factor": 2.0})]

        def reference(self, *operands, factor):
            return factor * REFERENCES[reference](*operands)

    return Suite()


@pytest.mark.parametrize(
    ("reference", "given", "without"),
    [
        ("sum", [(2, 3), (2, 3)], [(0, 3), (0, 3)]),
        ("sum", [(2, 3), (3,)], [(0, 3), (3,)]),
        ("matmul", [(4, 4), (4, 4)], [(0, 4), (4, 4)]),
        ("distance", [(2, 3), (5, 3)], [(0, 3), (5, 3)]),
        ("by row", [(4, 2), (4,)], [(0, 2), (0,)]),
    ],
)
def test_a_case_without_rows_is_one_that_the_reference_computes(reference, given, without):
    ((operands, params),) = suite(reference, *given).empty_cases()
    assert [x.shape for x in operands] == without
    assert params == {"factor": 2.0}


def test_without_such_a_case_one_must_be_given():
    with pytest.raises(AssertionError, match=r"define empty_cases\(\)"):
        suite("sum", (), ()).empty_cases()
