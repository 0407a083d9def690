"""What a pure handler did at an operation is done again at those that do not differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hijax_trace import TraceEngine
from interception_core import Interceptor
from jaxtap_testkit.coded import coded

DOT = "jax.numpy.dot"
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((2, 4)), jnp.float32)
WEIGHTS = [jnp.asarray(RNG.standard_normal((4, 4)), jnp.float32) for _ in range(5)]


def model(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.dot(x, w)
    return x


class Doubling:
    """A handler that doubles, after it has looked at something, and counts its calls."""

    def __init__(self, look=lambda call: None):
        self.asked = 0
        self._look = look

    def __call__(self, call, x, w):
        self.asked += 1
        found = self._look(call)
        return jnp.tanh(jax.lax.dot(x, w)) * (2.0 if found is None else float(len(str(found))))


def tapped(fn, handler, **keys):
    keys = {"is_pure": True, **keys}
    return TraceEngine().wrap(fn, Interceptor({DOT: handler}, **keys))


def scopes(jaxpr):
    """Return the name of each matmul's innermost scope."""
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    return [str(eqn.source_info.name_stack) for eqn in eqns]


LOOKS = {
    "at nothing": (lambda call: None, {}, 1),
    "at paths": (lambda call: call.module_path, {}, 5),
    "at paths that are alike": (lambda call: call.module_path, {"path_key": lambda path: None}, 1),
    "at paths of two kinds": (
        lambda call: call.module_path in ("layer_1", "layer_3"),
        {"path_key": lambda path: path in ("layer_1", "layer_3")},
        2,
    ),
    "at origins": (lambda call: call.operands[1].provenance, {}, 5),
    "at origins that are alike": (
        lambda call: call.operands[0].provenance is None,
        {"origin_key": lambda path: None},
        # The first activation is an input; the others are not.
        2,
    ),
    "at ids": (lambda call: call.op_id, {"path_key": lambda path: None}, 5),
    "at expressions": (lambda call: str(call.expression(call._args[1])), {}, 5),
    "at steps": (lambda call: call.steps, {}, 5),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LOOKS)
def test_a_handler_is_asked_where_something_differs_that_it_looks_at(name):
    look, keys, asked = LOOKS[name]
    pure, each = Doubling(look), Doubling(look)
    ours = tapped(model, pure, **keys)
    plain = tapped(model, each, is_pure=False, **keys)
    assert str(jax.make_jaxpr(ours)(WEIGHTS, X)) == str(jax.make_jaxpr(plain)(WEIGHTS, X))
    assert (pure.asked, each.asked) == (asked, 5)
    found = jax.jit(ours)(WEIGHTS, X)
    np.testing.assert_array_equal(found, jax.jit(plain)(WEIGHTS, X))
    assert scopes(jax.make_jaxpr(ours)(WEIGHTS, X)) == [f"layer_{i}" for i in range(5)]


@pytest.mark.slow
def test_gradients_are_those_of_a_handler_that_is_asked_each_time():
    def loss(fn):
        return jax.jit(jax.grad(lambda weights: jnp.sin(fn(weights, X)).sum()))

    found = loss(tapped(model, Doubling()))(WEIGHTS)
    expected = loss(tapped(model, Doubling(), is_pure=False))(WEIGHTS)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_ids_count_the_operations_that_no_handler_was_asked_about():
    ids = []

    def handler(call, x, w):
        if w.shape[1] == 3:
            ids.append(call.op_id)
        return NotImplemented if w.shape[1] == 3 else 2 * jax.lax.dot(x, w)

    def program(weights, last, x):
        for w in weights:
            x = jnp.dot(x, w)
        return jnp.dot(x, last), jnp.dot(x, last)

    jax.eval_shape(tapped(program, handler), WEIGHTS, jnp.ones((4, 3)), X)
    assert ids == ["dot:5", "dot:6"]


def test_operands_in_other_places_and_of_other_types_are_asked_about():
    handler = Doubling()

    def program(x, y, half):
        return jnp.dot(x, x), jnp.dot(x, y), jnp.dot(y, x), jnp.dot(half, half), jnp.dot(y, y)

    x, y, half = WEIGHTS[0], WEIGHTS[1], WEIGHTS[2].astype(jnp.bfloat16)
    found = jax.jit(tapped(program, handler))(x, y, half)
    pairs = ((x, x), (x, y), (y, x), (half, half), (y, y))
    for a, pair in zip(found, pairs, strict=True):
        expected = 2 * jnp.tanh(jax.lax.dot(*pair))
        np.testing.assert_allclose(a.astype("float32"), expected.astype("float32"), rtol=1e-5)
    assert handler.asked == 3  # x @ x, x @ y and half @ half


def test_results_of_several_equations_and_scalars_among_operands():
    def handler(call, x, w):
        if w.ndim == 0:
            return NotImplemented
        left, right = jnp.split(x, 2, 1)  # one equation with two results
        return jax.lax.dot(right - left, w[:2]) + jax.lax.dot(left, w[2:])

    def program(weights, x):
        half = jnp.float32(0.5)
        for w in weights:
            x = jnp.dot(jnp.dot(x, w), half)
        return x

    expected = X
    for w in WEIGHTS:
        left, right = expected[:, :2], expected[:, 2:]
        expected = 0.5 * (jax.lax.dot(right - left, w[:2]) + jax.lax.dot(left, w[2:]))
    found = jax.jit(tapped(program, handler))(WEIGHTS, X)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_arrays_whose_values_a_handler_could_see_are_asked_about():
    def handler(call, x, w):
        return jax.lax.dot(x, w) * (
            1.0 if isinstance(w, jax.core.Tracer) else float(np.asarray(w)[0, 0])
        )

    def program(x):
        return model(WEIGHTS[:3], x)

    expected = X
    for w in WEIGHTS[:3]:
        expected = jax.lax.dot(expected, w) * w[0, 0]
    np.testing.assert_allclose(jax.jit(tapped(program, handler))(X), expected, rtol=1e-5)


def test_array_proxies_of_one_structure_are_alike_and_only_used_arrays_are_restored():
    asked = []

    def handler(call, x, w):
        held = call.proxy(w)
        asked.append(held is None)
        if held is None:
            return 3 * jax.lax.dot(x, w)
        return jax.lax.dot(x, held.codes.astype(x.dtype)) * held.scale.reshape(-1)[0]

    stored = [coded(4, 4, seed=i, axes=()) for i in range(3)]
    stored += [coded(4, 4, seed=9, groups=(2, 1)), *WEIGHTS[:2]]
    ours = tapped(model, handler)
    expected = X
    for w in stored:
        if isinstance(w, jax.Array):
            expected = 3 * jax.lax.dot(expected, w)
        else:
            expected = jax.lax.dot(expected, w.codes.astype("float32")) * w.scale[0, 0]
    jaxpr = jax.make_jaxpr(ours)(stored, X)
    assert asked == [False, False, True]
    np.testing.assert_allclose(jax.jit(ours)(stored, X), expected, rtol=1e-5)
    # One for each kind of proxy, whose type it tells; nothing needs the others.
    assert str(jaxpr).count("name=_restoring") == 2
    used = jax.make_jaxpr(TraceEngine().wrap(model, Interceptor({"jax.numpy.sum": handler})))
    assert str(used(stored, X)).count("name=_restoring") == 4
