"""Training: values, derivatives and statistics, under every transformation."""

import dataclasses
import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jaxtap_testkit import examples
from jaxtap_testkit.odml_samples import (
    MLP,
    MODELS,
    W8A8,
    W8A16,
    Cnn,
    draw,
    fake_quant_blocks,
    fake_quant_int8,
    fake_quant_symmetric,
    fake_quant_weight,
    mlp,
)
from provider_odml import MovingAverage, OdmlError, OdmlRule, qat
from provider_odml.decide.decision import ConstantUse, WeightUse
from provider_odml.train.averages import terms_of
from provider_odml.train.parameters import fake_quant_constant
from provider_odml.train.parameters import fake_quant_weight as weight_of
from provider_odml.train.ranges import How, at_site

pytestmark = pytest.mark.sample(2)

W, X = draw(6, 8, seed=1), draw(4, 6)


def dot(w, x):
    return x @ w


def spread(x, axes=(1,)):
    """The mean over the batch of the least and the greatest value, with 0 between them."""
    x = np.asarray(x, np.float64)
    return np.minimum(x.min(axes), 0).mean(), np.maximum(x.max(axes), 0).mean()


def largest(x, axes=(1,)):
    return np.abs(np.asarray(x, np.float64)).max(axes).mean()


def ranges(stats):
    """The averages by site, as numbers."""
    found = {key: one.calibration() for key, one in stats.items()}
    return {
        key: (None if c.lower is None else float(c.lower), float(c.upper))
        for key, c in found.items()
        if int(stats[key].count)
    }


def run(model, *args, stats=None, **options):
    """A jitted call; the statistics are made for it where none are given."""
    stats = model.init(*args) if stats is None else stats
    return eqx.filter_jit(lambda args, s: model(*args, quant_stats=s, **options))(args, stats)


def net(p, x):
    return jax.nn.relu(x @ p["w"] + p["b"]) @ p["v"]


NET = {"w": draw(6, 8, seed=1), "b": draw(8, seed=2), "v": draw(8, 3, seed=3)}


NOTHING = terms_of(jnp.zeros((1, 3)), MovingAverage())
UNSEEN = np.array([[np.inf, -np.inf]], np.float32)
"""Of statistics that have seen nothing."""


def how_of(qtype, batch=(0,), fixed=None):
    symmetric = qtype == "int16"
    return How(qtype, "absmax" if symmetric else "minmax", batch, symmetric, None, fixed)


def counts(stats):
    return {key: int(one.count) for key, one in stats.items() if int(one.count)}


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), a, b)


def assert_on_grid(actual, expected, step):
    """Equal to the reference, but for single codes where float32 rounds a tie apart."""
    off = np.abs(np.asarray(actual, np.float64) - expected) / step
    assert off.max() < 1.01
    assert np.mean(off > 1e-2) < 0.05


# Values.


@pytest.mark.parametrize("weight", ["int8", "int4", "int2"])
def test_int8_is_that_of_numpy(engine, weight):
    model = qat(dot, OdmlRule(weight_qtype=weight, output_qtype="int8"), engine=engine)
    out = run(model, W, X)
    x = fake_quant_int8(X, *spread(X))
    y = x @ fake_quant_weight(W, {"int8": 127, "int4": 7, "int2": 1}[weight], (1,))
    low, high = spread(y)
    assert_on_grid(out, fake_quant_int8(y, low, high), (high - low) / 255)


@pytest.mark.parametrize("weight", ["int8", "int4"])
def test_int16_is_that_of_numpy(weight):
    model = qat(dot, OdmlRule(weight_qtype=weight, output_qtype="int16"))
    out = run(model, W, X)
    x = fake_quant_symmetric(X, largest(X), 32767)
    y = x @ fake_quant_weight(W, {"int8": 127, "int4": 7}[weight], (1,))
    bound = largest(y)
    np.testing.assert_allclose(out, fake_quant_symmetric(y, bound, 32767), atol=2 * bound / 32767)


def test_dynamic_ranges_are_those_of_rows():
    rule = OdmlRule(weight_qtype="int8", input_qtype="int8")
    out = qat(dot, rule)(W, X)
    rows = np.stack([fake_quant_int8(row, row.min(), row.max()) for row in np.asarray(X)])
    np.testing.assert_allclose(out, rows @ fake_quant_weight(W, 127, (1,)), rtol=1e-4, atol=1e-5)


def test_weight_only_leaves_activations_alone():
    out = qat(dot, OdmlRule(weight_qtype="int4"))(W, X)
    expected = np.asarray(X, np.float64) @ fake_quant_weight(W, 7, (1,))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_a_convolution_has_a_scale_per_output_channel():
    numbers = ("NHWC", "HWIO", "NHWC")
    kernel, image = draw(3, 3, 2, 4, seed=1) * jnp.array([1.0, 10.0, 0.1, 1.0]), draw(2, 5, 5, 2)

    def conv(k, x):
        return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers)

    out = qat(conv, OdmlRule(weight_qtype="int4"))(kernel, image)
    exact = fake_quant_weight(kernel, 7, (3,)).astype(np.float32)
    np.testing.assert_allclose(out, conv(exact, image), rtol=1e-4, atol=1e-4)


