"""Interceptors of equal targets share what JAX has traced, and differ in what they do."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest

from interception_core import Interceptor
from jaxtap_testkit.tap_helpers import ENGINE, Log, assert_close, tap, times

X = jnp.linspace(-1, 1, 9).reshape(3, 3)
TARGETS = pytest.mark.parametrize("target", ["primitive:dot_general", "jax.numpy.dot"])


def programs():
    """Return jitted programs with one product, and what they are where that is multiplied by f."""

    @jax.custom_vjp
    def custom(x):
        return jnp.dot(x, x)

    custom.defvjp(lambda x: (jnp.dot(x, x), x), lambda x, ct: (ct * x,))
    return {
        "jit": (jax.jit(lambda x: jnp.tanh(jnp.dot(x, x))), lambda x, f: jnp.tanh(f * (x @ x))),
        "custom_vjp": (jax.jit(custom), lambda x, f: f * (x @ x)),
        "grad": (
            jax.jit(lambda x: jax.grad(lambda y: jnp.sum(jnp.sin(jnp.dot(y, X))))(x)),
            lambda x, f: jax.grad(lambda y: jnp.sum(jnp.sin(f * (y @ X))))(x),
        ),
        "vmap": (
            jax.jit(lambda x: jax.vmap(lambda row: jnp.dot(row, X))(x)),
            lambda x, f: f * (x @ X),
        ),
    }


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize("name", programs())
def test_each_does_its_own(name, target):
    fn, expected = programs()[name]
    for factor in (2.0, 3.0, 5.0):
        assert_close(tap(fn, times(factor), target)(X), expected(X, factor), rtol=1e-4)
    assert_close(fn(X), expected(X, 1.0), rtol=1e-4)


@pytest.mark.slow
@TARGETS
def test_traced_forward_by_one_and_differentiated_by_another(target):
    fn, _ = programs()["custom_vjp"]
    assert_close(tap(fn, times(2.0), target)(X), 2 * (X @ X), rtol=1e-5)
    log = Log()

    def loss(x):
        return jnp.sum(fn(x))

    gradient = jax.grad(loss)(X)
    assert_close(jax.grad(tap(loss, log, target))(X), gradient)
    inside = tap(jax.value_and_grad(loss), times(3.0), target)(X)
    assert_close(inside, (jnp.sum(3 * (X @ X)), gradient), rtol=1e-5)
    assert len(log.ids) >= 1


@TARGETS
def test_the_function_is_traced_once_for_all(target):
    traced = []

    @jax.jit
    def fn(x):
        traced.append(x)
        return jnp.dot(x, x)

    for factor in (2.0, 3.0):
        tap(fn, times(factor), target)(X)
    assert len(traced) == 1


@TARGETS
def test_a_wrapped_function_within_acts_unless_its_interceptor_is_active(target):
    inner = Interceptor({target: times(2.0)})
    block = jax.jit(ENGINE.wrap(lambda x: jnp.dot(x, x), inner))
    for interceptor, factor in [(inner, 2), (Interceptor({target: times(3.0)}), 6), (inner, 2)]:
        outer = ENGINE.wrap(lambda x: block(x) + 1, interceptor)
        assert_close(outer(X), factor * (X @ X) + 1, rtol=1e-5)


def test_what_swallows_every_exception_is_tapped():
    """The staging of a program that differentiates ends, and begins again."""

    def fn(x):
        try:
            return jax.grad(lambda y: jnp.sum(jnp.sin(jnp.dot(y, X))))(x)
        except BaseException:
            return x

    expected = jax.grad(lambda y: jnp.sum(jnp.sin(3 * (y @ X))))(X)
    assert_close(tap(fn, times(3.0), "jax.numpy.dot")(X), expected, rtol=1e-4)


@TARGETS
def test_each_operation_keeps_the_configuration_that_it_is_called_in(target):
    def fn(x):
        usual = jnp.dot(x, x)
        with jax.default_matmul_precision("highest"):
            precise = jnp.dot(x, x)
        return usual, precise, jnp.dot(x, x)

    def precisions(fn):
        eqns = jax.make_jaxpr(fn)(X).jaxpr.eqns
        return [eqn.params["precision"] for eqn in eqns if eqn.primitive.name == "dot_general"]

    expected = precisions(fn)
    assert len(set(expected)) == 2
    assert precisions(tap(fn, Log(), target)) == expected


@pytest.mark.parametrize("made", [jax.jit, lambda f: f], ids=["jitted", "plain"])
def test_a_name_that_means_another_function_by_now(made, monkeypatch):
    """As that of a function of a module that was loaded again."""
    module = types.ModuleType("a_module_that_is_reloaded")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def load(step):
        def add(x):
            return x + step

        add.__module__ = module.__name__
        module.add = made(add)

    def twice(x):
        return module.add(module.add(x))

    load(1)
    target = f"{module.__name__}.add"
    tapped = tap(twice, lambda call, x: 2 * call.proceed(x), target)
    for step in (1, 10, 1):
        load(step)
        assert tapped(X)[1, 1] == 2 * (2 * step + step)
