"""Derivatives that the program takes inside of a jitted function, a loop, a branch or remat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hijax_trace import TraceEngine
from interception_core import Interceptor
from jaxtap_testkit.coded import coded, decoded
from jaxtap_testkit.tap_helpers import Log, stablehlo, tap, times

W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(5, 4)), jnp.float32)
DOT = "primitive:dot_general"


def derivatives(dot):
    """Return programs that take derivatives of what uses ``dot``."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(dot(x, w)) ** 2)

    def scanned(w, x):
        return jnp.sum(lax.scan(lambda c, s: (c + jnp.tanh(dot(s, w)), None), jnp.ones(3), x)[0])

    def pulled_in_a_loop(w, x):
        result, pull = jax.vjp(lambda x: jnp.tanh(dot(x, w)), x)
        return lax.scan(lambda c, s: (c + pull(s * result)[0], None), x, jnp.arange(3.0))[0]

    def called_twice(w, x):
        step = jax.jit(jax.grad(loss, 1))
        return step(w, x) + step(2 * w, x)

    def pulled_twice(w, x):
        pull = jax.vjp(loss, w, x)[1]
        return [pull(jnp.float32(s)) for s in (1, 2)]

    def transposed(w, x):
        push = jax.linearize(lambda w: jnp.tanh(dot(x, w)), w)[1]
        return jax.linear_transpose(lambda t: push(t), w)(dot(x, w))

    return {
        "grad": jax.grad(loss, 1),
        "value_and_grad": jax.value_and_grad(loss),
        "jvp": lambda w, x: jax.jvp(loss, (w, x), (w, x)),
        "linearize": lambda w, x: jax.linearize(lambda w: loss(w, x), w)[1](w),
        "hessian": lambda w, x: jax.hessian(loss)(w, x[:1]),
        "jacrev": lambda w, x: jax.jacrev(lambda w: jnp.tanh(dot(x[:2], w)))(w),
        "grad of grad": lambda w, x: jax.grad(lambda w: jnp.sum(jax.grad(loss)(w, x) ** 2))(w),
        "vmap of grad": jax.vmap(jax.grad(loss, 1), (None, 0)),
        "vmap of grad of w": lambda w, x: jax.vmap(jax.grad(loss), (None, 0))(w, x[:, None]),
        "vmap of vmap of grad": lambda w, x: jax.vmap(
            jax.vmap(jax.grad(loss, 1), (None, 0)), (0, None)
        )(jnp.stack([w, -w]), x),
        "grad of vmap": lambda w, x: jax.grad(lambda w: jnp.sum(jax.vmap(loss, (None, 0))(w, x)))(
            w
        ),
        "grad of jit": jax.grad(jax.jit(loss)),
        "grad of remat": jax.grad(jax.checkpoint(loss)),
        "grad of scan": jax.value_and_grad(scanned),
        "vmap of grad of scan": lambda w, x: jax.vmap(jax.grad(scanned), (None, 0))(w, x[:, None]),
        "grad of a custom rule": jax.grad(lambda w, x: loss(jax.nn.relu(w), x)),
        "a pullback called twice": pulled_twice,
        "integers": lambda w, x: jax.grad(lambda w: jnp.sum(dot(x, w)[jnp.argmax(dot(x, w), 0)]))(
            w
        ),
        "transposed": transposed,
        "pulled in a loop": pulled_in_a_loop,
        "called twice": called_twice,
    }


PROGRAMS, DOUBLED = derivatives(lambda x, w: x @ w), derivatives(lambda x, w: 2 * (x @ w))
# Where some contractions have another operand than ``w``.
WEIGHTS = {
    "grad of a custom rule": {None},
    "vmap of vmap of grad": {None},
    "called twice": {None, "args[0]"},
}
PARTS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda w, x: lax.scan(lambda c, _: (c, f(w, x)), 0, None, length=2)[1],
    "cond": lambda f: lambda w, x: lax.cond(x[0, 0] < 9, f, lambda w, x: f(2 * w, x), w, x),
    "vmap": lambda f: lambda w, x: jax.vmap(jax.jit(f), (0, None))(jnp.stack([w, -w]), x),
    "grad": lambda f: jax.grad(
        lambda w, x: sum(jnp.sum(y**2) for y in jax.tree.leaves(jax.jit(f)(w, x)))
    ),
}
PAIRS = [
    pytest.param(name, part, marks=[pytest.mark.slow] if part != "jit" else [])
    for part in PARTS
    for name in PROGRAMS
]


def shared(test):
    """Return the pairs of a test that shares those beside jit with another: every second one."""
    return [pair for i, pair in enumerate(PAIRS) if pair.values[1] == "jit" or i % 2 == test]


def assert_equal(actual, expected):
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "part"), shared(0))
def test_nothing_changes_where_all_is_let_run(name, part):
    fn, log = PARTS[part](PROGRAMS[name]), Log()
    tapped = tap(fn, log, DOT)
    assert_equal(*jax.jit(lambda w, x: (tapped(w, x), fn(w, x)))(W, X))
    if part == "jit":
        found = {operands[1].provenance for operands in log.operands}
        assert found == WEIGHTS.get(name, {"args[0]"})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), PAIRS)
