"""Linear operations: functions that JAX transposes, with handlers whose results round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call

import hijax_trace as ht
from hijax_trace import TraceEngine
from interception_core import Interceptor
from jaxtap_testkit.numbers import normal

DOT = "jax.lax.dot_general"
W, X = normal(2, 4, 4) / 3
VECTOR = jnp.arange(1.0, 5.0)


def dot(x, w):
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


@jax.custom_jvp
def dense(x, w):
    return jnp.sin(dot(x, w))


@dense.defjvp
def _rule(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return dense(x, w), jnp.cos(dot(x, w)) * (dot(dx, w) + dot(x, dw))


def programs():
    """Return programs of a weight and an array, by name."""

    def transposed(f, w, x):
        return jax.linear_transpose(lambda v: f(w, v), x)(x)[0]

    def solve(w, x):
        operator = jnp.eye(4) + dot(x, w)
        return jnp.linalg.solve(operator, VECTOR), jnp.linalg.inv(operator)

    def solved(w, x):
        def of(turn):
            return lambda matvec, b: jnp.linalg.solve(turn(jnp.eye(4) + dot(jnp.eye(4), w)), b)

        return lax.custom_linear_solve(
            lambda v: v + dot(v, w), x[0], of(jnp.transpose), of(lambda a: a)
        )

    def iterated(solver):
        def program(w, x):
            return solver(lambda v: v + 0.3 * dot(dot(v, w), w.T), x[0], maxiter=5)[0]

        return program

    def root(w, x):
        return lax.custom_root(
            lambda z: z - jnp.tanh(dot(z, w) / 4 + x[0]),
            jnp.zeros(4),
            lambda f, z: lax.fori_loop(0, 20, lambda i, z: z - f(z), z),
            lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y),
        )

    return {
        "transpose": lambda w, x: transposed(lambda w, v: dot(v, w), w, x),
        "transpose of an activation": lambda w, x: transposed(
            lambda a, v: dot(v, a), jnp.tanh(dot(x, w)), x
        ),
        "transpose of jit": lambda w, x: transposed(jax.jit(lambda w, v: dot(v, w)), w, x),
        "transpose of vmap": lambda w, x: transposed(
            jax.vmap(lambda w, v: dot(v, w), (None, 0)), w, x
        ),
        "transpose of scan": lambda w, x: transposed(
            lambda w, v: lax.scan(lambda c, _: (dot(c, w), None), v, None, length=2)[0], w, x
        ),
        "vmap of transpose": lambda w, x: jax.vmap(
            lambda v: jax.linear_transpose(lambda u: dot(u, w), v)(v)[0]
        )(x),
        "transpose of linearize": lambda w, x: jax.linear_transpose(
            jax.linearize(lambda v: jnp.sin(dot(v, w)), x)[1], x
        )(x)[0],
        "solve": solve,
        "custom_linear_solve": solved,
        "cg": iterated(jax.scipy.sparse.linalg.cg),
        "gmres": iterated(jax.scipy.sparse.linalg.gmres),
        "custom_root": root,
        "custom_jvp": lambda w, x: dense(x, w),
    }


def rounding(log):
    """Return a handler that rounds, with the derivative of an operation that does not."""

    def handler(call, x, w, *args, **params):
        log.append([(call.operand(v).provenance, call.is_linear(v)) for v in (x, w)])

        @jax.custom_jvp
        def near(x, w):
            return jnp.round(call.proceed(x, w, *args, **params), 4)

        @near.defjvp
        def rule(primals, tangents):
            exact = lambda x, w: lax.dot_general(x, w, *args, **params)  # noqa: E731
            return near(*primals), jax.jvp(exact, primals, tangents)[1]

        return near(x, w)

    return handler


PARTS = {
    "value": lambda f: f,
    "jit": jax.jit,
    "gradients": lambda f: jax.grad(
        lambda w, x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(w, x))), (0, 1)
    ),
    "gradients in jit": lambda f: jax.jit(PARTS["gradients"](f)),
    "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, x / 2])),
    "scan": lambda f: lambda w, x: lax.scan(lambda c, x: (c, f(w, x)), 0, jnp.stack([x, x / 2]))[1],
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (x, w)),
}
PROGRAMS = programs()


@pytest.mark.sample(4)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_transpose_is_that_of_the_derivative(name, part):
    fn = PARTS[part](PROGRAMS[name])
    tapped = TraceEngine().wrap(fn, Interceptor({DOT: rounding([])}))
    actual, expected = jax.jit(tapped)(W, X), jax.jit(fn)(W, X)
    for ours, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-2, atol=1e-2)


class Rounded(ht.HiPrim):
    """A rounded array, with the derivative of the array."""

    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x):
        return jnp.round(x, 4)

    def jvp(self, primals, tangents):
        return self(*primals), tangents[0]

    def batch(self, axis_data, args, dims):
        return Rounded(jax.typeof(*args))(*args), dims[0]

    lin, linearized = ht.linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = ht.vjp_from_jvp


@pytest.mark.parametrize("part", ["jit", "gradients in jit"])
@pytest.mark.parametrize("name", ["transpose", "solve", "cg"])
def test_handlers_may_make_hi_prims_of_what_is_transposed(name, part):
    def handler(call, x, w, *args, **params):
        found = call.proceed(x, w, *args, **params)
        return Rounded(jax.typeof(found))(found)

    fn = PARTS[part](PROGRAMS[name])
    actual = TraceEngine().wrap(fn, Interceptor({DOT: handler}))(W, X)
    for ours, right in zip(jax.tree.leaves(actual), jax.tree.leaves(fn(W, X)), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["custom_jvp", "solve"])
def test_gradients_around_the_tap(name):
    tapped = TraceEngine().wrap(PROGRAMS[name], Interceptor({DOT: rounding([])}))
    actual, expected = (PARTS["gradients"](f)(W, X) for f in (tapped, PROGRAMS[name]))
    for ours, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transpose", [[(None, True), ("args[0]", False)]]),
        ("transpose of an activation", [[("args[1]", False), ("args[0]", False)], None]),
        ("transpose of scan", [[(None, True), ("args[0]", False)]]),
        ("transpose of linearize", [[("args[1]", False), ("args[0]", False)]]),
    ],
)
def test_handlers_learn_in_which_operands_an_operation_is_linear(name, expected):
    log = []
    TraceEngine().wrap(PROGRAMS[name], Interceptor({DOT: rounding(log)}))(W, X)
    expected = [one or [(None, True), (None, False)] for one in expected]
    assert log == expected


def test_a_linear_call_is_linear_in_its_linear_operands():
    def program(w, x):
        turned = lambda w, ct: dot(ct, w.T)  # noqa: E731
        return linear_call(lambda w, v: dot(v, w), turned, w, x)

    log = []

    def tapped(w, x, factor):
        def handler(call, x, w, *args, **params):
            log.append([(call.operand(v).provenance, call.is_linear(v)) for v in (x, w)])
            return call.proceed(x, w, *args, **params) * factor

        return TraceEngine().wrap(program, Interceptor({DOT: handler}))(w, x)

    found, pull = jax.vjp(lambda x: jax.jit(tapped)(W, x, jnp.float32(2)), X)
    assert log[0] == [("args[1]", True), ("args[0]", False)]
    np.testing.assert_allclose(found, 2 * np.asarray(X) @ W, 1e-5, 1e-6)
    # Its derivative is the program's rule.
    np.testing.assert_allclose(pull(X)[0], np.asarray(X) @ W.T, 1e-5, 1e-6)


def test_the_programs_of_a_linear_solve_know_their_weights():
    log = []
    TraceEngine().wrap(PROGRAMS["custom_linear_solve"], Interceptor({DOT: rounding(log)}))(W, X)
    linear = [one for one in log if one[0][1]]
    assert linear
    assert all(one == [(None, True), ("args[0]", False)] for one in linear)


@pytest.mark.slow
def test_only_the_tangents_of_a_rule_are_linear():
    log = []
    tapped = TraceEngine().wrap(PROGRAMS["custom_jvp"], Interceptor({DOT: rounding(log)}))
    PARTS["gradients"](tapped)(W, X)
    found = [tuple(is_linear for _, is_linear in one) for one in log]
    assert (True, False) in found
    assert (False, True) in found
    assert not any(all(one) for one in found)
