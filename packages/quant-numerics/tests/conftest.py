import jax
import pytest

from jaxtap_testkit.strict import strict_dtypes, strict_ranks  # noqa: F401


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
