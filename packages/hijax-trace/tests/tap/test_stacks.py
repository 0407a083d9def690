"""Array proxies of which each step of a loop has a part whole, and what a vmap goes along."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hijax_trace import ArrayProxy, Shared, TraceEngine, mapped_axes, mapped_rows
from interception_core import Interceptor
from jaxtap_testkit.numbers import normal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Indexed(ArrayProxy):
    """Matrices of a stack; each step of a loop has all of it, and its index."""

    stack: jax.Array
    index: Any

    @property
    def shape(self):
        return (*np.shape(self.index), *self.stack.shape[1:])

    @property
    def dtype(self):
        return self.stack.dtype

    def restore(self):
        return self.stack[self.index]

    def step(self, axis, is_mapped=False):
        assert axis == 0
        return Indexed(Shared(self.stack), self.index)


def scanned(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def scanned_twice(w, x):
    return jax.lax.scan(lambda x, w: (scanned(w, x), None), x, w)[0]


def rematerialized(w, x):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, w)[0]


def mapped(w, x):
    return jax.vmap(lambda w: x @ w)(w).sum(0)


def mapped_scans(w, x):
    return jax.vmap(lambda w: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0])(w).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "lead"),
    [
        (scanned, (3,)),
        (rematerialized, (3,)),
        (scanned_twice, (2, 3)),
        (mapped, (3,)),
        (mapped_scans, (2, 3)),
    ],
)
def test_every_step_has_the_stack_and_an_index(program, lead):
    count = int(np.prod(lead))
    stack = normal(count, 4, 4)
    w = Indexed(stack, jnp.arange(count)[::-1].reshape(lead))
    x = normal(2, 4, seed=1)
    seen = []

    def dot(call, lhs, rhs, *args, **kwargs):
        held = call.proxy(rhs)
        seen.append((held.stack.shape, np.shape(held.index)))
        return lhs @ held.stack[held.index]

    run = TraceEngine().wrap(program, Interceptor({"jax.lax.dot_general": dot}))
    found = jax.jit(run)(w, x)
    assert seen == [((count, 4, 4), ())]
    np.testing.assert_allclose(found, program(w.restore(), x), rtol=1e-5, atol=1e-6)
    # Arrays are cut; the stack goes into the loop whole.
    jaxpr = jax.make_jaxpr(run)(w, x)
    assert f"f32[{count},4,4] = dynamic_slice" not in str(jaxpr)
    gradient = jax.grad(lambda x: run(w, x).sum())(x)
    np.testing.assert_allclose(
        gradient, jax.grad(lambda x: program(w.restore(), x).sum())(x), rtol=1e-4, atol=1e-5
    )


def columns(w, x):
    return jax.vmap(lambda w: x @ w, in_axes=1)(w)


def rows_and_columns(w, x):
    return jax.vmap(lambda x: jax.vmap(lambda w: x @ w, in_axes=1)(w))(x)


def both(w, x):
    return jax.vmap(lambda w, x: x @ w, in_axes=(1, 0))(w[:, :3], x)


def after_a_product(w, x):
    return columns(w, jnp.tanh(x @ (x.T @ x)))


def beside_its_own_product(w, x):
    return jax.vmap(jax.jit(lambda w, x: (x * (x @ w)[:, None]) @ w), in_axes=(1, None))(w, x)


def steps(w, x):
    return jax.lax.scan(lambda c, w: (c, x @ w), 0, w.T)[1]


def transposed(w, x):
    return jax.vmap(lambda w: x @ w.T, in_axes=2)(w.reshape(5, 4, 1).transpose(2, 1, 0))


@pytest.mark.parametrize(
    ("program", "axes", "rows"),
    [
        (columns, {1}, 1),
        (rows_and_columns, {1}, 3),
        (both, set(), 1),
        (after_a_product, {1}, 1),
        (beside_its_own_product, set(), 1),
        (steps, set(), 1),
        (transposed, set(), 1),
    ],
)
def test_what_a_vmap_goes_along(program, axes, rows):
    """A weight that is mapped alone has columns; the last product of a program tells."""
    seen = []

    def dot(call, lhs, rhs, *args, **kwargs):
        view, beside = call.expression(rhs), call.expression(lhs)
        seen.append((set(mapped_axes(view, beside)), mapped_rows(beside, view)))
        return jnp.copy(call.proceed(lhs, rhs, *args, **kwargs))

    run = TraceEngine().wrap(program, Interceptor({"jax.lax.dot_general": dot}))
    jax.eval_shape(run, jnp.ones((4, 5)), jnp.ones((3, 4)))
    assert seen[-1] == (axes, rows)
