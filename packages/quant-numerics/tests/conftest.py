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


@pytest.fixture
def primitives():
    """Lists (name, input dtypes, output dtypes) of the equations of a function's jaxpr."""

    def listed(jaxpr):
        for eqn in jaxpr.eqns:
            yield (
                eqn.primitive.name,
                [v.aval.dtype.name for v in eqn.invars],
                [v.aval.dtype.name for v in eqn.outvars],
            )
            for param in eqn.params.values():
                inner = getattr(param, "jaxpr", param)
                if hasattr(inner, "eqns"):
                    yield from listed(inner)

    return lambda fn, *args: list(listed(jax.make_jaxpr(fn)(*args).jaxpr))