def test_the_derivative_is_that_of_what_handlers_return(name, part):
    tapped = tap(PARTS[part](PROGRAMS[name]), times(2.0), DOT)
    assert_equal(jax.jit(tapped)(W, X), PARTS[part](DOUBLED[name])(W, X))


@pytest.mark.parametrize(
    "name", ["value_and_grad", "jacrev", "vmap of grad of w", "vmap of grad of scan"]
)
def test_nothing_is_computed_twice(name):
    fn = jax.jit(PROGRAMS[name])
    plain, tapped = (stablehlo(f, W, X) for f in (fn, tap(fn, Log(), DOT)))
    for operation in ("dot_general", "tanh", "stablehlo.while"):
        assert tapped.count(operation) == plain.count(operation)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_operation_is_asked_about_once(name):
    log = Log()
    tap(jax.jit(PROGRAMS[name]), log, DOT)(W, X)
    assert len(log.ids) == len(set(log.ids)) <= 2


@pytest.mark.parametrize(("name", "part"), shared(1))
def test_the_derivative_by_an_array_proxy_is_that_by_its_array(name, part):
    """A handler that computes from the codes has a result that no array decides."""
    weight, found = coded(*W.shape), []

    def handler(call, x, w, **params):
        held = call.proxy(w)
        found.append(held is not None)
        return call.proceed(x, w if held is None else held.restore(), **params)

    fn = PARTS[part](PROGRAMS[name])
    tapped = TraceEngine().wrap(fn, Interceptor({DOT: handler}))
    assert_equal(*jax.jit(lambda v, w, x: (tapped(v, x), fn(w, x)))(weight, decoded(weight), X))
    if part == "jit":
        assert any(found) == (WEIGHTS.get(name) != {None})


def test_a_rule_without_the_array_proxy_that_its_call_has():
    """The derivative of the loop calls tanh's rule, which gets arrays."""

    def fn(w, x):
        def looped(w):
            return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w), x)

        return jax.jit(lambda w: jax.jvp(looped, (w,), (w,)))(w)

    def handler(call, x, w, **params):
        held = call.proxy(w)
        return call.proceed(x, w if held is None else held.restore(), **params)

    weight = coded(4, 4)
    tapped = TraceEngine().wrap(fn, Interceptor({DOT: handler}))
    assert_equal(tapped(weight, X), fn(decoded(weight), X))


@pytest.mark.slow
def test_each_call_of_one_trace_has_its_own_weight():
    """JAX traces the function once, and puts it into the program at once, twice."""
    found = []

    def look(call, x, w, **params):
        found.append(str(call.expression(w)))
        return call.proceed(x, w, **params) * (2 if "mul" in found[-1] else 3)

    step = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w)), 1), inline=True)

    @jax.jit
    def program(w, x):
        return step(w, x), step(w * 2, x)

    def expected(w, scale):
        return jax.grad(lambda x: jnp.sum(jnp.sin(scale * (x @ w))))(X)

    actual = TraceEngine().wrap(program, Interceptor({DOT: look}))(W, X)
    assert found == ["args[0]", "mul(args[0], 2.0)"]
    assert_equal(actual, (expected(W, 3), expected(2 * W, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda f: f, jax.grad], ids=["", "grad"])
def test_shapes_of_a_derivative_s_function(around):
    """Solvers carry linear functions of the structure that ``eval_shape`` told before a loop."""

    def steps(w, x):
        def linear(y):
            return jax.linearize(lambda y: jnp.tanh(jnp.dot(y, w)) @ w.T, y)[1]

        def step(y, _):
            told, made = jax.tree.leaves(jax.eval_shape(linear, y)), jax.tree.leaves(linear(y))
            assert [(one.shape, one.dtype) for one in told] == [(x.shape, x.dtype) for x in made]
            return linear(y)(y), None

        return jnp.sum(lax.scan(step, x, None, length=2)[0])

    def program(w, x):
        return around(lambda w: steps(w, x) + jnp.sum(jnp.dot(x, w)))(w)

    found = tap(program, times(1.0), DOT, "jax.numpy.dot")(W, X)
    np.testing.assert_allclose(found, program(W, X), rtol=1e-4)


def test_tangents_that_are_zero():
    """A branch that is differentiated tells which of its results don't depend on its operands."""
    zeros = []

    @jax.custom_jvp
    def told(stopped, other):
        return stopped, other

    def rule(primals, tangents):
        zeros.append([type(one).__name__ == "SymbolicZero" for one in tangents])
        return primals, tangents

    told.defjvp(rule, symbolic_zeros=True)

    def program(w, x):
        def pair(y):
            made = lax.cond(
                y.sum() > 0,
                lambda: (lax.stop_gradient(jnp.dot(y, w)), jnp.dot(y, w)),
                lambda: (jnp.dot(lax.stop_gradient(y), w), jnp.dot(2 * y, w)),
            )
            return jnp.sum(told(*made)[1])

        return lax.map(lambda y: jax.linearize(pair, y)[1](y), x)

    expected = program(W, X)
    assert zeros.pop() == [True, False]
    zeros.clear()
    np.testing.assert_allclose(tap(program, times(1.0), DOT)(W, X), expected, rtol=1e-5)
    assert zeros
    assert all(one == [True, False] for one in zeros)
