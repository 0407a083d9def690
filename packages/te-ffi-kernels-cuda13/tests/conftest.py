import jax
import pytest


@pytest.fixture(autouse=True)
def strict_jax():
    """No implicit promotion of dtypes or ranks, and no leaked tracer, in any test."""
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.checking_leaks(),
    ):
        yield
