"""testkit's look for leaks finds what JAX's finds, and what was there before still holds it."""

import jax
import jax.numpy as jnp
import pytest

from jaxtap_testkit.strict import checking_leaks


def test_a_tracer_in_a_container_that_was_there_before(leaks):
    held = []
    with pytest.raises(Exception, match="Leaked"):
        leaks(lambda x: (held.append(x), x + 1)[1])(jnp.float32(1))


def test_a_tracer_in_one_that_is_new():
    class Holder: ...

    def fn(x):
        fn.holder = Holder()
        fn.holder.tracer = x * 2
        return x

    with pytest.raises(Exception, match="Leaked"), checking_leaks():
        jax.jit(fn)(1.0)


def test_garbage_is_no_leak(leaks):
    def fn(x):
        cycle = [x]
        cycle.append(cycle)
        return x + 1

    assert leaks(fn)(jnp.float32(1)) == 2