def test_fixed_ranges_are_those_of_litert():
    model = qat(lambda p, x: jax.nn.softmax(x), W8A8)
    out = np.asarray(run(model, {}, X), np.float64) * 256
    np.testing.assert_array_equal(out, np.rint(out))
    assert out.max() <= 255


def test_division_by_a_constant_multiplies_with_its_quantized_inverse():
    model = qat(lambda p, x: jnp.tanh(x) / 3.0, W8A8, fixed_range_for_inputs=(-4, 5))
    out = run(model, {}, X)
    exact = fake_quant_int8(np.tanh(fake_quant_int8(X, -4, 5)), -1, 127 / 128) / 3
    low, high = spread(exact)
    assert_on_grid(out, fake_quant_int8(exact, low, high), (high - low) / 255)


def test_an_integer_operation_reads_codes_of_the_one_before():
    """Of a tensor with two readers there is one set of codes."""

    def fn(w, x):
        h = jnp.sin(x)
        return (h @ w) - (h @ w)

    model = qat(fn, W8A8)
    np.testing.assert_allclose(run(model, W, X), np.zeros((4, 8)), atol=1e-6)


@pytest.mark.slow
def test_without_statistics_each_tensor_has_its_own_range():
    model = qat(mlp, W8A8)
    assert_close(jax.jit(model)(MLP, X), run(model, MLP, X))


@pytest.mark.slow
def test_evaluation_before_training_takes_each_tensors_own_range():
    model = qat(mlp, W8A8)
    stats = model.init(MLP, X)
    out = run(model, MLP, X, stats=stats, update_quant_stats=False)
    assert_close(out, jax.jit(model)(MLP, X))
    assert counts(stats) == {}


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_types_are_those_of_the_float_program(dtype):
    w, x = W.astype(dtype), X.astype(dtype)
    model = qat(dot, W8A8)
    out = model(w, x, quant_stats=model.init(w, x))
    assert (out.dtype, out.shape) == (dtype, (4, 8))


@pytest.mark.parametrize("batch", [(0,), ()])
def test_an_empty_tensor_has_no_range(batch):
    x = jnp.zeros((0, 4))
    out, seen = at_site(x, NOTHING, 0, how_of("int8", batch), True, True, UNSEEN)
    assert out.shape == x.shape
    np.testing.assert_array_equal(seen, UNSEEN)


@pytest.mark.slow
@examples(12)
@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=4),
    qtype=st.sampled_from(["int8", "int16"]),
    batch=st.sets(st.integers(-5, 4), max_size=3),
    seed=st.integers(0, 99),
)
def test_fake_quantization_of_any_shape(shape, qtype, batch, seed):
    x, how = draw(*shape, seed=seed) * 3, how_of(qtype, tuple(batch))
    out, ((lower, upper),) = at_site(x, NOTHING, 0, how, True, True, UNSEEN)
    kept = {a % len(shape) for a in batch if -len(shape) <= a < len(shape)}
    axes = tuple(a for a in range(len(shape)) if a not in kept)
    if qtype == "int8":
        low, high = spread(x, axes)
        np.testing.assert_allclose(lower, low, rtol=1e-5, atol=1e-7)
        expected, step = fake_quant_int8(x, lower, upper), (high - low) / 255
    else:
        high = largest(x, axes)
        assert lower == -upper
        expected, step = fake_quant_symmetric(x, upper, 32767), high / 32767
    np.testing.assert_allclose(upper, high, rtol=1e-5, atol=1e-7)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    off = np.abs(np.asarray(out, np.float64) - expected)
    assert off.max() <= step * 1.01


@pytest.mark.slow
@examples(12)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    qtype=st.sampled_from([("int8", 127), ("int4", 7), ("int2", 1)]),
    data=st.data(),
)
def test_fake_quantization_of_weights_of_any_shape(shape, qtype, data):
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1)))))
    w, (name, qmax) = draw(*shape), qtype
    out = weight_of(w, WeightUse(name, axes, "absmax"))
    expected = fake_quant_weight(w, qmax, axes)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [32, 64])
