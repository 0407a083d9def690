"""Derivatives that a program takes by its own stored parameters.

Test-time training, inner steps of meta-learning and influence functions do that. The derivative is
the float program's, at the values that are stored.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_xla as xla
from hijax_trace import ArrayProxy
from jaxtap_testkit.xla_samples import draw

W, U, X = draw((16, 8), (8, 16), (4, 16))
TABLE, STACK, KERNEL, IMAGES = draw((12, 16), (3, 16, 16), (3, 3, 4, 8), (2, 6, 6, 4))
TOKENS = jnp.asarray([1, 5, 5])
RULE = xla.QuantizationRule(weight_qtype="int8")


def loss(w, x):
    return (jnp.tanh(x @ w) ** 2).sum()


def convolved(k, x):
    return lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def two_steps(p, x):
    @jax.jit
    def step(p):
        gradient = jax.grad(lambda p: loss(p["up"], x) + (p["bias"] ** 2).sum())(p)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, gradient)

    p = step(step(p))
    return x @ p["up"] + p["bias"]


def influence(w, x):
    """Return a product of the inverse Hessian, by conjugate gradients."""
    hvp = lambda v: jax.jvp(jax.grad(lambda w: loss(w, x)), (w,), (v,))[1] + 20 * v  # noqa: E731
    return jax.scipy.sparse.linalg.cg(hvp, jnp.ones_like(w), maxiter=20)[0]


def of_layers(stack, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0].sum()


PROGRAMS = {
    "grad": (lambda w, x: jax.jit(jax.grad(loss))(w, x), W, X),
    "grad, not jitted": (lambda w, x: jax.grad(jax.jit(loss))(w, x), W, X),
    "jvp": (lambda w, x: jax.jit(lambda w: jax.jvp(loss, (w, x), (w, x)))(w), W, X),
    "vjp": (lambda w, x: jax.jit(lambda w: jax.vjp(loss, w, x)[1](1.0))(w), W, X),
    "jacobians": (
        lambda w, x: [
            jax.jit(by(lambda w: jnp.tanh(x @ w).sum(0)))(w) for by in (jax.jacrev, jax.jacfwd)
        ],
        W,
        X,
    ),
    "hessian by the input": (lambda w, x: jax.jit(jax.hessian(loss, 1))(w, x[0]), W, X),
    "hessian": (lambda w, x: jax.jit(jax.hessian(loss))(w, x[0]), W, X),
    "force and its derivative": (
        lambda w, x: jax.jit(jax.grad(lambda w: (jax.grad(loss, 1)(w, x) ** 2).sum()))(w),
        W,
        X,
    ),
    "vmap": (lambda w, x: jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(w, x), W, X),
    "scan": (
        lambda w, x: lax.scan(lambda c, x: (c + jax.grad(loss)(w, x), None), 0 * w, x)[0],
        W,
        X,
    ),
    "through scan": (lambda w, x: jax.jit(jax.grad(of_layers))(w, x), STACK, X),
    "stack": (lambda w, x: jax.jit(jax.vmap(jax.grad(loss), (0, None)))(w, x), STACK, X),
    "steps": (two_steps, {"up": W, "bias": W[0]}, X),
    "influence": (influence, W, X),
    "fori": (
        lambda w, x: jax.jit(
            lambda w: jax.jvp(
                lambda w: lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x), (w,), (w,)
            )
        )(w),
        STACK[0],
        X,
    ),
    "solve": (
        lambda w, x: jax.jit(jax.grad(lambda w: jnp.linalg.solve(w, x[0]).sum()))(
            w + 9 * jnp.eye(16)
        ),
        STACK[0],
        X,
    ),
    "convolution": (
        lambda k, x: jax.jit(jax.grad(lambda k: (convolved(k, x) ** 2).sum()))(k),
        KERNEL,
        IMAGES,
    ),
    "tied": (
        lambda t, i: jax.jit(jax.grad(lambda t: jnp.tanh(t[i] @ t.T).sum()))(t),
        TABLE,
        TOKENS,
    ),
    "derived": (
        lambda w, x: jax.jit(jax.grad(lambda w: loss(w * jnp.tri(16, 8), x)))(w),
        W,
        X,
    ),
    "exp": (lambda w, x: jax.jit(jax.grad(lambda w: loss(jnp.exp(w), x)))(w), W, X),
    "custom rule": (
        lambda w, x: jax.jit(jax.grad(lambda w: jax.nn.relu(x @ w).sum() ** 2))(w),
        W,
        X,
    ),
}  # fmt: skip
# What is stored of these is not the parameter, but what the program computes from it.
COARSE = {"derived": 0.05, "exp": 0.05, "solve": 0.05}


def restored(stored):
    is_proxy = lambda x: isinstance(x, ArrayProxy)  # noqa: E731
    return jax.tree.map(lambda x: x.restore() if is_proxy(x) else x, stored, is_leaf=is_proxy)


def assert_near(found, wanted, bound):
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(one - other) <= bound * np.linalg.norm(other)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_derivative_is_that_at_the_stored_values(name):
    fn, params, x = PROGRAMS[name]
    plan = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int8", op_names=(
        "dot_general", "conv_general_dilated", "take"))).plan(fn, params, x)  # fmt: skip
    assert plan.weights
    stored = plan.quantize(params)

    @jax.jit
    def run(params, stored):
        exact = fn(params if name in COARSE else restored(stored), x)
        return plan.apply(fn)(stored, x), exact

    assert_near(*run(params, stored), COARSE.get(name, 1e-4))


def forms():
    """Yield plans, each with another form of a stored weight."""

    def of(weight_qtype="int8", **rule):
        rule = xla.QuantizationRule(weight_qtype=weight_qtype, **rule)
        return xla.PtqProvider(rule).plan(PROGRAMS["vjp"][0], W, X)

    plan = of()
    yield plan, plan.quantize(W, prepack=False)
    plan = of(weight_qtype="nf4", tile_size=8)
    yield plan, plan.quantize(W)


@pytest.mark.slow
def test_every_stored_form():
    fn = PROGRAMS["vjp"][0]
    for plan, stored in forms():
        found = jax.jit(plan.apply(fn))(stored, X)
        assert_near(found, fn(restored(stored), X), 2e-4)


@pytest.mark.slow
def test_quantized_activations_and_training():
    """Activations are rounded; the derivative goes straight through that."""
    fn = PROGRAMS["vjp"][0]
    plan = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int8", act_qtype="int8")).plan(
        fn, W, X
    )
    stored = plan.quantize(W)
    assert_near(jax.jit(plan.apply(fn))(stored, X), fn(W, X), 0.06)
    trained = xla.QtProvider(xla.QtRule(weight_qtype="int8", act_qtype="int8")).apply(fn)
    assert_near(jax.jit(trained)(W, X), fn(W, X), 0.06)


@pytest.mark.slow
def test_a_derivative_from_outside_is_by_the_stored_arrays():
    """Integers have no tangents. Scales do: they may be trained."""
    plan = xla.PtqProvider(RULE).plan(loss, W, X, kernels=False)
    stored, run = plan.quantize(W), plan.apply(loss)
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        jax.grad(run)(stored, X)
    found = jax.grad(run, allow_int=True)(stored, X)
    assert found.qvalue.dtype == jax.dtypes.float0
    by_weight = np.asarray(jax.grad(loss)(stored.restore(), X), np.float64)
    exact = (by_weight * np.asarray(stored.qvalue, np.float64)).sum(0, keepdims=True)
    np.testing.assert_allclose(found.scale, exact, rtol=1e-3, atol=1e-3)


@jax.custom_jvp
def _layer(x, w):
    return jnp.dot(x, w)


_layer.defjvp(
    lambda primals, tangents: (
        jnp.dot(*primals),
        jnp.dot(tangents[0], primals[1]) + jnp.dot(primals[0], tangents[1]),
    )
)


def test_kernels_in_what_the_program_transposes_of_a_rule():
    def per_example(w, x):
        def loss(x):
            return jnp.sum(_layer(x[None], w) ** 2)

        return jax.vmap(jax.grad(loss))(x), jax.hessian(loss)(x[0])

    w, x = (jnp.asarray(np.random.default_rng(i).normal(size=(8, 8)), jnp.float32) for i in (0, 1))
    plan = xla.PtqProvider([RULE]).plan(per_example, w, x)
    stored, tapped = plan.quantize(w), plan.apply(per_example)
    expected = per_example(stored.restore(), x)
    for found in (tapped(stored, x), jax.jit(tapped)(stored, x)):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
