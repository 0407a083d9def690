"""Train steps of scanned, rematerialized and branching programs, statistics included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_odml as odml
from jaxtap_testkit.odml_exports import normal
from jaxtap_testkit.xla_samples import dense

RULES = {
    each: [odml.OdmlRule(weight_qtype="int8", output_qtype="int8", static_range=each)]
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


def close(actual, expected, tolerance=1e-4, what=""):
    def same(a, b):
        np.testing.assert_allclose(a, b, tolerance, tolerance, err_msg=what)

    jax.tree.map(same, actual, expected)


slopes_of = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)


CASES = [*((name, "step") for name in PROGRAMS), ("both", "joined"), ("scan of vmap", "joined")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "ranges"), CASES)
def test_a_train_step_with_remat(name, ranges):
    """It has the values of the forward pass, and the slopes of the program without remat."""
    plain, stats, _ = quantized(name, lambda part: part, RULES[ranges])
    loss, _, tapped = quantized(name, jax.checkpoint, RULES[ranges])

    @jax.jit  # all of it is one program: to compile each part costs more
    def step(state):
        expected = slopes_of(plain)(PARAMS, X, state)
        along = jax.tree.map(jnp.ones_like, (PARAMS, X))
        slope = jax.jvp(lambda *args: plain(*args, state)[0], (PARAMS, X), along)[1]
        found, pull = jax.vjp(loss, PARAMS, X, state)
        by_pull = pull((jnp.ones(()), jnp.zeros_like(state)))[:2]
        kept = stats.with_state(state)
        in_place = jax.jit(lambda p, x: jnp.sum(jnp.sin(tapped(p, x, quant_stats=kept))))
        slopes = jax.grad(in_place, (0, 1))(PARAMS, X)
        with_remat = {
            "jit of grad": slopes_of(loss)(PARAMS, X, state),
            "grad of jit": slopes_of(jax.jit(loss))(PARAMS, X, state),
            "vjp": (found, by_pull),
            "in place": ((expected[0][0], kept.state), slopes),
        }
        return plain(PARAMS, X, state), expected, slope, with_remat

    state = stats.state
    for _ in range(2):  # with statistics of nothing, and of one batch
        forward, expected, slope, with_remat = step(state)
        state = forward[1]
        assert (state[:, 2] > 0).any()
        close(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(expected[1])), slope, 1e-3)
        close(expected[0], forward)
        for what, found in with_remat.items():
            close(found, (forward, expected[1]), what=what)


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


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("activation", "ranges"), [("custom_vjp", "step"), ("custom_jvp", "step"), ("relu", "joined")]
)
def test_a_train_step_with_custom_rules(activation, ranges):
    """Sites in a function with rules have the ranges, and the values, of the forward pass."""

    def layer(x, w):
        return ACTIVATIONS[activation](x @ w)

    def mapped(x, w, part=lambda f: f):
        return jax.vmap(part(layer), (0, None))(x, w)

    parts = {
        "plain": layer,
        "remat": jax.checkpoint(layer),
        "remat of vmap": jax.checkpoint(mapped),
        "vmap of remat": lambda x, w: mapped(x, w, jax.checkpoint),
    }
    losses, states = {}, {}
    for name, part in parts.items():

        def model(params, x, part=part):
            x = lax.scan(lambda x, w: (part(x, w), None), x @ params["w"], params["steps"])[0]
            return x @ params["w"]

        tapped = odml.qat(model, RULES[ranges], average=odml.MovingAverage(0.9))
        stats = tapped.init(PARAMS, X)

        def loss(params, x, state, tapped=tapped, stats=stats):
            out, state = tapped.with_state(stats, state, params, x)
            return jnp.sum(jnp.sin(out)), state

        losses[name], states[name] = loss, stats.state
    tapped.calibrate(PARAMS, [(X,)])

    @jax.jit  # all parts are one program: to compile each costs more
    def step(params, x, states):
        forward, found = {}, {}
        for name, loss in losses.items():
            forward[name] = loss(params, x, states[name])
            found[name] = slopes_of(loss)(params, x, states[name])
            found[f"{name}, jitted inside"] = slopes_of(jax.jit(loss))(params, x, states[name])
        return forward, found

    forward, found = step(PARAMS, X, states)
    found["vmap of remat, without jit"] = slopes_of(loss)(PARAMS, X, states[name])
    for what, ((value, new), slopes) in found.items():
        close((value, new), forward[what.partition(",")[0]], what=what)
        assert (new[:, 2] == 1).all()
        close(slopes, found["plain"][1], what=what)


def test_a_branch_in_a_loop_that_is_differentiated():
    """It has the ranges, values and slopes of the program without loop and branch."""
    rules = [odml.OdmlRule(weight_qtype="int8", output_qtype="int8")]
    params = {"a": normal(8, 8) / 3, "b": normal(8, 8, seed=1) / 3}

    def layers(params, x):
        def body(h, i):
            a, b = (lambda h, w=params[name]: jnp.tanh(h @ w) for name in "ab")
            return lax.cond(i % 2 == 0, a, b, h), None

        return lax.scan(body, x, jnp.arange(4))[0]

    def unrolled(params, x):
        for name in "abab":
            x = jnp.tanh(x @ params[name])
        return x

    found = []
    for fn in (layers, unrolled):
        tapped = odml.qat(fn, rules)
        stats = tapped.calibrate(params, [(X,), (1.1 * X,)])

        def loss(params, state, tapped=tapped, stats=stats):
            out, state = tapped.with_state(stats, state, params, X)
            return jnp.sum(jnp.sin(out)), state

        found.append((stats, *jax.jit(jax.value_and_grad(loss, has_aux=True))(params, stats.state)))
    (stats, (value, state), slopes), (plain, (expected, _), expected_slopes) = found
    # The first operand and the result of each matmul; tanh has a range that is fixed.
    for i, branch in enumerate((1, 0, 1, 0)):
        for side, name in (("#0", f"dot_general:{i - 1}" if i else "args[1]"), ("", None)):
            row = stats[f"cond(<lambda>)/dot_general:{branch}{side}"].row[i]
            if side and i:
                continue  # there it is that of tanh in this program, which has no row in the other
            close(row, plain[name or f"dot_general:{i}"].row)
    assert (state[:, 2] <= 3).all()
    assert (state[:, 2] == 3).sum() == (stats.state[:, 2] == 2).sum()
    close(value, expected, 0.05)
    for name in params:
        error = np.linalg.norm(slopes[name] - expected_slopes[name])
        assert error < 0.1 * np.linalg.norm(expected_slopes[name])


def test_what_a_rule_does_to_tangents_has_no_range():
    """Not even under the ids of what follows the call in the program."""

    def model(by, params, x):
        y = by(x, params["w"])
        return by(y, params["w"]) + y @ params["w"]

    rules = [odml.OdmlRule(weight_qtype="int8", output_qtype="int8")]
    found = []
    for by in (dense, lambda x, w: jnp.tanh(x @ w)):
        tapped = odml.qat(functools.partial(model, by), rules)
        stats = tapped.calibrate(PARAMS, [(X,)])

        def loss(params, state, tapped=tapped, stats=stats):
            out, state = tapped.with_state(stats, state, params, X)
            return jnp.sum(jnp.sin(out)), state

        step = jax.value_and_grad(loss, has_aux=True)
        found.append((jax.jit(step)(PARAMS, stats.state), loss(PARAMS, stats.state)))
    ((value, state), slopes), forward = found[0]
    # Forward both programs are the same one, and the rule's slope is nearly that of rounding.
    close((value, state), forward)
    close((value, state), found[1][0][0])
    expected = found[1][0][1]["w"]
    assert np.linalg.norm(slopes["w"] - expected) < 0.1 * np.linalg.norm(expected)
