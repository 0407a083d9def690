"""Taps around each other: two of the trace engine, and with the patch engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from interception_core import Interceptor, PatchEngine
from jaxtap_testkit.tap_helpers import ENGINE, Log, assert_close, look, stablehlo, tap, times

pytestmark = pytest.mark.sample(2)

PATCH = PatchEngine()
X = jnp.linspace(-1, 1, 16).reshape(4, 4)
DOT = "primitive:dot_general"
MODES = pytest.mark.parametrize(
    "mode",
    [jax.jit, lambda f: jax.jit(lambda x: jax.vmap(f)(x[None])[0])],
    ids=["jit", "vmap"],
)

PROGRAMS = {
    "plain": (lambda x: jnp.dot(x, x), lambda x, f: f(x @ x)),
    "jit": (
        lambda x: jax.jit(lambda y: jnp.tanh(jnp.dot(y, x)))(x),
        lambda x, f: jnp.tanh(f(x @ x)),
    ),
    "scan": (
        lambda x: lax.scan(lambda c, _: (jnp.dot(c, x), None), x, None, length=2)[0],
        lambda x, f: f(f(x @ x) @ x),
    ),
    "grad": (
        lambda x: jax.grad(lambda y: jnp.sum(jnp.sin(jnp.dot(y, y))))(x),
        lambda x, f: jax.grad(lambda y: jnp.sum(jnp.sin(f(y @ y))))(x),
    ),
    "custom_vjp": (lambda x: _custom(x), lambda x, f: f(x @ x)),
    "cond": (
        lambda x: lax.cond(x[0, 0] < 9, lambda y: jnp.dot(y, y), lambda y: y, x),
        lambda x, f: f(x @ x),
    ),
}
NAMES = pytest.mark.parametrize("name", PROGRAMS)


@jax.custom_vjp
def _custom(x):
    return jnp.dot(x, x)


_custom.defvjp(lambda x: (jnp.dot(x, x), x), lambda x, ct: (ct,))


@NAMES
@MODES
def test_same_primitive(name, mode):
    """The innermost replaces it; what it proceeds to is shown to the outer one."""
    fn, expected = PROGRAMS[name]
    both = tap(tap(fn, times(2.0), DOT), times(3.0), DOT)
    assert_close(mode(both)(X), expected(X, lambda y: 6 * y), rtol=1e-4)


@NAMES
@MODES
def test_same_function(name, mode):
    fn, expected = PROGRAMS[name]
    both = tap(tap(fn, times(2.0), "jax.numpy.dot"), times(3.0), "jax.numpy.dot")
    assert_close(mode(both)(X), expected(X, lambda y: 6 * y), rtol=1e-4)


@NAMES
@pytest.mark.parametrize("inner", [DOT, "jax.numpy.dot"])
def test_function_and_primitive(name, inner):
    fn, expected = PROGRAMS[name]
    outer = "jax.numpy.dot" if inner == DOT else DOT
    both = tap(tap(fn, times(2.0), inner), times(3.0), outer)
    assert_close(jax.jit(both)(X), expected(X, lambda y: 6 * y), rtol=1e-4)


@NAMES
@pytest.mark.parametrize("inner", [DOT, "jax.numpy.dot"])
@pytest.mark.parametrize("outer", [DOT, "jax.numpy.dot"])
def test_recorders_change_nothing_and_agree(name, inner, outer):
    fn, _ = PROGRAMS[name]
    logs = Log(), Log()
    both = tap(tap(fn, logs[0], inner), logs[1], outer)
    if name == "grad" and inner != outer:
        # A function is kept as one equation, its dot is settled: the two cotangents of its
        # operands meet in the other order, on JAX 0.12 whichever engine is outside. The bits of an
        # addition are the same both ways.
        np.testing.assert_array_equal(jax.jit(both)(X), jax.jit(fn)(X))
    else:
        assert stablehlo(both, X) == stablehlo(fn, X)
    # Where the program differentiates, the outer engine stages it once more than it asks.
    paths = [{i.split("dot")[0] for i in log.ids} for log in logs]
    assert paths[0] == paths[1]
    assert paths[0]


@NAMES
@MODES
def test_trace_in_patch(name, mode):
    fn, expected = PROGRAMS[name]
    both = PATCH.wrap(tap(fn, times(2.0), DOT), Interceptor({"jax.numpy.dot": times(3.0)}))
    assert_close(mode(both)(X), expected(X, lambda y: 6 * y), rtol=1e-4)


@NAMES
@MODES
def test_patch_in_trace(name, mode):
    fn, expected = PROGRAMS[name]
    both = tap(PATCH.wrap(fn, Interceptor({"jax.numpy.dot": times(2.0)})), times(3.0), DOT)
    assert_close(mode(both)(X), expected(X, lambda y: 6 * y), rtol=1e-4)


@NAMES
def test_patch_in_trace_on_one_function(name):
    fn, expected = PROGRAMS[name]
    both = tap(
        PATCH.wrap(fn, Interceptor({"jax.numpy.dot": times(2.0)})), times(3.0), "jax.numpy.dot"
    )
    assert_close(jax.jit(both)(X), expected(X, lambda y: 6 * y), rtol=1e-4)


@NAMES
def test_trace_in_patch_on_one_function(name):
    fn, expected = PROGRAMS[name]
    both = PATCH.wrap(
        tap(fn, times(2.0), "jax.numpy.dot"), Interceptor({"jax.numpy.dot": times(3.0)})
    )
    assert_close(jax.jit(both)(X), expected(X, lambda y: 6 * y), rtol=1e-4)


@NAMES
def test_three(name):
    fn, expected = PROGRAMS[name]
    three = fn
    for factor in (2.0, 3.0, 5.0):
        three = tap(three, times(factor), DOT)
    assert_close(jax.jit(three)(X), expected(X, lambda y: 30 * y), rtol=1e-4)


def test_inner_one_answers_without_the_outer_one():
    log = Log()
    both = tap(tap(lambda x: jnp.dot(x, x), lambda call, a, b, **_: a, DOT), log, DOT)
    assert_close(both(X), X)
    assert log.ids == []


def test_order_of_asking():
    asked = []

    def handler(name):
        return lambda call, *args, **params: asked.append(name) or NotImplemented

    tap(tap(lambda x: jnp.dot(x, x), handler("inner"), DOT), handler("outer"), DOT)(X)
    assert asked == ["inner", "outer"]


def test_what_an_inner_handler_adds_is_shown_to_the_outer_one():
    def handler(call, *args, **params):
        return jnp.tanh(call.proceed(*args, **params))

    log = Log()
    tap(tap(lambda x: jnp.dot(x, x), handler, DOT), log, DOT, "primitive:tanh")(X)
    assert log.names == ["dot_general", "tanh"]


def test_the_same_interceptor_twice_asks_once():
    interceptor = Interceptor({DOT: times(2.0)})
    fn = ENGINE.wrap(ENGINE.wrap(lambda x: jnp.dot(x, x), interceptor), interceptor)
    assert_close(jax.jit(fn)(X), 2 * (X @ X))


def test_a_wrapped_function_called_in_a_wrapped_one():
    inner = tap(lambda x: jnp.dot(x, x), times(2.0), DOT)
    outer = tap(lambda x: inner(x) + jnp.dot(x, x), times(3.0), DOT)
    assert_close(outer(X), 6 * (X @ X) + 3 * (X @ X), rtol=1e-5)


def test_a_wrapped_function_in_a_jitted_block_that_is_wrapped():
    block = jax.jit(tap(lambda x: jnp.dot(x, x), times(2.0), DOT))
    block(X)
    outer = tap(
        lambda x: lax.scan(lambda c, _: (block(c), None), x, None, length=2)[0], times(3.0), DOT
    )
    once = 6 * (X @ X)
    assert_close(jax.jit(outer)(X), 6 * (once @ once), rtol=1e-4)
    assert_close(block(X), 2 * (X @ X))


def test_provenance_in_both():
    logs = Log(), Log()
    both = tap(tap(lambda p: jnp.dot(X, p["w"].T), logs[0], DOT), logs[1], DOT)
    both({"w": X})
    for log in logs:
        found = log.operands[0][1]
        assert (found.provenance, found.axes) == ("args[0]['w']", (1, 0))


def test_exception_in_the_inner_handler_leaves_the_outer_one_working():
    def fail(call, *args, **params):
        raise ZeroDivisionError

    log = Log()
    inner = tap(lambda x: jnp.dot(x, x), fail, DOT)

    def fn(x):
        try:
            return inner(x)
        except ZeroDivisionError:
            return jnp.dot(x, x)

    assert_close(tap(fn, log, DOT)(X), X @ X)
    assert log.ids == ["dot_general:0"]


@pytest.mark.parametrize("handler", [look, lambda call, *args, **params: call.proceed(*args)])
def test_a_scope_in_a_call_of_one_operation_is_counted_once_where_it_is_differentiated(handler):
    """Such a call may stay a call, in whose name JAX writes the scopes around it."""

    @functools.partial(jax.jit, inline=True)
    def add(a, b):
        with jax.named_scope("inner"):
            return a + b

    def fn(x):
        with jax.named_scope("outer"):
            return jnp.sum(add(x, jnp.sin(x)))

    log = Log()
    tap(jax.grad(tap(fn, handler, "primitive:add")), log, "primitive:add")(X)
    assert log.ids == ["outer/inner/add:0"]
    tapped = jax.grad(tap(fn, handler, "primitive:add"))
    assert stablehlo(tapped, X, debug_info=True).count("/inner") == (
        stablehlo(jax.grad(fn), X, debug_info=True).count("/inner")
    )