def test_weights_in_blocks(size):
    """Blocks run through the contracted axes; scales are what float16 and bfloat16 both have."""
    w = np.array(draw(4, 3, 32))  # contracted: 32 of the last axis, then 4 of the first
    w[:, 0] = 0
    w[:2, 1] *= 1e-6
    use = WeightUse("int4", (1,), "absmax", size, (2, 0))
    out = weight_of(jnp.asarray(w), use)
    matrix = w.transpose(2, 0, 1).reshape(-1, 3)
    expected = fake_quant_blocks(matrix, size, 7).reshape(32, 4, 3).transpose(1, 2, 0)
    np.testing.assert_array_equal(np.asarray(out), expected.astype(np.float32))
    # Straight through, and where the method cuts values off, not.
    ones = jax.grad(lambda w: weight_of(w, use).sum())(jnp.asarray(w))
    np.testing.assert_array_equal(ones, np.ones_like(w))
    cut = dataclasses.replace(use, method="percentile,90")
    slope = jax.grad(lambda w: weight_of(w, cut).sum())(jnp.asarray(w))
    parts = np.abs(matrix.reshape(-1, size, 3))
    inside = parts <= np.percentile(parts, 90, axis=1, keepdims=True) * (1 + 1e-6)
    inside = inside.reshape(32, 4, 3).transpose(1, 2, 0)
    np.testing.assert_array_equal(slope, inside.astype(np.float32))


def test_constants_have_a_zero_point_and_zeros_stay_zeros():
    x = jnp.array([0.0, 3.0, 5.1])
    np.testing.assert_allclose(fake_quant_constant(x, ConstantUse("int8")), x, atol=5.1 / 255)
    zeros = fake_quant_constant(jnp.zeros(3), ConstantUse("int8"))
    np.testing.assert_array_equal(zeros, np.zeros(3))


# Derivatives.


@pytest.mark.parametrize("qtype", ["int8", "int16"])
def test_the_derivative_is_that_of_clipping(qtype):
    x = jnp.array([-3.0, -1.01, -0.99, 0.0, 0.4, 1.99, 2.01, 7.0])
    low = -2.0 if qtype == "int16" else -1.0
    how = how_of(qtype, fixed=(low, 2.0))
    found = jax.grad(lambda x: at_site(x, NOTHING, 0, how, False, True)[0].sum())(x)
    np.testing.assert_array_equal(found, (np.asarray(x) >= low) & (np.asarray(x) <= 2))


def test_ranges_have_no_derivative():
    def total(x, terms):
        return at_site(x, terms, 0, how_of("int8"), True, True, UNSEEN)[1].sum()

    for found in jax.grad(total, (0, 1))(X, NOTHING):
        np.testing.assert_array_equal(found, np.zeros_like(found))


@pytest.mark.slow
def test_gradients_of_a_product_are_straight_through():
    given = {"fixed_range_for_inputs": (-1, 1.5), "fixed_range_for_outputs": (-2, 3)}
    model = qat(dot, W8A8, **given)
    cotangent = draw(4, 8, seed=5)
    dw, dx = jax.grad(lambda w, x: (model(w, x) * cotangent).sum(), (0, 1))(W, X)
    x, w = fake_quant_int8(X, -1, 1.5), fake_quant_weight(W, 127, (1,))
    y = x @ w
    back = np.asarray(cotangent, np.float64) * ((y >= -2) & (y <= 3))
    np.testing.assert_allclose(dw, x.T @ back, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        dx, (back @ w.T) * ((np.asarray(X) >= -1) & (np.asarray(X) <= 1.5)), rtol=1e-4, atol=1e-4
    )


def test_second_derivatives_and_forward_mode():
    model = qat(dot, W8A8, fixed_range_for_inputs=(-1, 1), fixed_range_for_outputs=(-2, 2))
    _, tangent = jax.jvp(lambda x: model(W, x), (X,), (jnp.ones_like(X),))
    assert np.isfinite(tangent).all()
    again = jax.grad(lambda x: jax.grad(lambda x: model(W, x).sum())(x).sum())(X)
    np.testing.assert_array_equal(again, np.zeros((4, 6)))


# Statistics.


@pytest.mark.slow
@pytest.mark.parametrize("decay", [None, 0.9])
def test_averages_are_those_of_numpy(decay):
    model = qat(dot, W8A8, average=MovingAverage(decay))
    stats = model.init(W, X)
    batches = [draw(4, 6, seed=i) * (i + 1) for i in range(3)]
    low, high = np.array([spread(x) for x in batches]).T
    weights = np.full(3, 1 / 3) if decay is None else decay ** np.arange(2, -1, -1.0)
    step = jax.jit(lambda x: model(W, x, quant_stats=stats))
    for x in batches:
        step(x)
    assert counts(stats) == {"args[1]": 3, "dot_general:0": 3}
    expected = np.average(low, weights=weights), np.average(high, weights=weights)
    assert_close(ranges(stats)["args[1]"], expected)


def test_the_output_is_on_the_grid_of_the_average_so_far():
    model = qat(dot, W8A8)
    stats = model.init(W, X)
    model(W, X, quant_stats=stats)
    model(W, 5 * X, quant_stats=stats)
    low, high = ranges(stats)["dot_general:0"]
    out = np.asarray(model(W, X, quant_stats=stats, update_quant_stats=False), np.float64)
    codes = out / ((high - low) / 255)
    np.testing.assert_allclose(codes, np.rint(codes), atol=1e-2)


