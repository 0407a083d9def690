"""How many examples a Hypothesis test has in each tier."""

import pytest
from hypothesis import settings

full = False
"""Whether the full tier runs; set before tests are imported."""


def count(most):
    """Return ``most``; in the default tier, an eighth of it."""
    return most if full else max(2, most // 8)


def examples(most, **options):
    """Run a Hypothesis test on ``most`` examples, or an eighth.

    Args:
        most: The number of examples.
        options: More settings of Hypothesis.
    """

    def decorate(test):
        test = settings(max_examples=count(most), **options)(test)
        return pytest.mark.generated(test)

    return decorate
