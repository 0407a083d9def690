"""Weights that are computed of parameters alone in other ways than by arithmetic of elements.

By solvers and loops, by products with constants, by roundings, read from references: they are
stored, or a problem names them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap

from provider_xla import (
    PtqProvider,
    QtProvider,
    QtRule,
    QuantizationError,
    QuantizationRule,
    QuantizationWarning,
)

N = 16
A, B = np.asarray(jax.random.normal(jax.random.key(0), (2, N, N))) / N
X = np.asarray(jax.random.normal(jax.random.key(1), (4, N)))
EYE = np.eye(N, dtype=np.float32)
MASK = np.tri(N, k=-1, dtype=np.float32)
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
    "masked": (
        lambda p: (MASK * p["a"]) @ (MASK * p["a"]).T + p["b"],
        lambda a, b: (MASK * a) @ (MASK * a).T + b,
    ),
    "exponential of a masked one": (
        lambda p: jax.scipy.linalg.expm(MASK * p["a"]) + p["b"],
        lambda a, b: scipy.linalg.expm(MASK * a) + b,
    ),
    "in a map": (
        lambda p: jax.vmap(jnp.linalg.inv)(EYE + jnp.stack([p["a"], p["b"]])).sum(0),
        lambda a, b: np.linalg.inv(np.eye(N) + a) + np.linalg.inv(np.eye(N) + b),
    ),
}


def relative(found, wanted):
    return np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted)


# With int8 activations too: in the default tier a solver, a loop and products.
BOTH = [
    pytest.param(name, {"act_qtype": "int8"}, id=f"{name}-both",
                 marks=() if name in ("Cayley", "polar", "masked") else pytest.mark.slow)
    for name in WEIGHTS
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rule"), [*(pytest.param(name, {}, id=f"{name}-weights") for name in WEIGHTS), *BOTH]
)
def test_they_are_stored(name, rule):
    weight, reference = WEIGHTS[name]

    def fn(p, x):
        return x @ weight(p)

    rules = [QuantizationRule(weight_qtype="int8", **rule)]
    plan = PtqProvider(rules, strict=True).plan(fn, PARAMS, X)
    (stored,) = plan.derived.values()
    assert set(stored.derived.leaves) == ALL
    exact = X.astype(np.float64) @ reference(A.astype(np.float64), B.astype(np.float64))
    held, run = plan.quantize(PARAMS), plan.apply(fn)
    for call in (jax.jit(run),) if rule else (run, jax.jit(run)):
        assert 1e-6 < relative(call(held, X), exact) < 0.02
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
    found, wanted = jax.jit(lambda *args: [jax.grad(f)(*args) for f in (tapped, loss)])(PARAMS, X)
    for key in PARAMS:
        assert 1e-6 < relative(found[key], np.asarray(wanted[key], np.float64)) < 0.1


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


def made(fn):
    """Run a function in a name scope, which a rule may name."""
    return lambda *args: jax.named_scope("made")(fn)(*args)


BASIS = np.asarray(jax.random.normal(jax.random.key(2), (N, 4))) / 4

# Adapters in a fixed basis, a sum of powers that begins with a constant, and in steps of layers.
OF_CONSTANTS = {
    "eye": lambda p, x: x @ (p["a"] + made(lambda b: jnp.eye(N) @ b)(p["b"])),
    "basis": lambda p, x: x @ (p["a"] + made(lambda b: BASIS @ b[:4, :4] @ BASIS.T)(p["b"])),
    "series": lambda p, x: x @ (
        made(lambda b: lax.fori_loop(0, 3, lambda _, c: EYE + b @ c, EYE))(p["b"]) + p["a"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("act", [None, "int8"])
@pytest.mark.parametrize("name", OF_CONSTANTS)
def test_a_sum_with_what_constants_and_a_parameter_make(name, act):
    """A constant is data for the product with it: what follows is made at each call."""
    fn, rule = OF_CONSTANTS[name], QuantizationRule(weight_qtype="int8", act_qtype=act)
    with pytest.raises(QuantizationError, match=r"is made of .*'a'.* at each call"):
        PtqProvider([rule], strict=True).plan(fn, PARAMS, X)
    # What the error says: a rule of its own for the product with the constant.
    rules = [QuantizationRule(module_path="made(/.*)?"), rule]
    plan = PtqProvider(rules, strict=True).plan(fn, PARAMS, X)
    (stored,) = plan.derived.values()
    assert set(stored.derived.leaves) == ALL
    found = jax.jit(plan.apply(fn))(plan.quantize(PARAMS), X)
    assert 1e-6 < relative(found, np.asarray(jax.jit(fn)(PARAMS, X), np.float64)) < 0.02


def test_a_stored_parameter_times_a_constant_is_a_note():
    def fn(p, x):
        return x @ (jnp.eye(N) @ p)

    plan = PtqProvider([QuantizationRule(weight_qtype="int8")], strict=True).plan(fn, A, X)
    assert [*plan.weights] == ["args[0]"]
    (note,) = plan.notes
    assert note.startswith("matmul:1 of args[0] stays float")


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", ["mantissa", "float4", "float8"])
def test_what_rounds_a_weight_rounds_it(name, beside):
    """Else quantized values of the parameter stand for another weight than the program's."""
    rounded = {
        "mantissa": lambda w: lax.reduce_precision(w, 8, 0),
        "float4": lambda w: (4 * w).astype(jnp.float4_e2m1fn).astype(jnp.float32),
        "float8": lambda w: w.astype(jnp.float8_e5m2).astype(jnp.float32),
    }[name]

    def fn(p, x):
        return x @ rounded(p) + (x @ p if beside else 0)

    plan = PtqProvider([QuantizationRule(weight_qtype="int8")], strict=True).plan(fn, A, X)
    assert len(plan.derived) == 1
    assert ("args[0]" in plan.weights) == beside
    found = jax.jit(plan.apply(fn))(plan.quantize(A), X)
    wanted = fn(A.astype(np.float64).astype(np.float32), X)
    assert relative(found, np.asarray(wanted, np.float64)) < 0.012