@pytest.mark.slow
def test_evaluation_changes_nothing():
    model = qat(mlp, W8A8)
    stats = model.init(MLP, X)
    model(MLP, X, quant_stats=stats)
    before = np.asarray(stats.state)
    evaluate = jax.jit(lambda x: model(MLP, x, quant_stats=stats, update_quant_stats=False))
    first = evaluate(7 * X)
    np.testing.assert_array_equal(first, evaluate(7 * X))
    np.testing.assert_array_equal(stats.state, before)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_batch_that_is_not_finite_is_left_out(bad):
    model = qat(dot, W8A8)
    stats = model.init(W, X)
    model(W, X, quant_stats=stats)
    before = ranges(stats)
    model(W, X.at[1, 2].set(bad), quant_stats=stats)
    assert ranges(stats)["args[1]"] == before["args[1]"]


@pytest.mark.slow
def test_sites_with_a_fixed_range_are_not_observed():
    model = qat(lambda w, x: jax.nn.softmax(x @ w), W8A8, fixed_range_for_inputs=(-1, 1))
    stats = model.init(W, X)
    model(W, X, quant_stats=stats)
    assert counts(stats) == {"dot_general:0": 1}


def test_statistics_of_other_rules_are_refused():
    stats = qat(dot, W8A8).init(W, X)
    other = qat(lambda w, x: jnp.tanh(x @ w) @ w.T, W8A8)
    with pytest.raises(OdmlError, match=r"(tanh:0|dot_general:1).*init"):
        other(W, X, quant_stats=stats)


@pytest.mark.slow
def test_with_state_is_the_form_with_boxes(engine):
    model = qat(mlp, W8A8, engine=engine)
    stats, boxes = model.init(MLP, X), model.init(MLP, X)
    state = stats.state
    step = jax.jit(functools.partial(model.with_state, stats))
    for i in range(2):
        x = draw(4, 6, seed=i)
        out, state = step(state, MLP, x)
        np.testing.assert_array_equal(out, jax.jit(lambda x: model(MLP, x, quant_stats=boxes))(x))
    np.testing.assert_array_equal(state, boxes.state)
    assert counts(stats) == {}


@pytest.mark.slow
def test_calibration_sees_the_extremes_of_the_float_model(engine):
    model = qat(mlp, W8A8, engine=engine)
    batches = [(draw(4, 6, seed=i),) for i in range(3)]
    found = ranges(model.calibrate(MLP, batches))
    params = {key: np.asarray(value, np.float64) for key, value in MLP.items()}
    spreads = {"args[1]": [], "relu:0": [], "dot_general:1": []}
    for (x,) in batches:
        x = np.asarray(x, np.float64)
        h = np.maximum(x @ params["w"] + params["b"], 0)
        y = np.concatenate([h, np.tanh(h)], -1) @ params["v"]
        for key, value in zip(spreads, (x, h, y), strict=True):
            spreads[key].append(spread(value, None))
    for key, rows in spreads.items():
        assert_close(found[key], tuple(np.mean(rows, axis=0)))


def test_calibration_of_nothing():
    with pytest.raises(OdmlError, match="at least one tuple of arguments with"):
        qat(dot, W8A8).calibrate(W, [])


def test_batches_may_differ_in_size():
    model = qat(dot, W8A8)
    stats = model.calibrate(W, [(draw(4, 6),), (draw(2, 6),)])
    assert counts(stats) == {"args[1]": 2, "dot_general:0": 2}


def test_batches_may_differ_in_numbers():
    model = qat(lambda w, x, factor: jnp.tanh(x * factor) @ w, W8A8)
    factors = (1.0, 4.0, 4)
    stats = model.calibrate(W, [(X, factor) for factor in factors])
    expected = np.mean([spread(np.asarray(X) * factor, None) for factor in factors], 0)
    assert_close(ranges(stats)["mul:0"], tuple(expected))


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_batch_counts_for_nothing(engine, place):
    model = qat(lambda w, x: (jnp.tanh(x @ w) - 1).sum(0), W8A8, engine=engine)
    batches = [(draw(4, 6, seed=i),) for i in range(2)]
    expected = model.calibrate(W, batches)
    batches.insert(place, (X[:0],))
    np.testing.assert_array_equal(model.calibrate(W, batches).state, expected.state)
    with pytest.raises(OdmlError, match="with examples in it, got none"):
        model.calibrate(W, [(X[:0],)])


def test_empty_tensors_are_not_seen():
    """Beside an array that is not empty, and in training."""
    model = qat(lambda w, x, y: (x @ w, y @ w), W8A8)
    stats = model.calibrate(W, [(X[:0], X), (2 * X, X)])
    assert counts(stats) == {"args[1]": 1, "args[2]": 2, "dot_general:0": 1, "dot_general:1": 2}
    assert_close(ranges(stats)["args[1]"], spread(2 * np.asarray(X), None))
    before = stats["args[1]"].row
    grad = jax.grad(lambda w: model(w, X[:0], X, quant_stats=stats)[1].sum())(W)
    assert np.isfinite(grad).all()
    np.testing.assert_array_equal(stats["args[1]"].row, before)


