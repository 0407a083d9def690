"""Train steps of scanned, rematerialized and branching programs, statistics included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_odml as odml
from jaxtap_testkit.odml_exports import normal

RULES = {
    each: [odml.OdmlRule(weight_qtype="int8", act_qtype="int8", static_range=each)]
    for each in ("step", "joined")
}
PARAMS, X = {"w": normal(8, 8), "steps": normal(3, 8, 8, seed=1) / 3}, normal(4, 8, seed=2)


def layer(x, w):
    return jax.nn.relu(x @ w)


def twice(part):
    return lambda x, w: lax.scan(lambda x, _: (part(x, w), None), x, None, length=2)[0]


def rows(part):
    return lambda x, w: jax.vmap(lambda row: part(row, w))(x)


def scan(part):
    return lambda x, ws: lax.scan(lambda x, w: (part(x, w), None), x, ws)[0]


def branch(part):
    return lambda x, ws: lax.cond(jnp.sum(x) < 1e9, part, lambda x, ws: x + ws[0, 0], x, ws)


PROGRAMS = {
    "scan": lambda part: scan(part(layer)),
    "scan of jit": lambda part: scan(jax.jit(part(layer))),
    "scan of scan": lambda part: scan(part(twice(layer))),
    "of the inner scan": lambda part: scan(twice(part(layer))),
    "around scan": lambda part: part(scan(layer)),
    "both": lambda part: part(scan(part(layer))),
    "scan of vmap": lambda part: scan(part(rows(layer))),
    "scan in cond": lambda part: branch(scan(part(layer))),
}


def quantized(name, part, rules):
    """Return a loss of a program, with its statistics as the last argument, and those."""

    def model(params, x):
        x = PROGRAMS[name](part)(jnp.tanh(x @ params["w"]), params["steps"])
        return x @ params["w"]

    tapped = odml.qat(model, rules, engine="trace", average=odml.MovingAverage(0.9))
    stats = tapped.init(PARAMS, X)

    def loss(params, x, state):
        out, state = tapped.with_state(stats, state, params, x)
        return jnp.sum(jnp.sin(out)), state

    return loss, stats, tapped


def close(actual, expected, tolerance=1e-4):
    same = lambda a, b: np.testing.assert_allclose(a, b, tolerance, tolerance)  # noqa: E731
    jax.tree.map(same, actual, expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranges", RULES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_train_step_with_remat(name, ranges):
    """It has the values of the forward pass, and the slopes of the program without remat."""
    plain, stats, _ = quantized(name, lambda part: part, RULES[ranges])
    loss, _, tapped = quantized(name, jax.checkpoint, RULES[ranges])
    state = stats.state
    for _ in range(2):  # with statistics of nothing, and of one batch
        value, new = jax.jit(plain)(PARAMS, X, state)
        assert (new[:, 2] > 0).any()
        expected = jax.jit(jax.grad(plain, (0, 1), has_aux=True))(PARAMS, X, state)[0]
        along = jax.tree.map(jnp.ones_like, (PARAMS, X))
        slope = jax.jvp(lambda *args, s=state: plain(*args, s)[0], (PARAMS, X), along)[1]
        close(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(expected)), slope, 1e-3)

        found, slopes = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(PARAMS, X, state)
        close((found, slopes), ((value, new), expected))
        found, slopes = jax.value_and_grad(jax.jit(loss), (0, 1), has_aux=True)(PARAMS, X, state)
        close((found, slopes), ((value, new), expected))
        found, pull = jax.vjp(loss, PARAMS, X, state)
        ones = jnp.ones(()), jnp.zeros_like(state)
        close((found, pull(ones)[:2]), ((value, new), expected))

        kept = stats.with_state(state)
        in_place = lambda p, x, kept=kept: jnp.sum(jnp.sin(tapped(p, x, quant_stats=kept)))  # noqa: E731
        slopes = jax.grad(jax.jit(in_place), (0, 1))(PARAMS, X)
        close((slopes, kept.state), (expected, new))
        state = new


@jax.custom_jvp
def by_jvp(x):
    return jnp.tanh(x * 1.5)


by_jvp.defjvp(
    lambda primals, tangents: (by_jvp(*primals), tangents[0] * jnp.cos(primals[0])),
)


@jax.custom_vjp
def by_vjp(x):
    return jnp.tanh(x * 1.5)


by_vjp.defvjp(lambda x: (jnp.tanh(x * 1.5), x), lambda x, ct: (ct * jnp.cos(x),))
ACTIVATIONS = {"relu": jax.nn.relu, "custom_jvp": by_jvp, "custom_vjp": by_vjp}


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranges", RULES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_train_step_with_custom_rules(activation, ranges):
    """Sites in a function with rules have the ranges, and the values, of the forward pass."""

    def layer(x, w):
        return ACTIVATIONS[activation](x @ w)

    def mapped(x, w, part=lambda f: f):
        return jax.vmap(part(layer), (0, None))(x, w)

    parts = [
        layer,
        jax.checkpoint(layer),
        jax.checkpoint(mapped),
        lambda x, w: mapped(x, w, jax.checkpoint),
    ]
    all_slopes = []
    for part in parts:

        def model(params, x, part=part):
            x = lax.scan(lambda x, w: (part(x, w), None), x @ params["w"], params["steps"])[0]
            return x @ params["w"]

        tapped = odml.qat(model, RULES[ranges], average=odml.MovingAverage(0.9))
        stats = tapped.init(PARAMS, X)

        def loss(params, x, state, tapped=tapped, stats=stats):
            out, state = tapped.with_state(stats, state, params, x)
            return jnp.sum(jnp.sin(out)), state

        value, new = jax.jit(loss)(PARAMS, X, stats.state)
        assert (new[:, 2] == 1).all()
        slope = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
        for step in (slope(loss), jax.jit(slope(loss)), slope(jax.jit(loss))):
            found, slopes = step(PARAMS, X, stats.state)
            close(found, (value, new))
            all_slopes.append(slopes)
        tapped.calibrate(PARAMS, [(X,)])
    for slopes in all_slopes:
        close(slopes, all_slopes[0])
