"""Weights that a program chooses among several: all are stored, or a problem says why not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtap_testkit.meshes import line
from provider_xla import PtqProvider, QuantizationError, QuantizationRule, QuantizationWarning

W8 = QuantizationRule(weight_qtype="int8")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


PARAMS = {
    "live": normal(0, 16, 8),
    "ema": normal(1, 16, 8),
    "turned": normal(2, 8, 16),
    "experts": normal(3, 3, 16, 8),
}
X = normal(4, 4, 16)

# The program, which takes a flag and an index, and the parameters that it chooses among.
STORED = {
    "where": (lambda p, x, c, i: x @ jnp.where(c, p["live"], p["ema"]), "live ema"),
    "of a transpose": (
        lambda p, x, c, i: x @ jnp.where(c, p["live"], p["turned"].T),
        "live turned",
    ),
    "of slices": (lambda p, x, c, i: x @ jnp.where(c, p["experts"][0], p["experts"][2]), "experts"),
    "by column": (
        lambda p, x, c, i: x @ jnp.where(jnp.arange(8) < i, p["live"], p["ema"]),
        "live ema",
    ),
    "select_n": (
        lambda p, x, c, i: x @ lax.select_n(i, p["live"], p["ema"], p["experts"][1]),
        "live ema experts",
    ),
    "zeros": (lambda p, x, c, i: x @ jnp.where(c, p["live"], 0), "live"),
    "cond": (
        lambda p, x, c, i: x @ lax.cond(c, lambda: p["ema"], lambda: p["live"]),
        "live ema",
    ),
    "cond of views": (
        lambda p, x, c, i: x @ lax.cond(c, lambda: p["experts"][i], lambda: p["turned"].T),
        "experts turned",
    ),
    "switch": (
        lambda p, x, c, i: (
            x @ lax.switch(i, [lambda: p["live"], lambda: p["ema"], lambda: p["experts"][0]])
        ),
        "live ema experts",
    ),
    "cond in jit": (
        lambda p, x, c, i: (
            x @ jax.jit(lambda a, b: lax.cond(c, lambda: a, lambda: b))(p["live"], p["ema"])
        ),
        "live ema",
    ),
    "cond in scan": (
        lambda p, x, c, i: lax.scan(
            lambda h, w: (h + x @ lax.cond(c, lambda: w, lambda: p["live"]), None),
            jnp.zeros((4, 8)),
            p["experts"],
        )[0],
        "experts live",
    ),
    "vmapped flags": (
        lambda p, x, c, i: jax.vmap(lambda c: x @ jnp.where(c, p["live"], p["ema"]))(
            jnp.stack([c, ~c])
        ),
        "live ema",
    ),
    "switch over slices": (
        lambda p, x, c, i: lax.switch(i, [lambda h, w=p["experts"][k]: h @ w for k in range(3)], x),
        "experts",
    ),
    "switch over unstack": (
        lambda p, x, c, i: lax.switch(
            i, [lambda h, w=w: h @ w for w in jnp.unstack(p["experts"])], x
        ),
        "experts",
    ),
}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.slow
def test_alternatives_are_stored(name):
    fn, names = STORED[name]
    plan = PtqProvider(W8, strict=True).plan(fn, PARAMS, X, jnp.array(True), jnp.array(1))
    paths = {f"args[0]['{name}']" for name in names.split()}
    assert set(plan.weights) == paths
    for weight in plan.weights.values():  # one scale for each column, and each expert
        shape = weight.shape
        count = int(np.prod(weight.granularity.scale_shape(shape)))
        assert count == 8 * (3 if len(shape) == 3 else 1)
    assert paths.isdisjoint(path for path, *_ in plan.floats)
    tapped, stored = jax.jit(plan.apply(fn)), plan.quantize(PARAMS)
    for flag in (True, False):
        for index in (0, 2):
            args = X, jnp.array(flag), jnp.array(index)
            wanted = fn(PARAMS, *args)
            error = jnp.abs(tapped(stored, *args) - wanted).max()
            assert error <= 0.02 * jnp.abs(wanted).max()


@pytest.mark.slow
@pytest.mark.parametrize("planned", [True, False])
def test_a_python_flag_chooses(planned):
    fn, names = STORED["where"]
    plan = PtqProvider(W8, strict=True).plan(fn, PARAMS, X, planned, 1)
    assert len(plan.weights) == len(names.split())
    for flag in (True, False, np.bool_(True), np.bool_(False)):
        wanted = fn(PARAMS, X, flag, 1)
        found = plan.apply(fn)(plan.quantize(PARAMS), X, flag, 1)
        assert jnp.abs(found - wanted).max() <= 0.02 * jnp.abs(wanted).max()


def gathered(p, x, c, i):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(a, b):
        whole = [lax.all_gather(w, "d", tiled=True) for w in (a, b)]
        return x @ jnp.where(c, *whole)

    specs = {"in_specs": (P("d"), P("d")), "out_specs": P(), "check_vma": False}
    return jax.shard_map(body, mesh=mesh, **specs)(p["live"], p["ema"])


SAID = {
    "by row": lambda p, x, c, i: x @ jnp.where((jnp.arange(16) < i)[:, None], p["live"], p["ema"]),
    "ones": lambda p, x, c, i: x @ jnp.where(c, p["live"], 1.0),
    "computed": lambda p, x, c, i: x @ lax.cond(c, lambda: p["live"] * 2, lambda: p["ema"]),
    "swapped": lambda p, x, c, i: (
        x @ lax.fori_loop(0, i, lambda _, w: w[::-1], (p["live"], p["ema"]))[0]
    ),
    "carried": lambda p, x, c, i: lax.scan(
        lambda w, _: (w[::-1], x @ w[0]), (p["live"], p["ema"]), length=2
    )[1],
    "rolled": lambda p, x, c, i: lax.scan(
        lambda w, _: (jnp.roll(w, 1, 0), x @ w), p["live"], length=2
    )[1],
    "decaying": lambda p, x, c, i: lax.scan(lambda w, _: (w / 2, x @ w), p["live"], length=2)[1],
    "written": lambda p, x, c, i: x @ lax.dynamic_update_slice(p["live"], p["ema"][:2], (i, 0)),
    "all_gather": gathered,
    "a factor": lambda p, x, c, i: x @ (p["live"] * jnp.where(c, 1.0, 2.0)),
    "a key": lambda p, x, c, i: (
        x @ (p["live"] * jax.random.bernoulli(jax.random.key(i), 0.5, (16, 8)).astype(x.dtype))
    ),
    "a prefix": lambda p, x, c, i: x @ jnp.concatenate([p["live"][:8], x.T[8:] @ x[:, :8]]),
}


@pytest.mark.parametrize("name", SAID)
@pytest.mark.sample(3)
def test_what_no_form_can_follow_is_a_problem(name):
    args = PARAMS, X, jnp.array(True), jnp.array(1)
    with pytest.warns(QuantizationWarning):
        plan = PtqProvider(W8).plan(SAID[name], *args)
    assert not plan.weights
    (problem,) = (text for text in plan.problems if "matmul:" in text)
    assert "args[0]['live']" in problem
    reasons = {path: why for path, _, why in plan.floats}
    assert "matmul:" in reasons["args[0]['live']"]
    with pytest.raises(QuantizationError, match="matmul:"):
        PtqProvider(W8, strict=True).plan(SAID[name], *args)
    np.testing.assert_allclose(
        jax.jit(plan.apply(SAID[name]))(*args), SAID[name](*args), rtol=0.05, atol=0.5
    )


def test_what_a_step_computes_is_no_choice():
    """A state that starts as a parameter is an activation."""

    def fn(p, x):
        return lax.scan(
            lambda h, _: (jnp.tanh(h @ p["live"]) @ p["turned"], None), p["start"], length=2
        )

    params = {**PARAMS, "start": X}
    plan = PtqProvider(W8, strict=True).plan(fn, params, X)
    assert set(plan.weights) == {"args[0]['live']", "args[0]['turned']"}


def test_alternatives_in_several_forms():
    """A branch returns one form: another use of one alternative may forbid it."""

    def fn(p, x, c):
        chosen = lax.cond(c, lambda: p["live"], lambda: p["ema"])
        return x @ chosen, x[:, :8] @ p["live"].T

    with pytest.warns(QuantizationWarning, match="stored in several forms"):
        plan = PtqProvider(W8).plan(fn, PARAMS, X, jnp.array(True))
    for flag in (True, False):
        args = X, jnp.array(flag)
        found = jax.jit(plan.apply(fn))(plan.quantize(PARAMS), *args)
        for one, wanted in zip(found, fn(PARAMS, *args), strict=True):
            np.testing.assert_allclose(one, wanted, rtol=0.1, atol=0.2)


@pytest.mark.slow
def test_lookups_in_a_chosen_table():
    rules = [QuantizationRule(op_names=["take"], weight_qtype="int8")]
    ids = jnp.array([3, 0, 9])

    def fn(p, c, i):
        return jnp.where(c, p["live"], p["ema"])[ids], p["experts"][i][ids]

    plan = PtqProvider(rules, strict=True).plan(fn, PARAMS, jnp.array(True), jnp.array(1))
    assert set(plan.weights) == {f"args[0]['{name}']" for name in ("live", "ema", "experts")}
    args = jnp.array(False), jnp.array(2)
    found = jax.jit(plan.apply(fn))(plan.quantize(PARAMS), *args)
    for one, wanted in zip(found, fn(PARAMS, *args), strict=True):
        np.testing.assert_allclose(one, wanted, atol=0.03)


def dropped(key, p):
    return jax.random.bernoulli(key, 0.5, p.shape).astype(p.dtype)


def noise(key, p):
    return 0.1 * jax.random.normal(key, p.shape)


# What a program computes with a square parameter p, an activation of its shape and a random key.
JOINED = {
    "dropout": lambda p, x, key: x @ (p * dropped(key, p)),
    "noise": lambda p, x, key: x @ (p + noise(key, p)),
    "factors of noise": lambda p, x, key: x @ (p * (1 + noise(key, p))),
    "in a jitted function": lambda p, x, key: jax.jit(lambda p: x @ (p + noise(key, p)))(p),
    "drawn bound": lambda p, x, key: x @ jnp.clip(p, -1, jax.random.uniform(key)),
    "merged": lambda p, x, key: (
        x @ (jnp.stack([p, p.T]) * jax.random.uniform(key, (2, 1, 1))).sum(0)
    ),
    "style": lambda p, x, key: x @ (p * x[0][:, None]),
    "temperature": lambda p, x, key: x @ (p * x[0, 0]),
    "normalized": lambda p, x, key: x @ (p / jnp.linalg.norm(x)),
    "mixture": lambda p, x, key: x @ (x[0, 0] * p + (1 - x[0, 0]) * p.T),
    "clipped": lambda p, x, key: x @ jnp.clip(p, -x[0, 0], x[0, 0]),
    "bounded": lambda p, x, key: x @ jnp.maximum(p, x[:1]),
    "chosen": lambda p, x, key: x @ lax.cond(x[0, 0] > 0, lambda: p, lambda: x * x),
    "prefix": lambda p, x, key: x @ jnp.concatenate([p, x]).T,
    "prefix and a state": lambda p, x, key: x @ jnp.concatenate([p, p.at[key.ndim].set(x[0])]).T,
    "a state and a prefix": lambda p, x, key: x @ jnp.concatenate([p.at[key.ndim].set(x[0]), p]).T,
}
STATES = {
    "rows": lambda p, x, key: x @ p.at[key.ndim].set(x[0]),
    "cache": lambda p, x, key: x @ lax.dynamic_update_slice(p, x[:1], (key.ndim, 0)).T,
}
GAINS = {
    "gain": lambda p, x, key: x @ (x * p),
    "gain of a product": lambda p, x, key: x @ (x.T @ x * p),
    "bias": lambda p, x, key: x @ (x + p),
    "bound": lambda p, x, key: x @ jnp.maximum(x, p[:1]),
    "bias of a product": lambda p, x, key: x @ (x.T @ x + p),
    "gain and a row": lambda p, x, key: (x[:1] * p[:1]) @ x,
}


def lookups(p, x, key):
    """Return how alike rows of a table are, which are normalized, and what they find in a loop."""
    i = jax.random.randint(key, (3,), 0, 16)
    rows, others = (jax.nn.standardize(jnp.tanh(p[at])) for at in (i, i[::-1]))

    def step(c, _):
        return jnp.tanh(c @ c.T @ c), None

    return rows @ others.T @ lax.scan(step, rows, length=2)[0]


def decoded(p, x, key):
    """Return what steps find in a state, each of which writes its result into it."""

    def step(c, i):
        state, row = c
        row = jnp.tanh(row @ state @ state.T)
        return (lax.dynamic_update_slice(state, row, (i, 0)), row), None

    return lax.scan(step, (p, x[:1]), jnp.arange(3))[0][1]


def fast(p, x, key):
    """Return what rows find in weights that each of them changes."""
    return lax.scan(lambda w, row: (0.9 * w + jnp.outer(row, row), row @ w), p, x)[1]


GAINS |= {"lookups": lookups}
STATES |= {"decoded": decoded, "fast weights": fast}


@pytest.mark.parametrize("name", [*JOINED, *STATES, *GAINS])
def test_what_is_computed_with_a_parameter(name):
    """A weight with factors or noise can't be stored. States and gains are not weights."""
    fn = {**JOINED, **STATES, **GAINS}[name]
    p, x, provider = normal(7, 16, 16), normal(8, 16, 16), PtqProvider(W8)
    if name in JOINED:
        with pytest.warns(
            QuantizationWarning, match="multiplies or joins it with what it computes"
        ):
            plan = provider.plan(fn, p, x, jax.random.key(0))
        # Nor is it silent where the activation that it makes is quantized.
        rule = QuantizationRule(weight_qtype="int8", act_qtype="int8")
        with pytest.raises(QuantizationError, match="multiplies or joins it with what it computes"):
            PtqProvider(rule, strict=True).plan(fn, p, x, jax.random.key(0))
    else:
        plan = PtqProvider(W8, strict=True).plan(fn, p, x, jax.random.key(0))
    assert not plan.weights
    ((path, _, why),) = plan.floats
    assert path == "args[0]"
    assert ("writes into it at each call" in why) == (name in STATES)
    assert ("no matmul" in why) == (name in GAINS and name != "lookups")