@dataclasses.dataclass
class Options:
    """An argument without a hash: it can change."""

    kind: str


def test_a_plan_is_that_of_the_arguments():
    """Objects get the ids of those before them, and numbers of several types are equal."""

    def fn(w, x, options):
        if options is True or (isinstance(options, Options) and options.kind == "tanh"):
            return jnp.tanh(x @ w)
        return x @ w

    model, kept = qat(fn, W8A8), Options("none")
    for kind in ("tanh", "none") * 4:
        kept.kind = kind
        for options in (Options(kind), kept, kind == "tanh"):
            assert ("tanh:0" in model.plan(W, X, options).sites) == (kind == "tanh")
        assert "tanh:0" not in model.plan(W, X, 1).sites


@pytest.mark.slow
def test_a_range_is_that_of_all_parts_of_a_tensor(engine):
    """Operations read slices of an input, which have one scale in the file."""
    parts = {"first": (0, 2), "second": (2, 4), "third": (4, 6)}

    def fn(w, x):
        return sum(x[:, a:b] @ w[a:b] for a, b in parts.values())

    x = X * jnp.array([1, 1, 5, 5, 0.1, 0.1])
    stats = qat(fn, W8A8, engine=engine).calibrate(W, [(x,), (2 * x,)])
    expected = np.mean([spread(np.asarray(x), None), spread(2 * np.asarray(x), None)], 0)
    assert_close(ranges(stats)["args[1]"], tuple(expected))
    assert int(stats["args[1]"].count) == 2


@pytest.mark.parametrize("shape", [(64, 1), (64,)])
def test_examples_of_one_number_have_the_range_of_all(shape):
    """The mean of what each regression gives would cut half of them off."""

    def regression(params, x):
        return jnp.tanh(x @ params["w"]) @ params["v"].reshape(-1, *shape[1:])

    params, x = {"w": draw(6, 5), "v": draw(5, 1)}, draw(64, 6)
    model = qat(regression, W8A8)
    of_batch, of_each = model.init(params, x), model.init(params, x[0])
    model(params, x, quant_stats=of_batch)
    jax.vmap(functools.partial(model, quant_stats=of_each), (None, 0))(params, x)
    weights = {key: np.asarray(value, np.float64) for key, value in params.items()}
    y = np.tanh(np.asarray(x, np.float64) @ weights["w"]) @ weights["v"]
    for stats in (of_batch, of_each):
        np.testing.assert_allclose(ranges(stats)["dot_general:1"], (y.min(), y.max()), rtol=0.1)


def test_batch_axes_are_those_of_the_rule():
    rule = OdmlRule(weight_qtype="int8", output_qtype="int8", act_batch_axes=())
    model = qat(dot, rule)
    stats = model.init(W, X)
    model(W, X, quant_stats=stats)
    assert_close(ranges(stats)["args[1]"], spread(X, None))


# Transformations around and inside. The reference is the plain call, one step.


@pytest.fixture(scope="module")
def reference(request):
    model = qat(net, W8A8, engine=request.param)
    stats = model.init(NET, X)
    out = jax.jit(lambda p, x, s: model(p, x, quant_stats=s))(NET, X, stats)
    return model, np.asarray(out), ranges(stats)


AROUND = {
    "eager": lambda f, s: f(NET, X, s),
    "jit": lambda f, s: jax.jit(f)(NET, X, s),
    "closed over": lambda f, s: jax.jit(lambda x: f(NET, x, s))(X),
    "value_and_grad": lambda f, s: jax.jit(
        jax.value_and_grad(lambda p: (lambda y: (y.sum(), y))(f(p, X, s)), has_aux=True)
    )(NET)[0][1],
    "remat": lambda f, s: jax.jit(
        jax.value_and_grad(
            lambda p: (lambda y: (y.sum(), y))(jax.checkpoint(lambda p: f(p, X, s))(p)),
            has_aux=True,
        )
    )(NET)[0][1],
    "scan": lambda f, s: jax.jit(
        lambda: lax.scan(lambda c, x: (c, f(NET, x, s)), 0, jnp.stack([X, X, X]))[1][-1]
    )(),
    "fori_loop": lambda f, s: jax.jit(
        lambda: lax.fori_loop(0, 2, lambda i, y: f(NET, X, s), jnp.zeros((4, 3)))
    )(),
    "while_loop": lambda f, s: jax.jit(
        lambda: lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, f(NET, X, s)), (0, jnp.zeros((4, 3)))
        )[1]
    )(),
    "cond": lambda f, s: jax.jit(
        lambda b: lax.cond(b, lambda: f(NET, X, s), lambda: jnp.zeros((4, 3)))
    )(True),
}  # fmt: skip


