"""Fixtures that make JAX strict in every test of a package: import one in its conftest.py."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtypes():
    """Refuse implicit promotion of dtypes."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True)
def strict_ranks():
    """Refuse implicit promotion of ranks."""
    with jax.numpy_rank_promotion("raise"):
        yield