@pytest.mark.parametrize("by", ["input", "weight"])
def test_a_shard_map_that_the_program_differentiates(by):
    """JAX makes its derivative while it traces the function of a device."""
    split = {"in_specs": (P(), P("d")), "out_specs": P("d")}
    product = jax.shard_map(lambda w, x: x @ w, mesh=line(size=2), **split)

    def model(product):
        def loss(w, x):
            return jnp.tanh(product(w, x)).sum()

        return lambda p, x: jax.jit(jax.grad(loss, by == "input"))(p["live"], x)

    with pytest.warns(QuantizationWarning, match=r"put jax\.jit around the shard_map"):
        plan = PtqProvider(W8).plan(model(product), {"live": PARAMS["live"]}, X)
    assert "is known to use it" in plan.floats[0][2]
    plan = PtqProvider(W8, strict=True).plan(model(jax.jit(product)), {"live": PARAMS["live"]}, X)
    assert plan.floats == ()


def test_a_choice_by_a_number_outside_of_jit():
    """A Python number chooses while the program is traced, or is an operand of an eager one."""

    def fn(p, x, live, i):
        return (
            x @ jnp.where(live, p["live"], p["ema"]),
            x @ lax.cond(live, lambda: p["live"], lambda: p["ema"]),
            x @ lax.switch(i, [lambda: p["live"], lambda: p["ema"]]),
            x @ lax.select_n(jnp.asarray(i), p["live"], p["ema"]),
            x @ jnp.where(live, p["live"], 0),
            x @ jnp.pad(p["live"], ((0, 0), (0, 3)))[:, 2:],
            x @ p["experts"][i],
        )

    plan = PtqProvider(W8, strict=True).plan(fn, PARAMS, X, True, 0)
    stored = plan.quantize(PARAMS)
    for live, i in ((False, 1), (True, 0), (np.False_, np.int32(1)), (jnp.array(False), 1)):
        found = plan.apply(fn)(stored, X, live, i)
        for one, wanted in zip(found, fn(PARAMS, X, live, i), strict=True):
            np.testing.assert_allclose(one, wanted, atol=0.1)