VMAPS = {
    "vmap": lambda f, s: jax.vmap(lambda r: f(NET, r[None], s))(X)[:, 0],
    "jit of vmap": lambda f, s: jax.jit(jax.vmap(lambda r: f(NET, r[None], s)))(X)[:, 0],
    "vmap of jit": lambda f, s: jax.vmap(jax.jit(lambda r: f(NET, r[None], s)))(X)[:, 0],
    "grad of vmap": lambda f, s: jax.jit(
        jax.grad(lambda p: (lambda y: (y.sum(), y))(jax.vmap(lambda r: f(p, r[None], s))(X)),
                 has_aux=True)
    )(NET)[1][:, 0],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "around"),
    [*(("trace", name) for name in AROUND),
     *(("patch", name) for name in ("value_and_grad", "scan"))],
    indirect=["reference"],
)  # fmt: skip
def test_transformations_around(reference, around):
    """Ranges are the mean of equal ranges, however often they are seen."""
    model, expected, seen = reference
    stats = model.init(NET, X)
    out = AROUND[around](lambda p, x, s: model(p, x, quant_stats=s), stats)
    assert_close(ranges(stats), seen)
    step = (seen["dot_general:1"][1] - seen["dot_general:1"][0]) / 255
    assert_on_grid(out, np.asarray(expected, np.float64), step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "around"),
    [*(("trace", name) for name in VMAPS), ("patch", "jit of vmap")],
    indirect=["reference"],
)
def test_an_update_under_a_vmap_around_the_model(reference, around):
    """Ranges are those of all examples."""
    model, expected, seen = reference
    stats = model.init(NET, X)
    out = VMAPS[around](lambda p, x, s: model(p, x, quant_stats=s), stats)
    assert_close(ranges(stats), seen)
    step = (seen["dot_general:1"][1] - seen["dot_general:1"][0]) / 255
    assert_on_grid(out, np.asarray(expected, np.float64), step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "around"),
    [*(("trace", name) for name in VMAPS), ("patch", "jit of vmap")],
    indirect=["reference"],
)
def test_evaluation_under_a_vmap_around_the_model(reference, around):
    model, expected, seen = reference
    stats = model.init(NET, X)
    run(model, NET, X, stats=stats)
    out = VMAPS[around](lambda p, x, s: model(p, x, quant_stats=s, update_quant_stats=False), stats)
    step = (seen["dot_general:1"][1] - seen["dot_general:1"][0]) / 255
    assert_on_grid(out, np.asarray(expected, np.float64), step)


def layers(p, x):
    return lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x, p)[0]


def test_each_step_of_a_rolled_scan_has_a_range():
    params = draw(3, 6, 6, seed=1)
    model = qat(layers, W8A8, engine="trace")
    stats = model.init(params, X)
    run(model, params, X, stats=stats)
    assert set(counts(stats).values()) == {1}
    h, outputs = np.asarray(X, np.float64), []
    for w in params:
        h = fake_quant_int8(h, *spread(h)) @ fake_quant_weight(w, 127, (1,))
        h = np.maximum(h, 0)
        outputs.append(spread(h))
        h = fake_quant_int8(h, *outputs[-1])
    (relu,) = [key for key in stats if "relu" in key]
    found = stats[relu].calibration()
    np.testing.assert_allclose(np.stack([found.lower, found.upper], 1), outputs, rtol=1e-2)


@pytest.mark.slow
def test_a_train_step_of_a_rolled_scan():
    params = draw(3, 6, 6, seed=1)
    model = qat(layers, W8A8, engine="trace")
    stats, other = model.init(params, X), model.init(params, X)
    loss = jax.value_and_grad(lambda p, s: model(p, X, quant_stats=s).sum())
    value, gradient = jax.jit(loss)(params, stats)
    assert_close(value, jax.jit(lambda p: model(p, X, quant_stats=other))(params).sum())
    np.testing.assert_allclose(stats.state, other.state, rtol=1e-5)
    assert (np.abs(gradient).max((1, 2)) > 0).all()


def choose(p, x, b):
    return lax.cond(b, lambda h: h @ p["w"], lambda h: jax.nn.relu(h @ p["v"]), x)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("branch", [False, True])
def test_the_branch_that_runs_observes_what_it_reads(jit, branch):
    params = {"w": W, "v": draw(6, 8, seed=2)}
    rule = OdmlRule(weight_qtype="int8", output_qtype="int8", act_batch_axes=())
    model = qat(choose, rule, engine="trace")
    stats, sites = model.init(params, X, branch), model.plan(params, X, branch).sites
    call = jax.jit(model) if jit else model
    out = call(params, X, jnp.array(branch), quant_stats=stats)
    seen = [found for key, found in ranges(stats).items() if sites[key].tensor == "args[1]"]
    assert len(seen) == 1
    assert_close(seen[0], spread(X, None))
    expected = np.asarray(choose(params, X, branch))
    np.testing.assert_allclose(out, expected, atol=0.02 * np.abs(expected).max())