def test_bfloat16_is_a_view():
    def fn(p, x):
        return x @ lax.reduce_precision(p, 8, 7).astype(jnp.bfloat16).astype(jnp.float32)

    plan = PtqProvider([QuantizationRule(weight_qtype="int8")], strict=True).plan(fn, A, X)
    assert [*plan.weights] == ["args[0]"]


def test_a_weight_that_is_read_from_a_reference_is_a_problem():
    def fn(p, x):
        return x @ jax.new_ref(p)[...]

    with pytest.warns(QuantizationWarning, match=r"matmul:0 of args\[0\] stays float"):
        plan = PtqProvider([QuantizationRule(weight_qtype="int8")]).plan(fn, A, X)
    np.testing.assert_allclose(plan.apply(fn)(plan.quantize(A), X), X @ A, rtol=1e-5, atol=1e-5)


def test_numbers_among_the_parameters():
    """In a jitted call they are arrays: the weight is computed of the parameter beside it."""

    def fn(p, x):
        return x @ (p["w"] * p["scale"])

    params = {"w": A, "scale": 2.0}
    plan = PtqProvider([QuantizationRule(weight_qtype="int8")], strict=True).plan(fn, params, X)
    stored, run = plan.quantize(params), plan.apply(fn)
    for call in (run, jax.jit(run)):
        for scale in (2.0, 3.0):
            found = call({**stored, "scale": scale}, X)
            assert relative(found, scale * (X.astype(np.float64) @ A)) < 0.02


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("maps", ["rows", "rule"])
def test_functions_with_a_rule_for_vmap(maps, axes):
    """Under vmap the rule gets what the program gave, and nothing of what is stored."""
    one = sequential_vmap(lambda x, w: x @ w)
    if maps == "rule":
        one = custom_vmap(lambda x, w: x @ w)

        @one.def_vmap
        def rule(size, batched, x, w):
            return jnp.einsum("...k,...kn->...n", x, w), True

    x = X if axes[0] == 0 else X[0]

    def fn(w, x):
        return jax.vmap(one, axes)(x, w)

    params = A if axes[1] is None else np.stack([A, B, -A, -B])
    plan = PtqProvider([QuantizationRule(weight_qtype="int8")], strict=True).plan(fn, params, x)
    found = jax.jit(plan.apply(fn))(plan.quantize(params), x)
    spec = f"{'r' if axes[0] == 0 else ''}k,{'r' if axes[1] == 0 else ''}kn->rn"
    wanted = np.einsum(spec, x.astype(np.float64), params.astype(np.float64))
    assert relative(found, wanted) < 0.02
