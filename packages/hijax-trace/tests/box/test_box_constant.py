"""A Box that is not differentiated with the function that makes it, beside its value by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hijax_trace import Box

X = np.array([0.3, -0.7, 1.1], np.float32)
STEPS = 3
REPEATED = {"scan", "fori_loop"}

PARTS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=STEPS)[0],
    "fori_loop": lambda f: lambda x: lax.fori_loop(0, STEPS, lambda _, c: f(c), x),
}
NESTS = [
    ("jit",),
    ("scan",),
    ("checkpoint",),
    ("scan", "checkpoint"),
    ("fori_loop", "checkpoint"),
    ("checkpoint", "scan"),
    ("checkpoint", "checkpoint"),
    ("scan", "scan", "checkpoint"),
    ("checkpoint", "scan", "checkpoint"),
    ("jit", "scan", "jit", "checkpoint"),
]


def step(x, count):
    return jnp.sin(x) * (1 + 0.1 * count), count + lax.stop_gradient(jnp.sum(x))


def with_box(nest):
    """Return a function that keeps the count in a Box that it makes."""

    def fn(x):
        box = Box(jnp.float32(0.5), differentiated=False)

        def part(x):
            y, count = step(x, box.get())
            box.set(count)
            return y

        for name in reversed(nest):
            part = PARTS[name](part)
        y = part(x)
        return jnp.sum(jnp.sin(y)), box.get()

    return fn


def by_hand(nest):
    """Return the same function with the steps written out."""

    def fn(x):
        count = jnp.float32(0.5)
        for _ in range(STEPS ** sum(name in REPEATED for name in nest)):
            x, count = step(x, lax.stop_gradient(count))
        return jnp.sum(jnp.sin(x)), count

    return fn


def pulled(fn):
    def run(x):
        value, pull, aux = jax.vjp(fn, x, has_aux=True)
        return (value, aux), pull(jnp.ones_like(value))[0]

    return run


def pushed(along):
    return lambda fn: lambda x: [along(fn, x, basis) for basis in jnp.eye(len(X))]


def mapped(fn):
    return lambda x: jax.vmap(jax.value_and_grad(fn, has_aux=True))(jnp.stack([x, x + 1]))


DERIVATIVES = {
    "grad": lambda fn: jax.value_and_grad(fn, has_aux=True),
    "jit of grad": lambda fn: jax.jit(jax.value_and_grad(fn, has_aux=True)),
    "grad of jit": lambda fn: jax.value_and_grad(jax.jit(fn), has_aux=True),
    "vjp": pulled,
    "jvp": pushed(lambda fn, x, t: jax.jvp(fn, (x,), (t,))),
    "linearize": pushed(lambda fn, x, t: jax.linearize(fn, x)[1](t)),
    "vmap of grad": mapped,
    "grad of grad": lambda fn: jax.grad(lambda x: jax.grad(lambda x: fn(x)[0])(x).sum()),
}


@pytest.mark.slow
@pytest.mark.parametrize("nest", NESTS, ids=" of ".join)
def test_derivatives_are_those_of_a_value(nest):
    """Each write counts once, also where checkpoint computes a part again."""
    for name, derivative in DERIVATIVES.items():
        actual, expected = derivative(with_box(nest))(X), derivative(by_hand(nest))(X)
        same = lambda a, b, name=name: np.testing.assert_allclose(a, b, 1e-4, 1e-5, err_msg=name)  # noqa: E731
        jax.tree.map(same, actual, expected)


def test_what_is_differentiated_is_refused():
    def fn(x):
        Box(0.0, differentiated=False).set(x)
        return x

    for around in (fn, jax.jit(fn), jax.checkpoint(fn)):
        with pytest.raises(TypeError, match="stop_gradient"):
            jax.grad(around)(1.0)


def test_it_stays_so():
    """In a new type, beside it, and passed to a function."""
    box = Box(differentiated=False)
    box.set(0.0)
    box.set([0.0])
    for each in (box, box.beside([0.0])):
        with pytest.raises(TypeError, match="stop_gradient"):
            jax.grad(lambda x, box: (box.set([x]), x)[1])(1.0, each)
        jax.grad(jax.checkpoint(lambda x: (each.set([each.get()[0] + 1]), x * x)[1]))(1.0)  # noqa: B023
        assert each.get() == [1.0]
