"""Strict: fixtures that make JAX strict, and a check for leaks.

Import a fixture in the package's conftest.py.
"""

import contextlib
import gc

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


@contextlib.contextmanager
def checking_leaks():
    """Fail where a tracer that is made meanwhile outlives its trace.

    JAX collects garbage for each trace, and then looks for who holds its tracers. Everything older
    is set aside first, which holds them alive as before; the plugin brings it back later.
    """
    gc.collect()
    gc.freeze()
    with jax.checking_leaks():
        yield
