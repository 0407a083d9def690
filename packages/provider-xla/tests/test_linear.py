"""Programs whose contractions JAX transposes: linear solves, implicit derivatives, rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxtap_testkit.numbers import normal
from jaxtap_testkit.xla_samples import dense
from provider_xla import (
    PtqProvider,
    QtProvider,
    QtRule,
    QuantizationError,
    QuantizationRule,
    QuantizationWarning,
)

W, X = np.asarray(normal(2, 8, 8)) / 9
B = np.arange(1.0, 9.0, dtype=np.float32)
STAYS = "JAX transposes it, so that it must be linear: its activations stay float"


def solve(params, x):
    return jnp.linalg.solve(jnp.eye(8) + x @ params["w"], B)


def custom(params, x):
    def inverse(turn):
        return lambda matvec, b: jnp.linalg.solve(turn(jnp.eye(8) + params["w"]), b)

    def matvec(v):
        return v + v @ params["w"]

    return lax.custom_linear_solve(matvec, x[0], inverse(jnp.transpose), inverse(lambda a: a))


def transposed(params, x):
    return jax.linear_transpose(lambda v: v @ params["w"], x)(x)[0]


def ruled(params, x):
    return dense(x, params["w"])


PROGRAMS = {"solve": solve, "custom": custom, "transposed": transposed, "ruled": ruled}


def near(actual, expected, bound=0.02):
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    assert np.linalg.norm(actual - expected) <= bound * np.linalg.norm(expected)


def reference(name, w, x):
    """Return what a program computes, in float64 NumPy."""
    w, x, eye = w.astype(np.float64), x.astype(np.float64), np.eye(8)
    if name == "solve":
        return np.linalg.solve(eye + x @ w, B)
    if name == "custom":
        return np.linalg.solve((eye + w).T, x[0])
    return x @ w.T if name == "transposed" else np.tanh(x @ w)


@pytest.mark.sample(2)
@pytest.mark.parametrize("act_qtype", ["int8", None])
@pytest.mark.parametrize("name", PROGRAMS)
def test_stored_weights_go_into_programs_that_jax_transposes(name, act_qtype):
    fn, params = PROGRAMS[name], {"w": W}
    rule = QuantizationRule(weight_qtype="int8", act_qtype=act_qtype)
    plan = PtqProvider(rule).plan(fn, params, X)
    stored = plan.quantize(params)
    assert not plan.problems
    assert plan.weights

    @jax.jit
    def everything(stored, x):
        run = plan.apply(fn)
        by_x = jax.grad(lambda x: jnp.sum(jnp.sin(run(stored, x))))(x)
        mapped = jax.vmap(lambda x: run(stored, x))(jnp.stack([x, x / 2]))
        return run(stored, x), by_x, mapped

    value, by_x, mapped = everything(stored, X)
    near(value, reference(name, W, X))
    near(by_x, jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(fn(params, x)))))(X), 0.05)
    near(mapped, np.stack([reference(name, W, X), reference(name, W, X / 2)]))


@pytest.mark.parametrize(("name", "is_stored"), [("transposed", True), ("solve", False)])
def test_plans_say_that_activations_stay_float(name, is_stored):
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", weights_only=False)
    plan = PtqProvider(rule).plan(PROGRAMS[name], {"w": W}, X)
    said = [line for line in str(plan).splitlines() if STAYS in line]
    assert len(said) == 1 if is_stored else said
    assert (plan.ops[0].qtypes == (None, "int8")) is is_stored


@pytest.mark.slow
@pytest.mark.parametrize("bwd_qtype", [None, "int8"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_goes_through_programs_that_jax_transposes(name, bwd_qtype):
    # Each program, and each format, has dynamic and static ranges.
    static = True if (list(PROGRAMS).index(name) % 2 == 0) == (bwd_qtype is None) else None
    fn, params = PROGRAMS[name], {"w": jnp.asarray(W)}
    qtypes = {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": bwd_qtype}
    provider = QtProvider(QtRule(**qtypes, act_static_scale=static, act_batch_axes=()))
    statistics = provider.init_statistics(fn, params, X)
    if static:
        provider.apply(fn, statistics)(params, X)
    trained = provider.apply(fn, statistics, update=False)

    def gradients(fn):
        return jax.grad(lambda params, x: jnp.sum(jnp.sin(fn(params, x))), (0, 1))

    value, ours, right = jax.jit(
        lambda *args: (trained(*args), gradients(trained)(*args), gradients(fn)(*args))
    )(params, X)
    near(value, reference(name, W, X))
    for one, other in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
        near(one, other, 0.06)


def test_a_library_solver_that_holds_its_operator():
    """Nobody knows what it does with that: it runs as it is, and the plan says so."""
    held = Primitive("library_solve")
    held.multiple_results = True
    held.def_abstract_eval(lambda w, b, static: [b, b])
    solved = lambda w, b, static: [jnp.linalg.solve(jnp.eye(8) + w, b), b]  # noqa: E731
    held.def_impl(solved)
    mlir.register_lowering(held, mlir.lower_fun(solved, multiple_results=True))
    batching.primitive_batchers[held] = lambda args, dims, static: (
        jax.vmap(lambda *args: solved(*args, static), dims)(*args),
        (0, 0),
    )
    operator = jax.make_jaxpr(lambda y: y + W @ y)(B)

    def fn(params, x):
        # Another equation of the primitive holds no program.
        same, _ = held.bind(jnp.zeros((8, 8)), x[0] @ params["w"], static=(None, 1.0))
        vector, _ = held.bind(params["w"], same, static=(operator, 1.0))
        return vector @ params["v"]

    params, rule = {"w": W, "v": W.T}, QuantizationRule(weight_qtype="int8")
    with pytest.warns(
        QuantizationWarning, match=r"library_solve:0 of args\[0\]\['w'\] stays float"
    ):
        plan = PtqProvider(rule).plan(fn, params, X)
    assert len(plan.weights) == 2
    run, stored = plan.apply(fn), plan.quantize(params)
    expected = np.linalg.solve(np.eye(8) + W, X[0] @ W) @ W.T
    near(jax.jit(run)(stored, X), expected)
    near(jax.vmap(run, (None, 0))(stored, X[None]), expected[None])
    near(QtProvider(rule).apply(fn)(params, X), expected)
    with pytest.raises(QuantizationError, match="holds programs, in which nothing is quantized"):
        PtqProvider(rule, strict=True).plan(fn, params, X)
    other = QuantizationRule(weight_qtype="int8", weight_path=r"\['v'\]"), QuantizationRule()
    assert not PtqProvider(other, strict=True).plan(fn, params, X).problems


@pytest.mark.slow
@pytest.mark.parametrize("provider", [PtqProvider, QtProvider])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_patch_engine_goes_through_programs_that_jax_transposes(name, provider):
    fn, params = PROGRAMS[name], {"w": jnp.asarray(W)}
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8")
    run = provider(rule, engine="patch").apply(fn)

    def summed(fn):
        return jax.grad(lambda x: jnp.sum(jnp.sin(fn(params, x))))

    value, ours, right = jax.jit(lambda x: (run(params, x), summed(run)(x), summed(fn)(x)))(X)
    near(value, reference(name, W, X))
    near(ours, right, 0.05)
