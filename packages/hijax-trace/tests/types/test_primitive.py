"""HiPrimitive: when it is lowered, when it is kept, and its rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hijax_trace as ht
from jaxtap_testkit.hijax_samples import f32

X = np.array([1.0, 2.0, 3.0], np.float32)


class Power(ht.HiPrimitive):
    """x to the n. Where n is 1 there is nothing to lower."""

    def __init__(self):
        super().__init__("power")
        self.lowered = []

    def is_high(self, x, *, n):
        return n != 1

    def abstract_eval(self, x, *, n):
        return x, set()

    def to_lojax(self, x, *, n):
        self.lowered.append(n)
        return x**n

    def jvp(self, primals, tangents, *, n):
        (x,), (t,) = primals, tangents
        return self.bind(x, n=n), n * self.bind(x, n=n - 1) * t

    def batch(self, axis_data, args, dims, *, n):
        return self.bind(*args, n=n), dims[0]


class Swap(ht.HiPrimitive):
    """Linear, with two results."""

    multiple_results = True

    def abstract_eval(self, x, y):
        return [y, x], set()

    def to_lojax(self, x, y):
        return [y, x]

    def jvp(self, primals, tangents):
        tangents = [t if hasattr(t, "dtype") else jnp.zeros_like(X) for t in tangents]
        return self.bind(*primals), self.bind(*tangents)

    def transpose(self, cotangents, x, y):
        x, y = (c if hasattr(c, "dtype") else jnp.zeros_like(X) for c in cotangents)
        return self.bind(x, y)


@pytest.fixture
def power():
    return Power()


swap = Swap("swap")


def primitives(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def test_outside_of_any_trace_it_is_lowered_at_once(power):
    assert ht.requires_low()
    np.testing.assert_allclose(power.bind(X, n=3), X**3)
    assert power.lowered == [3]


def test_a_jaxpr_keeps_it_and_is_high(power):
    jaxpr = jax.make_jaxpr(lambda x: power.bind(x, n=3))(X)
    assert primitives(jaxpr) == ["power"]
    assert ht.is_high(jaxpr)
    assert power.lowered == []


def test_whether_it_is_high_depends_on_parameters(power):
    jaxpr = jax.make_jaxpr(lambda x: power.bind(x, n=1))(X)
    assert primitives(jaxpr) == ["power"]
    assert not ht.is_high(jaxpr)
    for f in (power.bind, jax.jit(power.bind, static_argnames="n")):
        np.testing.assert_allclose(f(X, n=1), X)


def test_is_high_sees_types():
    class Sees(Power):
        def is_high(self, x, *, n):
            self.seen = x
            return True

    sees = Sees()
    jax.make_jaxpr(lambda x: sees.bind(x, n=2))(X)
    assert sees.seen == f32(3)


def test_jit_lowers_it_where_the_program_is_made(power):
    f = jax.jit(lambda x: power.bind(x, n=3) + 1)
    assert ht.is_high(f.trace(X))
    assert "power" not in f.lower(X).as_text()
    np.testing.assert_allclose(f(X), X**3 + 1)


def test_a_jaxpr_that_holds_a_high_one_is_high(power):
    inner = jax.jit(lambda x: power.bind(x, n=3))
    for f in (
        inner,
        lambda x: lax.cond(x[0] > 0, inner, lambda x: x, x),
        lambda x: lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0],
        lambda x: lax.while_loop(lambda x: x[0] > 9, inner, x),
        lambda x: jax.checkpoint(inner)(x),
        lambda x: jax.vmap(inner)(x[None]),
    ):
        assert ht.is_high(jax.make_jaxpr(f)(X))
    assert not ht.is_high(jax.make_jaxpr(jax.jit(jnp.sin))(X))


def test_derivatives(power):
    f = lambda x: power.bind(x, n=3)  # noqa: E731
    out, tangent = jax.jvp(f, (X,), (np.ones_like(X),))
    np.testing.assert_allclose(out, X**3)
    np.testing.assert_allclose(tangent, 3 * X**2)
    for wrap in (lambda f: f, jax.jit):
        np.testing.assert_allclose(wrap(jax.grad(lambda x: f(x).sum()))(X), 3 * X**2)
        np.testing.assert_allclose(jax.grad(lambda x, w=wrap: w(f)(x).sum())(X), 3 * X**2)


def test_second_derivative(power):
    f = lambda x: power.bind(x, n=3)  # noqa: E731
    np.testing.assert_allclose(jax.vmap(jax.grad(jax.grad(f)))(X), 6 * X)


def test_transpose():
    f = jax.jit(lambda x, y: (swap.bind(2 * x, 3 * y)[0] * X).sum())
    gx, gy = jax.grad(f, argnums=(0, 1))(X, X)
    np.testing.assert_allclose(gx, 0 * X)
    np.testing.assert_allclose(gy, 3 * X)


def test_vmap(power):
    xs = np.stack([X, 2 * X])
    np.testing.assert_allclose(jax.vmap(lambda x: power.bind(x, n=2))(xs), xs**2)


def test_linear_transpose():
    (x, y) = jax.linear_transpose(lambda x, y: swap.bind(x, y), X, X)([X, 2 * X])
    np.testing.assert_allclose(x, 2 * X)
    np.testing.assert_allclose(y, X)


def test_in_loops(power):
    f = lambda x: lax.scan(lambda c, _: (power.bind(c, n=2), None), x, None, length=2)[0]  # noqa: E731
    np.testing.assert_allclose(f(X), X**4)
    np.testing.assert_allclose(jax.jit(f)(X), X**4)
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(X), 4 * X**3)


def test_its_repr_is_its_name(power):
    assert repr(power) == "power"
    assert "power[n=3]" in str(jax.make_jaxpr(lambda x: power.bind(x, n=3))(X))