def test_a_loop_inside_of_the_model_is_that_of_numpy():
    def fn(w, x):
        return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w), x)

    w = draw(6, 6, seed=1)
    model = qat(fn, W8A8, engine="trace")
    stats = model.init(w, X)
    out = run(model, w, X, stats=stats)
    assert set(counts(stats).values()) == {1}
    h = np.asarray(X, np.float64)
    for _ in range(3):
        y = fake_quant_int8(h, *spread(h)) @ fake_quant_weight(w, 127, (1,))
        h = fake_quant_int8(np.tanh(fake_quant_int8(y, *spread(y))), -1, 127 / 128)
    np.testing.assert_allclose(out, h, atol=3 / 128)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [jax.checkpoint, jax.jit, lambda f: jax.vmap(f, (None, 0))],
    ids=["remat", "jit", "vmap"],
)
def test_transformations_inside(engine, wrap):
    """The same as without them; or refused, as remat is by the patch engine."""
    params = draw(6, 6, seed=1)

    def layer(w, x):
        return jax.nn.relu(x @ w)

    inside = qat(lambda w, x: wrap(layer)(w, wrap(layer)(w, x)), W8A8, engine=engine)
    flat = qat(lambda w, x: layer(w, layer(w, x)), W8A8, engine=engine)
    results = []
    if engine == "patch" and wrap is jax.checkpoint:
        with pytest.raises(OdmlError, match="checkpoint"):
            inside.init(params, X)
        return
    for model in (inside, flat):
        stats = model.init(params, X)
        loss = jax.value_and_grad(lambda w, s, model=model: model(w, X, quant_stats=s).sum())
        results.append((jax.jit(loss)(params, stats), ranges(stats)))
    (ours, seen), (expected, ranges_of_flat) = results
    assert seen.keys() == ranges_of_flat.keys()
    assert_close(seen, ranges_of_flat)
    assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
def test_a_model_for_one_example_under_vmap(engine):
    """The same as the one for a batch: ranges, codes of the weight, and a bias that is folded."""
    linear = eqx.nn.Linear(6, 8, key=jax.random.key(0))
    mapped = qat(lambda m, x: jax.vmap(m)(x), W8A8, engine=engine)
    flat = qat(lambda m, x: x @ m.weight.T + m.bias, W8A8, engine=engine)
    found = []
    for model in (mapped, flat):
        stats = model.init(linear, X)
        out = run(model, linear, X, stats=stats)
        found.append((out, list(ranges(stats).values())))
    (out, seen), (expected, of_flat) = found
    assert_close(seen, of_flat)
    step = (of_flat[-1][1] - of_flat[-1][0]) / 255
    assert_on_grid(out, np.asarray(expected, np.float64), step)


def twice(layer):
    body = lambda c: (c[0] + 1, layer(c[1]))  # noqa: E731
    return lambda x: lax.while_loop(lambda c: c[0] < 2, body, (0, x))[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("around", "prefix"),
    [
        (jax.checkpoint, ""),
        (lambda f: jax.checkpoint(jax.checkpoint(f)), ""),
        (lambda f: lambda x: lax.cond(X[0, 0] < 9, f, lambda x: -x, x), "cond(f)/"),
        (lambda f: lambda x: lax.switch(jnp.int32(1), [jnp.sin, f, jnp.cos], x), "switch(f)/"),
        (twice, "while_body(<lambda>)/"),
    ],
    ids=["remat", "remat of remat", "cond", "switch", "while_loop"],
)
def test_programs_under_vmap_hide_no_functions(around, prefix):
    """Functions in them are whole, and get the axes of the batch."""
    params, x = draw(6, 6, seed=1), draw(4, 3, 6)

    def model(w, x):
        def layer(x):
            return jax.nn.softmax(jax.nn.gelu(x @ w) - jnp.mean(x, axis=-1, keepdims=True), axis=0)

        layer.__name__ = "f"
        return jax.vmap(around(layer))(x)

    def flat(w, x):
        for _ in range(2 if around is twice else 1):
            y = jax.nn.gelu(x @ w) - jnp.mean(x, axis=-1, keepdims=True)
            x = jax.nn.softmax(y, axis=1)
        return x

    mapped = qat(model, W8A8, engine="trace")
    keys = mapped.plan(params, x).decisions.keys()
    assert {f"{prefix}{name}:0" for name in ("dot_general", "gelu", "softmax", "mean")} <= set(keys)
    stats = [each.calibrate(params, [(x,)]) for each in (mapped, qat(flat, W8A8, engine="trace"))]
    if not prefix:
        assert_close(*[list(ranges(one).values()) for one in stats])
    fixed = functools.partial(mapped, quant_stats=stats[0], update_quant_stats=False)
    np.testing.assert_allclose(fixed(params, x), flat(params, x), atol=0.03)
    if around is not twice:  # which has no reverse mode
        slope = lambda fn: jax.jit(jax.grad(lambda w: jnp.sum(fn(w, x) ** 2)))(params)  # noqa: E731
        np.testing.assert_allclose(slope(fixed), slope(flat), atol=0.1)


