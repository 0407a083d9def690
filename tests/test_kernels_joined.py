"""Biases, residuals and the affine part of norms, computed by the kernel before them."""

import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtap_testkit.te.calls import told
from provider_xla import PtqProvider, QuantizationRule

RNG = np.random.default_rng(0)
K, N = 64, 48
PARAMS = {
    "w": jnp.asarray(RNG.normal(size=(K, N)), jnp.float32),
    "b": jnp.asarray(RNG.normal(size=N), jnp.float32),
    "scale": jnp.asarray(RNG.normal(size=N), jnp.float32),
}
X = jnp.asarray(RNG.normal(size=(2, 5, K)), jnp.float32)
R = jnp.asarray(RNG.normal(size=(2, 5, N)), jnp.float32)
RULES = {
    "w8a8": QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    "w8": QuantizationRule(weight_qtype="int8"),
    "w4": QuantizationRule(weight_qtype="int4", tile_size=32),
}


def quantized(fn, rule, *args, params=PARAMS):
    """The program with stored parameters, and them."""
    plan = PtqProvider(rule).plan(fn, params, *args)
    return jax.jit(plan.apply(fn)), plan.quantize(params)


PROGRAMS = {
    "bias": (lambda p, x, r: x @ p["w"] + p["b"], 1),
    "bias before": (lambda p, x, r: p["b"] + x @ p["w"], 1),
    "residual": (lambda p, x, r: r + x @ p["w"], 1),
    "both": (lambda p, x, r: r + (x @ p["w"] + p["b"]), 1),
    "in another order": (lambda p, x, r: (x @ p["w"] + r) + p["b"], 1),
    "rows in one axis": (
        lambda p, x, r: (x.reshape(10, K) @ p["w"] + p["b"]).reshape(r.shape) + r,
        1,
    ),
    "einsum": (lambda p, x, r: jnp.einsum("btk,kn->btn", x, p["w"]) + p["b"], 1),
    "used twice": (lambda p, x, r: jnp.stack([x @ p["w"], x @ p["w"] + p["b"]]), 1),
    "subtracted": (lambda p, x, r: x @ p["w"] - r, 0),
    "a vector": (lambda p, x, r: x[0, 0] @ p["w"] + p["b"], 1),
    "a scalar": (lambda p, x, r: x @ p["w"] + 1.0, 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.sample(2)
def test_programs_give_what_additions_after_the_matmul_give(name, rule):
    fn, joined = PROGRAMS[name]
    run, stored = quantized(fn, RULES[rule], X, R)
    # The matmul alone, then the program's additions in NumPy, each rounded to float32.
    alone, weights = quantized(lambda p, x: x @ p["w"], RULES[rule], X, params={"w": PARAMS["w"]})
    y, b, r = np.asarray(alone(weights, X)), np.asarray(PARAMS["b"]), np.asarray(R)
    wanted = {
        "bias": y + b,
        "bias before": y + b,
        "residual": y + r,
        "both": (y + b) + r,
        "in another order": (y + r) + b,
        "rows in one axis": (y + b) + r,
        "einsum": y + b,
        "used twice": np.stack([y, y + b]),
        "subtracted": y - r,
        "a vector": (y + b)[0, 0],
        "a scalar": y + np.float32(1),
    }[name]
    # One row alone may be rounded to more bits than many.
    near = 1e-4 * np.abs(wanted).max() if name == "a vector" and rule != "w8a8" else 0
    np.testing.assert_allclose(run(stored, X, R), wanted, rtol=0, atol=near)
    found = told(run.lower(stored, X, R).compile())
    assert sum("bias" in call or "residual" in call for call in found) == joined


CUTS = {
    "relu": lambda y: jax.nn.relu(y),
    "relu6": lambda y: jax.nn.relu6(y),
    "clip": lambda y: jnp.clip(y, -1, 0.5),
    "maximum": lambda y: jnp.maximum(y, 0),
    "clamp": lambda y: lax.clamp(-0.5, y, 0.5),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CUTS)
@pytest.mark.sample(3)
def test_results_are_cut_by_the_kernel(name, rule):
    cut = CUTS[name]

    def fn(p, x, r, cut=cut):
        return cut(r + (x @ p["w"] + p["b"]))

    run, stored = quantized(fn, RULES[rule], X, R)
    compiled = run.lower(stored, X, R)
    (call,) = told(compiled.compile())
    assert call.endswith(" bias residual clamps")
    assert not re.findall(r"stablehlo\.(maximum|minimum|clamp)", compiled.as_text())
    uncut, _ = quantized(lambda p, x, r: fn(p, x, r, lambda y: y), RULES[rule], X, R)
    wanted = jax.jit(cut)(uncut(stored, X, R))
    np.testing.assert_array_equal(run(stored, X, R), wanted)


@pytest.mark.parametrize("body", ["alone", "in jit", "in scan", "remat"])
@pytest.mark.sample(2)
def test_derivatives_of_results_that_are_cut(body):
    """They are those of the program: what is cut are the quantized results."""
    wrap = jax.checkpoint if body == "remat" else NESTED[body]

    def program(p, x, r):
        y = x @ p["w"] + p["b"]
        return [jax.nn.relu(y + r), jnp.clip(y, -1, 1)]

    def fn(p, x, r):
        one, other = (lambda p, x, r, i=i: program(p, x, r)[i] for i in range(2))
        return wrap(one)(p, x, r) + wrap(other)(p, x, r)

    run, stored = quantized(fn, RULES["w8a8"], X, R)
    plain, _ = quantized(lambda p, x: x @ p["w"] + p["b"], RULES["w8a8"], X)
    y, ct = np.asarray(plain(stored, X)), jnp.asarray(RNG.normal(size=R.shape), jnp.float32)
    dx, dr = jax.jit(jax.grad(lambda x, r: (ct * run(stored, x, r)).sum(), (0, 1)))(X, R)
    of_relu = np.asarray(ct) * (y + np.asarray(R) > 0)
    np.testing.assert_array_equal(dr, of_relu)
    wide = of_relu.astype(np.float64) + np.asarray(ct, np.float64) * (np.abs(y) < 1)
    wanted = wide @ np.asarray(stored["w"].restore(), np.float64).T
    np.testing.assert_allclose(dx, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def in_scan(fn):
    """The function as the body of a loop of one step."""

    def looped(p, *given):
        return lax.scan(lambda y, _: (fn(p, *given), None), jnp.zeros_like(given[-1]), None, 1)[0]

    return looped


ADDITIONS = {
    "bias": lambda p, x, b, r: x @ p["w"] + b,
    "bias before": lambda p, x, b, r: b + x @ p["w"],
    "residual": lambda p, x, b, r: r + x @ p["w"],
    "both": lambda p, x, b, r: r + (x @ p["w"] + b),
    "in another order": lambda p, x, b, r: (x @ p["w"] + r) + b,
}
NESTED = {"alone": lambda fn: fn, "in jit": jax.jit, "in scan": in_scan}


@pytest.mark.parametrize("rows", [(), (5,)], ids=["vector", "matrix"])
@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.sample(2)
def test_maps_over_any_operands(rule, nested, rows):
    """An example may be a vector, and any of what is added may differ from example to example."""
    shapes = (*rows, K), (N,), (*rows, N)
    batches = [jnp.asarray(RNG.normal(size=(3, *shape)), jnp.float32) for shape in shapes]
    maps = [axes for axes in itertools.product((0, None), repeat=3) if axes != (None,) * 3]

    def given(axes):
        return [x if axis == 0 else x[0] for x, axis in zip(batches, axes, strict=True)]

    def program(p, *given):
        return [NESTED[nested](fn)(p, *given) for fn in ADDITIONS.values()]

    plan = PtqProvider(RULES[rule]).plan(program, PARAMS, *(x[0] for x in batches))
    stored = plan.quantize(PARAMS)
    w = np.asarray(stored["w"].restore(), np.float64)
    run = plan.apply(program)
    results = jax.jit(lambda p: [jax.vmap(run, (None, *axes))(p, *given(axes)) for axes in maps])
    for axes, found in zip(maps, results(stored), strict=True):
        x, b, r = (
            np.asarray(batch if axis == 0 else np.broadcast_to(batch[:1], batch.shape), np.float64)
            for batch, axis in zip(batches, axes, strict=True)
        )
        b = b.reshape(3, *(1 for _ in rows), N)
        for name, y in zip(ADDITIONS, found, strict=True):
            wanted = x @ w + ("residual" not in name) * b + ("bias" not in name) * r
            off = np.linalg.norm(y - wanted) / np.linalg.norm(wanted)
            assert off < (0.02 if rule == "w8a8" else 1e-4), (name, axes)


def test_a_result_that_is_used_elsewhere_is_not_computed_twice():
    def fn(p, x):
        y = x @ p["w"]
        return y + p["b"], y

    run, stored = quantized(fn, RULES["w8a8"], X)
    assert told(run.lower(stored, X).compile()) == ["gemm_w8a8"]
    summed, y = run(stored, X)
    np.testing.assert_array_equal(summed, np.asarray(y) + np.asarray(PARAMS["b"]))


def test_layers_in_a_loop_read_their_stack():
    params = {
        "w": jnp.stack([PARAMS["w"][:N] * factor for factor in (0.1, 0.05, 0.1)]),
        "b": jnp.stack([PARAMS["b"] * i for i in range(3)]),
    }
    x = R.reshape(10, N)

    def fn(p, x):
        def step(x, layer):
            return x + jnp.tanh(x) @ layer["w"] + layer["b"], None

        return lax.scan(step, x, p)[0]

    def one_by_one(p, x):
        for i in range(3):
            x = x + jnp.tanh(x) @ p["w"][i] + p["b"][i]
        return x

    run, stored = quantized(fn, RULES["w8a8"], x, params=params)
    text = run.lower(stored, x).compile()
    assert told(text) == ["gemm_w8a8 index residual"]
    expected = one_by_one(jax.tree.map(lambda a: np.asarray(a, np.float64), params), np.asarray(x))
    found = np.asarray(run(stored, x), np.float64)
    assert np.linalg.norm(found - expected) <= 0.05 * np.linalg.norm(expected)


def test_gradients_are_those_of_the_additions():
    def fn(p, x, r):
        return r + (x @ p["w"] + p["b"])

    run, stored = quantized(fn, RULES["w8a8"], X, R)
    ct = jnp.asarray(RNG.normal(size=R.shape), jnp.float32)

    def loss(x, r, b):
        return (ct * run(stored | {"b": b}, x, r)).sum()

    dx, dr, db = jax.jit(jax.grad(loss, (0, 1, 2)))(X, R, PARAMS["b"])
    np.testing.assert_allclose(dr, ct, rtol=1e-6)
    np.testing.assert_allclose(db, np.asarray(ct, np.float64).sum((0, 1)), rtol=1e-5, atol=1e-5)
    full = np.asarray(ct, np.float64) @ np.asarray(PARAMS["w"], np.float64).T
    assert np.linalg.norm(np.asarray(dx) - full) <= 0.02 * np.linalg.norm(full)


@pytest.mark.slow
def test_layers_of_flax():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(4 * N)(x)
            return x + nn.Dense(N)(nn.relu(y))

    model = Block()
    params = model.init(jax.random.key(0), R)
    run, stored = quantized(model.apply, RULES["w8a8"], R, params=params)
    assert sorted(told(run.lower(stored, R).compile())) == [
        "gemm_w8a8 bias clamps",
        "gemm_w8a8 bias residual",
    ]
    expected = np.asarray(model.apply(params, R), np.float64)
    found = np.asarray(run(stored, R), np.float64)
    assert np.linalg.norm(found - expected) <= 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("name", "fn"),
    {
        "scale and bias": lambda p, x: jax.nn.standardize(x) * p["scale"] + p["b"],
        "scale": lambda p, x: p["scale"] * jax.nn.standardize(x),
        "bias": lambda p, x: jax.nn.standardize(x) + p["b"],
        "bias before scale": lambda p, x: (jax.nn.standardize(x) + p["b"]) * p["scale"],
        "another array": lambda p, x: jax.nn.standardize(x) * x + x,
    }.items(),
)
def test_the_scale_and_bias_of_a_norm(name, fn):
    plan = PtqProvider(QuantizationRule(kernel="fused")).plan(fn, PARAMS, R)
    run = jax.jit(plan.apply(fn))
    x = np.asarray(R, np.float64)
    normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    scale, b = (np.asarray(PARAMS[key], np.float64) for key in ("scale", "b"))
    wanted = {
        "scale and bias": normed * scale + b,
        "scale": normed * scale,
        "bias": normed + b,
        "bias before scale": (normed + b) * scale,
        "another array": normed * x + x,
    }[name]
    np.testing.assert_allclose(run(PARAMS, R), wanted, rtol=1e-5, atol=1e-5)
    left = {"bias before scale": ["multiply"], "another array": ["multiply", "add"]}.get(name, [])
    main = run.lower(PARAMS, R).as_text().split("func.func private")[0]
    assert re.findall(r"stablehlo\.(multiply|add) ", main) == left
