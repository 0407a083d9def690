"""Static ranges in loops: steps of a scan have one each, as if they were written out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hijax_trace as ht
import provider_xla as xla
from jaxtap_testkit.xla_samples import draw

STATIC = xla.QuantizationRule(
    weight_qtype="int8", act_qtype="int8", act_static_scale=True, act_batch_axes=()
)
W, X = draw((4, 8, 8))[0], draw((16, 8), seed=1)[0]


def by_hand(body, c, xs=None, length=None, reverse=False, **options):
    """Compute what ``lax.scan`` does, in steps that are written out."""
    del options
    count = length or len(jax.tree.leaves(xs)[0])
    ys = [None] * count
    for i in range(count)[:: -1 if reverse else 1]:
        c, ys[i] = body(c, jax.tree.map(lambda x, i=i: x[i], xs))
    return c, jax.tree.map(lambda *ys: jnp.stack(ys), *ys)


def fori_by_hand(lower, upper, body, c):
    for i in range(lower, upper):
        c = body(jnp.int32(i), c)
    return c


def layer(c, w):
    return jnp.tanh(c @ w), None


def stack(scan, w, x, part=lambda f: f, **options):
    return scan(part(layer), 10 * x, w, **options)[0]


def nested(scan, w, x, part):
    """Two groups of layers, the second with much smaller values."""
    inner = part(lambda c, w: scan(layer, 20 * c, w)[0])
    body = part(lambda c, w: (inner(c, w) / 16, None))
    return scan(body, x, w.reshape(2, 2, 8, 8))[0]


def branches(scan, w, x):
    def body(c, w_i):
        w, i = w_i
        return lax.cond(i % 2 == 0, lambda: jnp.tanh(c @ w), lambda: 3 * jnp.tanh(c @ w)), None

    return scan(body, 10 * x, (w, jnp.arange(len(w))))[0]


def twice(scan, w, x):
    """One body, called for large values and for small ones."""
    return scan(layer, 10 * x, w)[0] + scan(layer, 0.1 * x, w)[0]


PROGRAMS = {
    "scan": stack,
    "backwards": lambda scan, w, x: stack(scan, w, x, reverse=True),
    "unrolled by two": lambda scan, w, x: stack(scan, w, x, unroll=2),
    "remat in scan": lambda scan, w, x: stack(scan, w, x, jax.checkpoint),
    "jit in scan in jit": lambda scan, w, x: jax.jit(lambda w, x: stack(scan, w, x, jax.jit))(w, x),
    "scan in scan": lambda scan, w, x: nested(scan, w, x, lambda f: f),
    "scan in jit in scan": lambda scan, w, x: nested(scan, w, x, jax.jit),
    "scan in remat in scan": lambda scan, w, x: nested(scan, w, x, jax.checkpoint),
    "scan in vmap": lambda scan, w, x: jax.vmap(lambda row: stack(scan, w, row))(x),
    "vmap in scan": lambda scan, w, x: stack(
        scan, w, x, lambda f: lambda c, w: (jax.vmap(lambda row: f(row, w)[0])(c), None)
    ),
    "cond in scan": branches,
    "two calls of one body": twice,
}


def error(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def inferred(program, rule=STATIC, w=W, x=X):
    plan = xla.PtqProvider([rule], strict=True).plan(program, w, x)
    ranges = plan.calibrate(w, [(x,)])
    return jax.jit(plan.apply(program, ranges))(plan.quantize(w), x), ranges


def trained(program, rule=STATIC, w=W, x=X, updates=True):
    """Return the result, the gradient and the statistics after two steps of training.

    Args:
        program: to be trained.
        rule: of its operations.
        w: its parameters.
        x: its input.
        updates: whether what is differentiated updates the statistics: JAX has no derivative of
            a cond that writes.
    """
    provider = xla.QtProvider([rule], strict=True)
    statistics = provider.init_statistics(program, w, x)
    apply = provider.apply(program, statistics)

    def loss(apply):
        def of(w):
            y = apply(w, x)
            return jnp.sum(y**2), y

        return jax.jit(jax.value_and_grad(of, has_aux=True))

    step = loss(apply)
    update = (lambda: step(w)) if updates else functools.partial(jax.jit(apply), w, x)
    jax.block_until_ready(update())
    if not updates:
        jax.block_until_ready(update())
        step = loss(provider.apply(program, statistics, update=False))
    (_, y), slope = step(w)
    return y, slope, statistics


# Programs that are the same where their steps are written out.
SAME = dict.fromkeys(["unrolled by two", "remat in scan", "jit in scan in jit"], "scan")
SAME |= dict.fromkeys(["scan in jit in scan", "scan in remat in scan"], "scan in scan")


@functools.cache
def written_out(name):
    """Return result and gradient in float, errors of both quantized, and that of inference."""

    def written(w, x):
        return PROGRAMS[name](by_hand, w, x)

    expected = jax.jit(written)(W, X)
    slope = jax.jit(jax.grad(lambda w: jnp.sum(written(w, X) ** 2)))(W)
    y, g, _ = trained(written, updates="cond" not in name)
    own = error(inferred(written)[0], expected)
    return expected, slope, own, error(y, expected), error(g, slope)


# Written out, each step has both branches, of which it takes one.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No (calibration )?batch reached")
@pytest.mark.parametrize("name", PROGRAMS)
def test_errors_are_those_of_steps_written_out(name):
    def rolled(w, x):
        return PROGRAMS[name](lax.scan, w, x)

    expected, slope, own, own_of_value, own_of_gradient = written_out(SAME.get(name, name))
    assert 0 < own < 0.2
    assert error(inferred(rolled)[0], expected) <= 1.5 * own
    y, g, statistics = trained(rolled, updates="cond" not in name)
    assert error(y, expected) <= 1.5 * own_of_value
    assert error(g, slope) <= 1.5 * own_of_gradient
    for one in statistics.values():
        assert int(one.count) == 2
        assert np.isfinite(one.calibration().upper).all()


@pytest.mark.slow
def test_a_fori_loop_of_known_length_has_ranges_by_step():
    def program(fori, w, x):
        return fori(0, 4, lambda i, c: jnp.tanh(c @ w[i]), 10 * x)

    rolled, written = (lambda w, x, f=f: program(f, w, x) for f in (lax.fori_loop, fori_by_hand))
    expected = written(W, X)
    out, ranges = inferred(rolled)
    assert error(out, expected) <= 1.5 * error(inferred(written)[0], expected)
    assert [one.upper.shape for one in ranges.values()] == [(4, 1, 1)]


@pytest.mark.slow
def test_ranges_are_those_of_each_step():
    """Each is the mean over calls of the largest value of that step alone."""
    batches = [draw((16, 8), seed=s)[0] for s in range(3)]

    def program(w, x):
        return stack(lax.scan, w, x)

    seen = []
    for x in batches:
        c, own = 10 * np.asarray(x, np.float64), []
        for w in np.asarray(W, np.float64):
            own.append(np.abs(c).max())
            c = np.tanh(c @ w)
        seen.append(own)
    plan = xla.PtqProvider([STATIC]).plan(program, W, batches[0])
    ((key, found),) = plan.calibrate(W, [(x,) for x in batches]).items()
    assert plan.ranges[key].steps == (4,)
    np.testing.assert_allclose(found.upper[:, 0, 0], np.mean(seen, 0), rtol=1e-5)
    provider = xla.QtProvider([STATIC])
    statistics = provider.init_statistics(program, W, batches[0])
    for x in batches:
        jax.block_until_ready(jax.jit(provider.apply(program, statistics))(W, x))
    np.testing.assert_allclose(
        statistics[key].calibration().upper[:, 0, 0], np.mean(seen, 0), rtol=1e-5
    )
    # The same ranges in inference, and none is changed by it.
    evaluated = jax.jit(provider.apply(program, statistics, update=False))(W, X)
    stored = jax.jit(plan.apply(program, statistics))(plan.quantize(W), X)
    np.testing.assert_allclose(stored, evaluated, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "static_range"),
    [
        ("argument", "step"),
        ("hijax_trace.jit", "joined"),
        ("train steps in a scan", "step"),
        ("train steps in a scan", "joined"),
        ("eager", "step"),
    ],
)
def test_statistics_of_training_wherever_they_come_from(how, static_range):
    """A body that is rematerialized writes to them, and its derivative is taken."""

    def program(w, x):
        return stack(lax.scan, w, x, jax.checkpoint)

    rule = dataclasses.replace(STATIC, static_range=static_range)
    provider = xla.QtProvider([rule])
    statistics = provider.init_statistics(program, W, X)

    def slope(w, x, statistics):
        apply = provider.apply(program, statistics)
        return jax.grad(lambda w: jnp.sum(apply(w, x) ** 2))(w)

    if how == "argument":
        step = jax.jit(slope)
    elif how == "hijax_trace.jit":
        step = ht.jit(slope)
    elif how == "eager":
        step = slope
    else:
        batches = jnp.stack([X, 2 * X])
        found = jax.jit(
            lambda: lax.scan(lambda c, x: (c + slope(W, x, statistics), None), 0 * W, batches)[0]
        )()
        assert np.isfinite(found).all()
    if how != "train steps in a scan":
        for x in (X, 2 * X):
            assert np.isfinite(step(W, x, statistics)).all()
    (one,) = statistics.values()
    assert int(one.count) == 2
    first = one.calibration().upper.ravel()[0]
    np.testing.assert_allclose(first, 15 * np.abs(X).max(), rtol=1e-6)


def test_a_rule_joins_the_steps():
    rule = dataclasses.replace(STATIC, static_range="joined")
    out, ranges = inferred(lambda w, x: stack(lax.scan, w, x), rule)
    (found,) = ranges.values()
    np.testing.assert_allclose(found.upper, [[np.abs(10 * X).max()]], rtol=1e-6)
    assert error(out, stack(by_hand, W, X)) > 0.15


def test_loops_of_many_steps_are_joined_unless_the_rule_says_otherwise():
    def program(w, x):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=129)[0]

    def steps(rule):
        plan = xla.PtqProvider([rule]).plan(program, W[0], X)
        return [one.steps for one in plan.ranges.values()]

    assert steps(STATIC) == [()]
    assert steps(dataclasses.replace(STATIC, static_range="step")) == [(129,)]


@pytest.mark.slow
def test_while_loops_have_joined_ranges():
    def program(w, x):
        def step(state):
            i, c = state
            return i + 1, jnp.tanh(c @ w[i])

        return lax.while_loop(lambda state: state[0] < 4, step, (0, 10 * x))[1]

    out, ranges = inferred(program)
    ((key, found),) = ranges.items()
    assert key.endswith("(step)/matmul:0#lhs")
    np.testing.assert_allclose(found.upper, [[np.abs(10 * X).max()]], rtol=1e-6)
    assert error(out, stack(by_hand, W, X)) < 0.5
    provider = xla.QtProvider([STATIC])
    statistics = provider.init_statistics(program, W, X)
    jax.block_until_ready(jax.jit(provider.apply(program, statistics))(W, X))
    np.testing.assert_allclose(statistics[key].calibration().upper, found.upper, rtol=1e-6)


def test_a_while_loop_in_a_scan_has_a_range_for_each_step_of_the_scan():
    def program(w, x):
        def body(c, w):
            return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)),
                                  (0, c))[1], None  # fmt: skip

        return lax.scan(body, 10 * x, w)[0]

    ((_, found),) = inferred(program)[1].items()
    assert found.upper.shape == (4, 1, 1)
    np.testing.assert_allclose(found.upper[0], [[np.abs(10 * X).max()]], rtol=1e-6)
    assert (np.asarray(found.upper[1:]) <= 1).all()


@pytest.mark.slow
def test_a_step_that_is_never_seen_has_the_range_of_the_others():
    def program(w, x):
        def body(c, w_i):
            w, i = w_i
            return lax.cond(i == 1, lambda: 0.5 * jnp.tanh(c), lambda: jnp.tanh(c @ w)), None

        return lax.scan(body, 10 * x, (w, jnp.arange(4)))[0]

    ((_, found),) = inferred(program)[1].items()
    upper = np.asarray(found.upper).ravel()
    assert upper[1] == upper[0] == upper.max() > 1 >= upper[2:].max() > 0


def test_loops_of_another_length_use_the_joined_range():
    """What was measured for four steps serves for two: no step is cut off."""

    def program(w, x):
        return stack(lax.scan, w, x)

    _, ranges = inferred(program)
    plan = xla.PtqProvider([STATIC]).plan(program, W[:2], X)
    out = jax.jit(plan.apply(program, ranges))(plan.quantize(W[:2]), X)
    joined = jax.tree.map(lambda bound: bound.max(0), ranges)
    np.testing.assert_array_equal(
        out, jax.jit(plan.apply(program, joined))(plan.quantize(W[:2]), X)
    )


def test_zero_points_by_step():
    rule = dataclasses.replace(STATIC, act_calibration_method="minmax")

    def program(scan):
        return lambda w, x: scan(lambda c, w: (jax.nn.relu(c @ w), None), 10 * x + 4, w)[0]

    expected = program(by_hand)(W, X)
    out, ranges = inferred(program(lax.scan), rule)
    assert error(out, expected) <= 1.5 * error(inferred(program(by_hand), rule)[0], expected)
    (found,) = ranges.values()
    assert found.lower.shape == (4, 1, 1)
    assert float(found.lower[0, 0, 0]) < 0 == float(found.lower[1:].max())


def test_the_rules_of_a_custom_vjp_in_a_loop_use_the_ranges_of_its_steps():
    """They are run when the loop is over, and get the step's number as an operand."""

    @jax.custom_vjp
    def contraction(c, w):
        return c @ w

    contraction.defvjp(lambda c, w: (c @ w, (c, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))

    def program(w, x):
        return lax.scan(lambda c, w: (jnp.tanh(contraction(c, w)), None), 10 * x, w)[0]

    y, slope, statistics = trained(program, updates=False)
    assert np.isfinite(slope).all()
    provider = xla.QtProvider([STATIC])
    for ranges, is_same in ((lambda bound: bound, True), (lambda bound: bound.max(0), False)):
        given = {k: jax.tree.map(ranges, s.calibration()) for k, s in statistics.items()}
        forward = jax.jit(provider.apply(program, given, update=False))(W, X)
        assert np.allclose(y, forward, rtol=1e-6) == is_same


@pytest.mark.slow
def test_ranges_by_step_are_saved_and_loaded(tmp_path):
    def program(w, x):
        return stack(lax.scan, w, x)

    plan = xla.PtqProvider([STATIC]).plan(program, W, X)
    ranges, stored = plan.calibrate(W, [(X,)]), plan.quantize(W, prepack=False)
    statistics = plan.empty_statistics()
    path = tmp_path / "model.safetensors"
    xla.save(path, stored, plan, extra={"ranges": ranges, "statistics": statistics})
    loaded = xla.load_extra(path)
    assert jax.tree.map(jnp.shape, loaded["ranges"]) == jax.tree.map(jnp.shape, ranges)
    assert [one.calibration().upper.shape for one in loaded["statistics"].values()] == [(4, 1, 1)]
    apply = jax.jit(plan.apply(program, ranges))(stored, X)
    np.testing.assert_array_equal(
        jax.jit(plan.apply(program, loaded["ranges"]))(xla.load(path), X), apply
    )


@pytest.mark.slow
def test_the_patch_engine_joins_the_steps():
    """It runs a body once for all steps."""
    provider = xla.PtqProvider([STATIC], engine="patch")
    plan = provider.plan(lambda w, x: stack(lax.scan, w, x), W, X)
    assert {one.steps for one in plan.ranges.values()} == {()}
    found = [one.upper.max() for one in plan.calibrate(W, [(X,)]).values()]
    assert max(found) == np.abs(10 * X).max()


def of_each_example(params, x):
    def body(state):
        return state[0] + 1, jnp.tanh(state[1] @ params["w"])

    def alone(x):
        return lax.while_loop(lambda state: jnp.abs(state[1]).sum() > 1, body, (0, x))[1]

    return jax.vmap(alone)(x)


def solved(params, x):
    w = params["w"]
    return jax.scipy.sparse.linalg.cg(lambda v: 2 * v + w.T @ (w @ v), x[0], maxiter=4)[0]


@pytest.mark.parametrize("fn", [of_each_example, solved])
def test_where_jax_can_write_no_range(fn):
    """A loop that ends at another step for each example, and one inside a solver."""
    params = {"w": np.eye(8, dtype=np.float32) / 2}
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
    rule = xla.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    plan = xla.PtqProvider(rule).plan(fn, params, x)
    with pytest.raises(xla.QuantizationError, match=r"can't be measured.*act_static_scale=False"):
        plan.calibrate(params, [(x,)])
