"""testkit's look for leaks finds what JAX's finds: what was there before still holds a tracer."""

import jax.numpy as jnp
import pytest

from jaxtap_testkit.processes import run_python


@pytest.mark.slow
def test_a_tracer_in_a_container_that_was_there_before(leaks):
    held = []
    with pytest.raises(Exception, match="Leaked"):
        leaks(lambda x: (held.append(x), x + 1)[1])(jnp.float32(1))


@pytest.mark.slow
def test_garbage_is_no_leak(leaks):
    def fn(x):
        cycle = [x]
        cycle.append(cycle)
        return x + 1

    assert leaks(fn)(jnp.float32(1)) == 2


HOLDER = """
import jax
from jaxtap_testkit import compat
from jaxtap_testkit.strict import checking_leaks

class Holder: ...

def fn(x):
    holder.tracer = x * 2
    return x

holder = Holder()
compat.explain_leaks()
with checking_leaks():
    jax.jit(fn)(1.0)
"""


@pytest.mark.slow
def test_the_holder_is_named():
    """In a small process: JAX looks through all objects for the holder, and for the holder's."""
    run = run_python("-c", HOLDER, check=False)
    assert "Leaked trace" in run.stderr
    assert "Holder" in run.stderr
