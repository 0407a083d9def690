"""Programs run by the interpreter are the programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from provider_odml.features import Interpreter

X = np.array([0.5, 2.0, 3.0, 15.0], np.float32)
C = np.arange(4, dtype=np.float32)


def mapped_while(x):
    """A condition for each element, and a carry of more axes than it."""

    def one(x):
        return lax.while_loop(
            lambda carry: carry[0] < 10,
            lambda carry: (carry[0] * 2 + 1, carry[1] + carry[0] * jnp.asarray(C), carry[2] + 1),
            (x, jnp.zeros(4), jnp.int8(0)),
        )

    return jax.vmap(one)(x)


def nested_branches(x):
    def chosen(x):
        return lax.switch(x[2].astype(int) - 1, [jnp.sin, lambda x: x * C, lambda x: -x], x)

    return lax.cond(x[0] > 0, lambda x: lax.cond(x[1] > 9, jnp.cos, chosen, x), jnp.tanh, x)


def reversed_scan(x):
    def step(carry, y):
        i, total = carry
        return (i + 1, jax.nn.relu(total - y * C)), (total.sum(), i)

    return lax.scan(step, (0, x), jnp.arange(5.0), reverse=True)


def untaken_while(x):
    return lax.while_loop(lambda carry: carry.sum() < C.sum(), lambda carry: carry * C, x)


@pytest.mark.parametrize("fn", [mapped_while, nested_branches, reversed_scan, untaken_while])
def test_loops_and_branches_are_the_same(fn):
    program = jax.make_jaxpr(jax.jit(fn))(X)
    found = Interpreter().run(program, [X])
    for one, expected in zip(found, jax.tree.leaves(fn(X)), strict=True):
        assert one.dtype == expected.dtype
        np.testing.assert_allclose(one, expected, rtol=1e-6)
