"""Weights that a solver or a loop computes of parameters alone: stored, or a problem names them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax import lax

from provider_xla import PtqProvider, QtProvider, QtRule, QuantizationRule, QuantizationWarning

N = 16
A, B = np.asarray(jax.random.normal(jax.random.key(0), (2, N, N))) / N
X = np.asarray(jax.random.normal(jax.random.key(1), (4, N)))
EYE = np.eye(N, dtype=np.float32)
PARAMS = {"a": A, "b": B}
ALL = {"args[0]['a']", "args[0]['b']"}


def polar(a, steps=8):
    """Return the orthogonal factor of a matrix, by Newton's and Schulz' iteration."""
    start = a / jnp.linalg.norm(a, 2)
    return lax.fori_loop(0, steps, lambda _, y: 1.5 * y - 0.5 * y @ y.T @ y, start)


def gradients(solver, **options):
    return lambda p: solver(lambda v: v + p["a"] @ (p["a"].T @ v), p["b"], **options)[0]


def normal(a, b):
    return np.linalg.solve(np.eye(N) + a @ a.T, b)


# What a program computes of both parameters, and the same in float64 NumPy.
WEIGHTS = {
    "Cayley": (
        lambda p: jnp.linalg.solve(EYE + p["a"], EYE - p["a"]) + p["b"],
        lambda a, b: np.linalg.solve(np.eye(N) + a, np.eye(N) - a) + b,
    ),
    "inverse": (
        lambda p: jax.jit(jnp.linalg.inv)(jnp.eye(N) + p["a"] @ p["b"]),
        lambda a, b: np.linalg.inv(np.eye(N) + a @ b),
    ),
    "exponential": (
        lambda p: jax.scipy.linalg.expm(4 * p["a"]) + p["b"],
        lambda a, b: scipy.linalg.expm(4 * a) + b,
    ),
    "least squares": (
        lambda p: jnp.linalg.lstsq(jnp.eye(N) + p["a"], p["b"])[0],
        lambda a, b: np.linalg.solve(np.eye(N) + a, b),
    ),
    "conjugate gradients": (
        gradients(jax.scipy.sparse.linalg.cg, tol=1e-7),
        normal,
    ),
    "stabilized gradients": (
        gradients(jax.scipy.sparse.linalg.bicgstab, tol=1e-7),
        normal,
    ),
    "polar": (
        lambda p: polar(p["a"] + p["b"] + EYE),
        lambda a, b: scipy.linalg.polar(a + b + np.eye(N))[0],
    ),
    "power": (
        lambda p: lax.fori_loop(0, 2, lambda _, c: c @ c, p["a"] + p["b"]),
        lambda a, b: np.linalg.matrix_power(a + b, 4),
    ),
    "in a map": (
        lambda p: jax.vmap(jnp.linalg.inv)(EYE + jnp.stack([p["a"], p["b"]])).sum(0),
        lambda a, b: np.linalg.inv(np.eye(N) + a) + np.linalg.inv(np.eye(N) + b),
    ),
}


def relative(found, wanted):
    return np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("rule", [{}, {"act_qtype": "int8"}], ids=["weights", "both"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_they_are_stored(name, rule):
    weight, reference = WEIGHTS[name]

    def fn(p, x):
        return x @ weight(p)

    rules = [QuantizationRule(weight_qtype="int8", **rule)]
    plan = PtqProvider(rules, strict=True).plan(fn, PARAMS, X)
    (stored,) = plan.derived.values()
    assert set(stored.derived.leaves) == ALL
    exact = X.astype(np.float64) @ reference(A.astype(np.float64), B.astype(np.float64))
    for run in (plan.apply(fn), jax.jit(plan.apply(fn))):
        error = relative(run(plan.quantize(PARAMS), X), exact)
        assert 1e-6 < error < 0.02
    found = {op.op_id: op.qtypes for op in plan.ops if op.quantized}
    assert [*found.values()] == [("int8" if rule else None, "int8")]


def test_those_of_layers_are_stored_for_each():
    def fn(p, x):
        def layer(h, a):
            return h @ jnp.linalg.solve(EYE + a, EYE - a), None

        return lax.scan(layer, x, p)[0]

    params = np.stack([A, B])
    plan = PtqProvider([QuantizationRule(weight_qtype="int8")], strict=True).plan(fn, params, X)
    (stored,) = plan.derived.values()
    assert stored.shape == (2, N, N)
    exact = X.astype(np.float64)
    for a in params.astype(np.float64):
        exact = exact @ np.linalg.solve(np.eye(N) + a, np.eye(N) - a)
    assert 1e-6 < relative(jax.jit(plan.apply(fn))(plan.quantize(params), X), exact) < 0.03


@pytest.mark.parametrize("name", ["Cayley", "exponential", "power"])
def test_training_quantizes_them_and_computes_them_in_float(name):
    weight, _ = WEIGHTS[name]
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")

    def loss(p, x):
        return jnp.sum((x @ weight(p)) ** 2)

    tapped = QtProvider([rule]).apply(loss)
    found = jax.jit(jax.grad(tapped))(PARAMS, X)
    for key, wanted in jax.grad(loss)(PARAMS, X).items():
        assert 1e-6 < relative(found[key], np.asarray(wanted, np.float64)) < 0.1


# A loop that computes a weight and uses it, a count that the program computes, nothing that uses
# what is computed of parameters.
KEPT = {
    "fori_loop(<lambda>)/matmul:1": lambda p, x: lax.fori_loop(
        0, 3, lambda _, c: (c[0] @ c[0], c[1] @ c[0]), (p["a"], x)
    )[1],
    "while_body(<lambda>)/matmul:0": lambda p, x: (
        x
        @ lax.while_loop(
            lambda c: c[0] < x[0, 0], lambda c: (c[0] + 1, c[1] @ c[1]), (0.0, p["a"])
        )[1]
    ),
    "matmul:0": lambda p, x: x + (p["a"] @ p["b"])[:4],
}


@pytest.mark.parametrize("op_id", KEPT)
def test_what_is_computed_at_each_call_is_a_problem(op_id):
    fn = KEPT[op_id]
    with pytest.warns(QuantizationWarning):
        plan = PtqProvider([QuantizationRule(weight_qtype="int8")]).plan(fn, PARAMS, X)
    (problem,) = plan.problems
    assert problem.startswith(op_id)
    assert "args[0]['a']" in problem
    found = jax.jit(plan.apply(fn))(plan.quantize(PARAMS), X)
    np.testing.assert_allclose(found, jax.jit(fn)(PARAMS, X), rtol=0.05, atol=0.02)


def test_a_state_that_starts_as_a_parameter_is_said_to_be_an_activation():
    def fn(p, x):
        return lax.scan(lambda h, _: (jnp.tanh(h @ p["a"] + x[:1]), None), p["b"], length=2)[0]

    plan = PtqProvider([QuantizationRule(weight_qtype="int8")], strict=True).plan(fn, PARAMS, X)
    assert [*plan.weights] == ["args[0]['a']"]
    still = lambda p, x: lax.scan(lambda h, _: (h @ p["a"], None), p["b"], length=2)[0] + x[0]  # noqa: E731
    plan = PtqProvider([QuantizationRule(weight_qtype="int8")], strict=True).plan(still, PARAMS, X)
    ((path, _, why),) = plan.floats
    assert path == "args[0]['b']"
    assert why == "scan(<lambda>)/matmul:0: it is an activation there, beside a weight"
