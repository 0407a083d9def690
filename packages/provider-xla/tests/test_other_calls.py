"""A derived weight is stored for the call that was planned; another call gets its own values."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from provider_xla import (
    PtqProvider,
    QuantizationError,
    QuantizationRule,
    QuantizationWarning,
    load,
    save,
)
from provider_xla.features import Rules, replanned, tried

RULES = {
    "weights": QuantizationRule(weight_qtype="int8"),
    "both": QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    "int4": QuantizationRule(weight_qtype="int4", tile_size=4),
}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {"w": draw(8, 8), "b": draw(8, 8, seed=1), "mix": draw(12, 12, seed=2)}
STEPS = {"w": draw(2, 8, 8, seed=3) / 4}
X = draw(4, 8, seed=4)
KEY, RAW = jax.random.key(1), jax.random.PRNGKey(2)


def sequence(length):
    return draw(2, length, 3, seed=length)


def causal(p, x):
    n = x.shape[1]
    return jnp.einsum("ts,bsd->btd", p["mix"][:n, :n] * jnp.tri(n), x)


def causal_in_a_loop(p, x):
    n = x.shape[1]
    w = p["mix"][:n, :n] * np.tri(n, dtype=np.float32)
    return lax.fori_loop(0, 2, lambda i, x: jnp.einsum("ts,bsd->btd", w, x), x)


def scaled_steps(p, x, scale):
    return lax.scan(lambda c, w: (jnp.tanh(c @ (w * scale)), None), x, p["w"])[0]


def scaled_in_a_branch(p, x, scale):
    return lax.cond(x[0, 0] > 0, lambda: x @ (p["w"] * scale), lambda: x @ p["b"])


def noise(key):
    return 0.1 * jax.random.normal(key, (8, 8))


# A program, its parameters, the planned call, and another one.
CALLS = {
    "a shorter sequence": (causal, PARAMS, (sequence(12),), (sequence(5),)),
    "a longer sequence": (causal, PARAMS, (sequence(5),), (sequence(12),)),
    "a length in a loop": (causal_in_a_loop, PARAMS, (sequence(12),), (sequence(7),)),
    "a number": (lambda p, x, s: x @ (p["w"] * s), PARAMS, (X, 2.0), (X, 3.0)),
    "a number, and vmap": (
        lambda p, x, s: jax.vmap(lambda row: row @ (p["w"] * s))(x),
        PARAMS,
        (X, 2.0),
        (X, 3.0),
    ),
    "a number, and steps": (scaled_steps, STEPS, (X, 0.2), (X, 0.5)),
    "a number, and a branch": (scaled_in_a_branch, PARAMS, (X, 2.0), (X, 3.0)),
    "a number, and remat": (
        lambda p, x, s: jax.checkpoint(lambda w, x: x @ (w * s))(p["w"], x),
        PARAMS,
        (X, 2.0),
        (X, 3.0),
    ),
    "a flag": (
        lambda p, x, sums: x @ (p["w"] + p["b"] if sums else p["w"]),
        PARAMS,
        (X, True),
        (X, False),
    ),
    "a name": (
        lambda p, x, name: x @ getattr(jnp, name)(p["w"]),
        PARAMS,
        (X, "tanh"),
        (X, "sin"),
    ),
    "a seed": (
        lambda p, x, seed: x @ (p["w"] + noise(jax.random.key(seed))),
        PARAMS,
        (X, 1),
        (X, 2),
    ),
}


def error(found, expected):
    return np.linalg.norm(np.asarray(found) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("name", "rule"),
    [*zip(CALLS, itertools.cycle(RULES), strict=False)],  # each rule in turn
)
@pytest.mark.sample(1)
def test_right(name, rule):
    fn, params, planned, other = CALLS[name]
    plan = PtqProvider([RULES[rule]], strict=True).plan(fn, params, *planned)
    assert plan.derived
    stored = plan.quantize(params)
    if rule != "int4":  # of which an array has one byte for each number
        assert sum(x.nbytes for x in jax.tree.leaves(stored)) == plan.bytes_after
    run = plan.apply(fn)
    static = [i for i, x in enumerate(other, 1) if isinstance(x, bool | int | str)]
    for args in (planned, other):
        expected = np.asarray(fn(jax.tree.map(jnp.asarray, params), *args))
        for call in (run, jax.jit(run, static_argnums=static)):
            assert error(call(stored, *args), expected) < (0.25 if rule == "int4" else 0.02)


# Nothing but their sum is stored of these, so that another value is an error.
LACKING = {
    "another value": (
        lambda p, x: x @ (p["w"] + p["b"] if len(x) == 4 else p["w"] - p["b"]),
        r"matmul:0 must use a weight that the plan stores, add\(args\[0\]\['w'\], "
        r"args\[0\]\['b'\]\) of shape \(8, 8\), got sub\(args\[0\]\['w'\], args\[0\]\['b'\]\) of "
        r"shape \(8, 8\)\. Of args\[0\]\['b'\] and args\[0\]\['w'\] itself nothing is stored",
    ),
    "a parameter": (
        lambda p, x: x @ (p["w"] + p["b"] if len(x) == 4 else p["w"]),
        r"matmul:0 must use .*got args\[0\]\['w'\] of shape",
    ),
    "another number": (
        lambda p, x: x @ ((p["w"] + p["b"]) / np.sqrt(len(x))),
        r"got div\(add\(.*\), 2\.2360",
    ),
    "no matmul": (
        lambda p, x: x @ (p["w"] + p["b"]) + (0 if len(x) == 4 else p["w"][0]),
        r"add:0 must use|add must use",
    ),
    "a loop": (
        lambda p, x: lax.fori_loop(
            0, 2, lambda i, c: c @ (p["w"] + p["b"] * (1 if len(x) == 4 else 2)), x
        ),
        r"fori_loop\(<lambda>\)/matmul:0 must use .*, got add\(.*2\.0",
    ),
    "vmap": (
        lambda p, x: jax.vmap(
            lambda row: row @ (p["w"] + p["b"] if len(x) == 4 else p["w"] * p["b"])
        )(x),
        r"matmul:0 must use .*got mul",
    ),
    "a result": (
        lambda p, x: (x @ (p["w"] + p["b"]), 0 if len(x) == 4 else p["w"]),
        r"The program must use .*got args\[0\]\['w'\]",
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LACKING)
def test_an_error(name):
    """What is not stored is never made up, whatever computes with it."""
    fn, message = LACKING[name]
    params = {"w": PARAMS["w"], "b": PARAMS["b"]}
    plan = PtqProvider([RULES["both"]], strict=True).plan(fn, params, X)
    assert plan.absorbed == {"args[0]['w']", "args[0]['b']"}
    run, stored = plan.apply(fn), plan.quantize(params)
    found = jax.tree.leaves(run(stored, X))[0]
    assert error(found, np.asarray(jax.tree.leaves(fn(params, X))[0])) < 0.02
    for call in (run, jax.jit(run)):
        with pytest.raises(QuantizationError, match=message):
            call(stored, draw(5, 8))


@pytest.mark.slow
def test_a_stored_value_in_another_place():
    """What is stored is a value like others: it may also be added, or calibrated with."""

    def fn(p, x):
        w = p["w"] + p["b"]
        return x @ w + (0 if len(x) == 4 else w[0]), 2 * w

    params = {"w": PARAMS["w"], "b": PARAMS["b"]}
    rule = QuantizationRule(
        weight_qtype="int8", act_qtype="int8", act_static_scale=True, act_batch_axes=()
    )
    plan = PtqProvider([rule], strict=True).plan(lambda *args: fn(*args)[0], params, X)
    assert plan.absorbed
    stored, x = plan.quantize(params), draw(5, 8)
    ranges = plan.calibrate(stored, [(x,)])
    np.testing.assert_allclose(
        ranges["matmul:0#lhs"].upper, plan.calibrate(params, [(x,)])["matmul:0#lhs"].upper
    )
    for one, other in zip(jax.jit(plan.apply(fn, ranges))(stored, x), fn(params, x), strict=True):
        assert error(one, np.asarray(other)) < 0.05


KEYS = {
    "a parameter": (lambda p, x: x @ (p["w"] + noise(p["key"])), {"key": KEY}),
    "a raw parameter": (lambda p, x: x @ (p["w"] + noise(p["key"])), {"key": RAW}),
    "closed over": (lambda p, x: x @ (p["w"] + noise(KEY)), {}),
    "raw, closed over": (lambda p, x: x @ (p["w"] + noise(RAW)), {}),
    "a mask": (
        lambda p, x: x @ (p["w"] * jax.random.bernoulli(KEY, 0.5, (8, 8)).astype("float32")),
        {},
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", KEYS)
def test_random_keys(name, tmp_path):
    fn, more = KEYS[name]
    params = {"w": jnp.asarray(PARAMS["w"]), **more}
    plan = PtqProvider([RULES["weights"]], strict=True).plan(fn, params, X)
    assert plan.derived
    stored = plan.quantize(params)
    save(tmp_path / "stored.safetensors", stored, plan)
    for one in (stored, load(tmp_path / "stored.safetensors", plan=plan)):
        assert error(jax.jit(plan.apply(fn))(one, X), np.asarray(fn(params, X))) < 0.02


def test_float_parameters_are_told_once():
    fn = lambda p, x: x @ p["w"]  # noqa: E731
    plan = PtqProvider([RULES["both"]]).plan(fn, PARAMS, X)
    run = plan.apply(fn)
    run(plan.quantize(PARAMS), X)
    with pytest.warns(QuantizationWarning, match=r"must be what plan.quantize\(params\) returns"):
        run(PARAMS, X)
    run(PARAMS, X)


def test_keys_tell_constants_apart():
    """Another closed-over array of the same type is another value, also inside of a call."""

    def fn(p, x, table):
        shifted = jax.jit(lambda w: jax.checkpoint(lambda w: w + table)(w))
        return x @ shifted(p)

    tables = [draw(8, 8, seed=seed) for seed in (5, 6)]
    keys = set()
    for table in tables:
        plan = PtqProvider([RULES["weights"]]).plan(
            lambda p, x, t=table: fn(p, x, t), PARAMS["w"], X
        )
        keys |= plan.derived.keys()
    assert len(keys) == 2


def test_a_weight_of_another_parameter_is_quantized_at_the_call():
    def fn(p, x, name):
        return x @ (p[name][:8, :8] * 2.0)

    plan = PtqProvider(RULES["weights"]).plan(fn, PARAMS, X, "w")
    y = plan.apply(fn)(plan.quantize(PARAMS), X, "mix")
    w = 2 * np.asarray(PARAMS["mix"], np.float64)[:8, :8]
    scale = np.abs(w).max(0) / 127
    expected = np.asarray(X, np.float64) @ (np.round(w / scale) * scale)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_a_plan_by_other_rules_keeps_arguments_by_name():
    def fn(params, x, *, scale, mixes=False):
        return x @ params["w"] * scale @ (params["mix"] if mixes else params["b"])

    params = {**PARAMS, "mix": draw(8, 8, seed=2)}
    plan = PtqProvider(RULES["weights"]).plan(fn, params, X, scale=np.ones(8), mixes=True)
    rules = Rules((RULES["int4"],), plan.rules.params)
    again = replanned(plan, rules, params, (X,))
    assert plan.weights.keys() == again.weights.keys() == {"args[0]['w']", "args[0]['mix']"}
    assert {weight.qtype for weight in again.weights.values()} == {"int4"}
    assert tried(plan, rules, params, (X,)).keys() == again.weights.keys()
