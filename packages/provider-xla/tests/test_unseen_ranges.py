"""Static ranges that calibration did not reach, or that cut off what they should hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from provider_xla import PtqProvider, QtProvider, QuantizationError, QuantizationRule
from provider_xla import QuantizationWarning as Warned

FIELDS = {"weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": True}
RULE = QuantizationRule(**FIELDS, act_batch_axes=())


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS, X = {"a": draw(8, 8), "b": draw(8, 8, seed=1)}, draw(4, 8, seed=2)


def error(found, expected):
    return np.linalg.norm(np.asarray(found) - expected) / np.linalg.norm(expected)


def branch(p, x, first):
    return lax.cond(first, lambda: x @ p["a"], lambda: x @ p["b"])


def switched_steps(p, x, first):
    """Whichever branch a flag takes, it takes in all steps of a loop."""
    step = lambda c, _: (jnp.tanh(branch(p, c, first)), None)  # noqa: E731
    return lax.scan(step, x, None, length=2)[0]


def zeros(p, x, first):
    """Not a branch, but an activation that was 0 in all batches."""
    return jnp.where(first, x, 0) @ p["a"] + x @ p["b"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("fn", [branch, switched_steps, zeros])
def test_a_range_that_no_batch_reached(fn):
    plan = PtqProvider([RULE], strict=True).plan(fn, PARAMS, X, False)
    batches, stored = [(X, False), (2 * X, False)], plan.quantize(PARAMS)
    if fn is zeros:
        ranges = plan.calibrate(PARAMS, batches)
    else:
        with pytest.warns(Warned, match=r"No batch reached .*matmul:\d#lhs: there is no static"):
            ranges = plan.calibrate(PARAMS, batches)
    expected = np.asarray(fn(PARAMS, X, True))
    for run in (plan.apply(fn, ranges), jax.jit(plan.apply(fn, ranges))):
        with pytest.warns(Warned, match=r"reached .*matmul:\d, or its lhs was 0 in all of them"):
            assert error(run(stored, X, True), expected) < 0.05
    # Ranges that are arguments of a compiled program are known when it runs.
    run = jax.jit(lambda ranges, *args: plan.apply(fn, ranges)(*args))
    assert error(run(ranges, stored, X, True), expected) < 0.05


def test_a_rule_that_refuses():
    rule = QuantizationRule(**FIELDS, unseen_range="error")
    plan = PtqProvider([rule]).plan(branch, PARAMS, X, False)
    with pytest.warns(Warned, match="No batch reached"):
        ranges = plan.calibrate(PARAMS, [(X, False)])
    with pytest.raises(QuantizationError, match=r"No calibration batch reached cond\(.*matmul:\d"):
        plan.apply(branch, ranges)(plan.quantize(PARAMS), X, True)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["absmax", "minmax"])
def test_an_empty_batch_counts_for_nothing(method):
    def fn(p, x):
        return x @ p["a"]

    rule = QuantizationRule(**FIELDS, act_calibration_method=method)
    plan = PtqProvider([rule]).plan(fn, PARAMS, X)
    expected = plan.calibrate(PARAMS, [(X,), (2 * X,)])
    found = plan.calibrate(PARAMS, [(X[:0],), (X,), (X[:0],), (2 * X,)])
    assert not plan.apply(fn, found)(plan.quantize(PARAMS), X[:0]).size
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_empty_batch_in_training():
    provider = QtProvider([RULE])
    ranges = provider.init_statistics(lambda p, x: x @ p["a"], PARAMS, X)
    run = provider.apply(lambda p, x: x @ p["a"], ranges)
    for x in (X[:0], X, X[:0]):
        jax.block_until_ready(run(PARAMS, x))
    ((key, found),) = ranges.items()
    assert key == "matmul:0#lhs"
    assert int(found.count) == 1
    np.testing.assert_allclose(found.calibration().upper, [[np.abs(X).max()]], rtol=1e-6)


def test_a_range_that_cuts_off():
    """Nodes of a graph are not examples: the mean of their largest magnitudes is too small."""

    def fn(p, x):
        return x @ p["a"]

    nodes = X * np.array([[100], [1], [1], [1]], np.float32)
    for axes, cut in (((0,), True), ((), False)):
        plan = PtqProvider([QuantizationRule(**FIELDS, act_batch_axes=axes)]).plan(fn, PARAMS, X)
        if cut:
            with pytest.warns(Warned, match=r"cut off more than 10% of matmul:0#lhs \(\d\d%\)"):
                plan.calibrate(PARAMS, [(nodes,)])
        else:
            plan.calibrate(PARAMS, [(nodes,)])


@pytest.mark.parametrize("mapped", [False, True])
def test_examples_of_one_number_have_the_range_of_all(mapped):
    """The mean of the times that a program embeds is half of the largest."""

    def embed(p, t):
        return jnp.sin(t[..., None] @ p["v"])

    fn = (lambda p, t: jax.vmap(lambda t: embed(p, t))(t)) if mapped else embed
    params, times = {"v": draw(1, 8)}, jnp.linspace(0.01, 1.0, 32)
    plan = PtqProvider([QuantizationRule(**FIELDS)]).plan(fn, params, times)
    stored = plan.calibrate(params, [(times,)])
    assert float(stored["matmul:0#lhs"].upper.max()) == 1
    found = plan.apply(fn, stored)(plan.quantize(params), times)
    assert error(found, np.sin(times[:, None] @ params["v"])) < 0.02


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "int32"])
def test_parameters_that_the_program_casts(dtype):
    """They stay as they are: rounded again they would lose what their format holds."""
    params = {"q": jnp.asarray(20 * draw(8, 8)).astype(dtype), "head": PARAMS["a"]}

    def fn(p, x):
        return (x @ p["q"].astype("float32")) @ p["head"] + x @ (p["q"].astype("float32") * 0.5)

    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8")
    plan = PtqProvider([rule], strict=True).plan(fn, params, X)
    assert f"args[0]['q'] stays {dtype}, as it is" in "".join(plan.notes)
    assert "args[0]['head']" in plan.weights
    stored = plan.quantize(params)
    q = [x for x in jax.tree.leaves(stored) if x.dtype == params["q"].dtype and x.shape == (8, 8)]
    assert any((x == params["q"]).all() for x in q)
    for run in (plan.apply(fn), jax.jit(plan.apply(fn))):
        assert error(run(stored, X), np.asarray(fn(params, X))) < 0.03


def mapped_branch(p, x, firsts):
    return jax.vmap(lambda row, first: branch(p, row, first))(x, firsts)


def mapped_switch_in_jit(p, x, firsts):
    """JAX maps the branch where it maps the call, which no handler sees."""
    step = jax.jit(lambda h, k: lax.switch(k, [lambda: h @ p["a"], lambda: h]))
    return jax.vmap(step)(x, firsts.astype(np.int32)) @ p["b"]


@pytest.mark.parametrize("fn", [mapped_branch, mapped_switch_in_jit])
def test_branches_that_vmap_maps(fn):
    firsts, text = np.arange(4) > 1, r"of jax.vmap, got (cond|switch)\(<lambda>\)/matmul:0"
    plan = PtqProvider([RULE], strict=True).plan(fn, PARAMS, X, firsts)
    with pytest.raises(QuantizationError, match=text):
        plan.calibrate(PARAMS, [(X, firsts)])
    training = QtProvider([RULE])
    statistics = training.init_statistics(fn, PARAMS, X, firsts)
    with pytest.raises(QuantizationError, match=text):
        training.apply(fn, statistics)(PARAMS, X, firsts)