# Engines, frameworks.


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", MODELS)
def test_both_engines_train_the_same(model):
    fn, params, x = MODELS[model]()
    results = []
    for engine in ("trace", "patch"):
        q = qat(fn, W8A8, engine=engine)
        stats = q.init(params, x)
        step = eqx.filter_jit(lambda p, x, s, q=q: q(p, x, quant_stats=s))
        outs = [step(params, batch, stats) for batch in (x, 2 * x)]
        results.append((outs, ranges(stats), counts(stats)))
    (outs, seen, often), (others, their_ranges, their_counts) = results
    assert often == their_counts
    assert set(often.values()) == {2}
    assert seen.keys() == their_ranges.keys()
    assert_close(seen, their_ranges)
    for out, other in zip(outs, others, strict=True):
        np.testing.assert_allclose(out, other, atol=1e-4)


@pytest.mark.slow
def test_batch_norm_and_dropout_train_with_the_sites_of_evaluation(engine):
    model, x = Cnn(), draw(2, 8, 8, 1)
    variables = model.init(jax.random.key(0), x)
    train = qat(
        lambda v, x, key: model.apply(
            v, x, train=True, mutable=["batch_stats"], rngs={"dropout": key}
        ),
        W8A8, engine=engine,
    )  # fmt: skip
    evaluate = qat(model.apply, W8A8, engine=engine)
    key = jax.random.key(1)
    stats = train.init(variables, x, key)
    assert set(stats) == set(evaluate.init(variables, x))
    out, changed = jax.jit(train)(variables, x, key, quant_stats=stats)
    new = {**variables, **changed}
    final = jax.jit(evaluate, static_argnames="update_quant_stats")(
        new, x, quant_stats=stats, update_quant_stats=False
    )
    assert out.shape == final.shape
    assert np.isfinite(final).all()
    old = variables["batch_stats"]["BatchNorm_0"]["mean"]
    assert np.abs(changed["batch_stats"]["BatchNorm_0"]["mean"] - old).max() > 0


@pytest.mark.slow
def test_a_model_learns():
    model, x = nn.Dense(1), draw(16, 6)
    target = x @ draw(6, 1, seed=9)
    params = model.init(jax.random.key(0), x)
    # Whole ranges: the mean over examples of a single output would clip half of them.
    rule = OdmlRule(weight_qtype="int8", output_qtype="int8", act_batch_axes=())
    q = qat(model.apply, rule, average=MovingAverage(0.9))
    stats = q.init(params, x)

    @jax.jit
    def step(params, stats):
        loss, gradient = jax.value_and_grad(
            lambda p: ((q(p, x, quant_stats=stats) - target) ** 2).mean()
        )(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    losses = []
    for _ in range(40):
        loss, params = step(params, stats)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 20


@pytest.mark.slow
@pytest.mark.parametrize("given", ["argument", "closure"])
def test_no_tracer_leaks(engine, given, leaks):
    q = qat(lambda w, x: jnp.tanh(x @ w), W8A8, engine=engine)
    stats = q.init(W, X)

    def loss(w, s):
        return q(w, X, quant_stats=s if given == "argument" else stats).sum()

    value, _ = leaks(jax.value_and_grad(loss))(W, stats if given == "argument" else None)
    assert np.isfinite(value)


def test_int16_ranges_have_no_lower_bound():
    model = qat(mlp, W8A16)
    stats = model.init(MLP, X)
    jax.jit(model)(MLP, X, quant_stats=stats)
    assert {low for low, _ in ranges(stats).values()} == {None}


def test_a_condition_that_reads_quantized_tensors_is_refused():
    """JAX lets no condition of a loop write."""
    fn = lambda w, x: lax.while_loop(lambda h: (h @ w).sum() < 1e3, lambda h: h @ w + h, x)  # noqa: E731
    model, x = qat(fn, W8A8, engine="trace"), draw(3, 4)
    weight = jnp.abs(draw(4, 4, seed=1))
    with pytest.raises(OdmlError, match="condition of a while_loop"):
        model.calibrate(weight, [(jnp.abs(x),)])


def test_paddings_that_can_be_read_once():
    """JAX and flax read them; handlers, and each of several traces, read them again."""

    def made(once):
        def model(k, x):
            y = lax.conv_general_dilated(x, k, (1, 1), once([(1, 1), (1, 1)]), None, None, NHWC)
            return nn.max_pool(jax.nn.relu(y), (2, 2), (2, 2), once([(1, 1), (1, 0)]))

        return qat(model, OdmlRule(weight_qtype="int8", output_qtype="int8"))

    k, x = draw(3, 3, 2, 4), draw(2, 6, 6, 2)
    found, plans = [], []
    for once in (iter, tuple):
        model = made(once)
        plans.append(str(model.plan(k, x)))
        stats = model.calibrate(k, [(x,)])
        run = functools.partial(model, quant_stats=stats, update_quant_stats=False)
        found.append(jax.jit(run)(k, x))
    assert plans[0] == plans[1]
    np.testing.assert_array_equal(*found)


NHWC = ("NHWC", "HWIO", "NHWC")
