"""What is meant to differ from Qwix 0.1.8: one test each, of both sides."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from bounds import SUMS, relative
from flax import linen
from jax import lax
from ops import BY_NAME, FP8, INT4, INT8
from runs import KEY, Model, gradients, our_ptq, our_qt, qwix_ptq, qwix_qt
from test_static import batches

import provider_xla as xla
import quant_numerics as qn

DOT, CONV, EINSUM, RAGGED = (BY_NAME[n] for n in ("dot_general", "conv", "einsum", "ragged_dot"))
W8A8 = {"weight_qtype": INT8, "act_qtype": INT8}
ROW = jnp.array([[-1.0, -0.3, 1.0, 0.5]])


def cotangent(op):
    """Returns something to multiply a result by."""
    shape = op.exact(*op.draw()).shape
    return np.asarray(np.random.default_rng(1).normal(size=shape), np.float32)


# --- the grid ------------------------------------------------------------------------------------


def test_narrow_range():
    """Integers: our scale is absmax / 127 (7), Qwix's is absmax / 127.5 (7.5), with code -128."""
    for qtype, top in ((INT8, 127), (INT4, 7)):
        ours = qn.quantize(ROW, qtype)
        qwixs = qwix.quantize(ROW, qtype)
        np.testing.assert_allclose(ours.scale, [[1 / top]], rtol=1e-6)
        np.testing.assert_allclose(qwixs.scale, [[1 / (top + 0.5)]], rtol=1e-6)
    row = ROW * 127.5
    assert qn.quantize(row, "int8").qvalue.min() == -127
    assert qwix.quantize(row, "int8").qvalue.min() == -128


def test_scales_are_float32():
    """Of 16-bit arrays: our scales are float32, Qwix's have the array's dtype."""
    row = ROW.astype(jnp.bfloat16)
    assert qn.quantize(row, "int8").scale.dtype == jnp.float32
    assert qwix.quantize(row, "int8").scale.dtype == jnp.bfloat16
    x, w = DOT.draw(jnp.bfloat16)
    exact = DOT.exact(x, w)
    ours, qwixs = (run(DOT.fn, W8A8, w, x) for run in (our_qt, qwix_qt))
    assert ours.dtype == qwixs.dtype == jnp.bfloat16
    assert relative(ours, exact) < relative(qwixs, exact)


def test_tiny_arrays():
    """Arrays below 1e-17: ours have quantized values like all others, Qwix's become zero."""
    assert np.abs(qn.quantize(ROW * 1e-20, "int8").qvalue).max() == 127
    assert not qwix.quantize(ROW * 1e-20, "int8").qvalue.any()


def test_infinities():
    """An infinity comes back with its sign; with Qwix the whole slice becomes NaN."""
    row = ROW.at[0, 0].set(-jnp.inf)
    assert qn.dequantize(qn.quantize(row, "int8"))[0, 0] == -jnp.inf
    assert np.isnan(qwix.dequantize(qwix.quantize(row, "int8"))).all()


def test_block_scales():
    """mxfp8 and mxfp4: ours is the OCP specification's power of two, Qwix's is rounded up."""
    row = jnp.full((1, 32), 1.9)
    for qtype, last in (("mxfp8", 256), ("mxfp4", 4)):
        ours = qn.quantize(row, qtype, tile_axes={1: 32}).scale.astype(jnp.float32)
        qwixs = qwix.quantize(row, qtype, tiled_axes={1: 32}).scale
        np.testing.assert_array_equal(ours, [[1 / last]])
        np.testing.assert_array_equal(qwixs, [[2 / last]])


@pytest.mark.parametrize("factor", [1e6, 1e-6])
def test_nvfp4_has_a_second_scale(factor):
    """nvfp4: ours has one scale more for the whole array, Qwix's saturates or vanishes."""
    row = jnp.linspace(-1, 1, 16)[None] * factor
    ours = qn.dequantize(qn.quantize(row, "nvfp4", tile_axes={1: 16}))
    qwixs = qwix.dequantize(qwix.quantize(row, "nvfp4", tiled_axes={1: 16}))
    assert relative(ours, row) < 0.15
    assert relative(qwixs, row) > 0.9


# --- which operations are quantized --------------------------------------------------------------


def test_int4_by_int4_on_cpu():
    """int4 by int4: ours are multiplied as int8; Qwix's as int4, which XLA refuses on CPU."""
    rule = {"weight_qtype": INT4, "act_qtype": INT4}
    x, w = DOT.draw()
    for ours, qwixs in ((our_ptq, qwix_ptq), (our_qt, qwix_qt)):
        assert relative(ours(DOT.fn, rule, w, x), DOT.exact(x, w)) < 0.2
        with pytest.raises(jax.errors.JaxRuntimeError, match="custom element sizes"):
            qwixs(DOT.fn, rule, w, x)


def test_convolutions_of_mixed_formats():
    """A convolution of int4 by int8, or of the weight alone: Qwix refuses the one or both."""
    x, w = CONV.draw()
    mixed, alone = {"weight_qtype": INT4, "act_qtype": INT8}, {"weight_qtype": INT8}
    for rule in (mixed, alone):
        for run in (our_ptq, our_qt):
            assert relative(run(CONV.fn, rule, w, x), CONV.exact(x, w)) < 0.2
        with pytest.raises(ValueError, match="requires same act_qtype and weight_qtype"):
            qwix_ptq(CONV.fn, rule, w, x)
    with pytest.raises(TypeError, match="same dtypes"):
        qwix_qt(CONV.fn, mixed, w, x)


def test_ragged_dot_for_inference():
    """ragged_dot: our PtqProvider stores and multiplies quantized values, Qwix's leaves it
    float.
    """
    x, w = RAGGED.draw()
    plan = xla.PtqProvider([xla.QuantizationRule(**W8A8)]).plan(lambda w, x: RAGGED.fn(x, w), w, x)
    assert plan.weights["args[0]"].qtype == "int8"
    assert 1e-3 < relative(our_ptq(RAGGED.fn, W8A8, w, x), RAGGED.exact(x, w)) < 0.02
    model = qwix.quantize_model(
        Model(RAGGED.fn, w.shape, w.dtype), qwix.PtqProvider([qwix.QuantizationRule(**W8A8)])
    )
    assert isinstance(jax.eval_shape(model.init, KEY, x)["params"]["w"], jax.ShapeDtypeStruct)


def test_ragged_dot_of_a_quantized_weight():
    """ragged_dot of a float input and an int8 weight: Qwix's QtProvider refuses it."""
    x, w = RAGGED.draw()
    rule = {"weight_qtype": INT8}
    assert 1e-3 < relative(our_qt(RAGGED.fn, rule, w, x), RAGGED.exact(x, w)) < 0.02
    with pytest.raises(ValueError, match="Cannot use None as qtype"):
        qwix_qt(RAGGED.fn, rule, w, x)


def test_ragged_dot_scales():
    """ragged_dot: our weights have a scale per group and column, Qwix's per column of all groups.

    Where groups differ in size, ours is better.
    """
    x, w = RAGGED.draw()
    w = w * jnp.array([1e-3, 1, 1, 1])[:, None, None]
    first = slice(0, 9)  # the rows of the small group
    exact = RAGGED.exact(x, w)[first]
    assert relative(our_qt(RAGGED.fn, W8A8, w, x)[first], exact) < 0.02
    assert relative(qwix_qt(RAGGED.fn, W8A8, w, x)[first], exact) > 0.5


@pytest.mark.parametrize(
    "field",
    [
        {"tile_size": 8},
        {"weight_calibration_method": "absmax,0.5"},
        {"disable_channelwise_axes": True},
    ],
    ids=lambda field: next(iter(field)),
)
def test_ragged_dot_follows_the_rule(field):
    """ragged_dot: tiles, calibration and one scale for all are done; Qwix does not read them."""
    x, w = RAGGED.draw()
    ours, qwixs = ([run(RAGGED.fn, rule, w, x) for rule in (W8A8, W8A8 | field)]
                   for run in (our_qt, qwix_qt))  # fmt: skip
    assert (ours[0] != ours[1]).any()
    np.testing.assert_array_equal(*qwixs)


def test_einsum_of_three_operands():
    """An einsum of three operands is quantized in its parts; Qwix refuses it."""

    def fn(x, w):
        return jnp.einsum("mk,kn,pn->mp", x, w, w)

    x, w = DOT.draw()
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64) @ np.asarray(w, np.float64).T
    for ours, qwixs in ((our_ptq, qwix_ptq), (our_qt, qwix_qt)):
        assert 1e-3 < relative(ours(fn, W8A8, w, x), exact) < 0.03
        with pytest.raises(ValueError, match="Unsupported einsum format"):
            qwixs(fn, W8A8, w, x)


def test_weights_on_the_left():
    """A parameter on the left is a weight for inference, too; Qwix's PtqProvider wants the right.

    There it stays float under a rule for weights.
    """

    def fn(x, w):
        return lax.dot_general(w, x, (((0,), (1,)), ((), ())))

    x, w = DOT.draw()
    rule = {"weight_qtype": INT8}
    exact = DOT.exact(x, w).T
    assert 1e-3 < relative(our_ptq(fn, rule, w, x), exact) < 0.02
    assert relative(qwix_ptq(fn, rule, w, x), exact) < SUMS


def test_rules_for_activations_alone():
    """A rule with an act_qtype alone quantizes activations; Qwix leaves the operation float."""
    x, w = DOT.draw()
    rule, exact = {"act_qtype": INT8}, DOT.exact(x, w)
    for ours, qwixs in ((our_ptq, qwix_ptq), (our_qt, qwix_qt)):
        assert 1e-3 < relative(ours(DOT.fn, rule, w, x), exact) < 0.02
        assert relative(qwixs(DOT.fn, rule, w, x), exact) < SUMS


class Table(linen.Module):
    """A lookup in a parameter."""

    @linen.compact
    def __call__(self, indices):
        table = self.param("w", linen.initializers.normal(), (32, 8))
        return jnp.take(table, indices, axis=0)


def test_lookups_are_quantized_by_name():
    """A table is quantized where a rule names ``take``; Qwix's has no such operation."""
    table, indices = jnp.asarray(np.random.default_rng(0).normal(size=(32, 8)), jnp.float32), [1, 5]
    indices = jnp.array(indices)
    for op_names, quantized in ((None, False), (["take"], True)):
        rule = {"weight_qtype": INT8, "op_names": op_names}
        provider = xla.PtqProvider([xla.QuantizationRule(**rule)])
        if quantized:
            plan = provider.plan(lambda w, i: jnp.take(w, i, axis=0), table, indices)
            assert plan.weights["args[0]"].granularity.channel_axes == (0,)
        else:
            with pytest.warns(xla.QuantizationWarning, match="has no effect"):
                plan = provider.plan(lambda w, i: jnp.take(w, i, axis=0), table, indices)
            assert not plan.weights
        theirs = qwix.QuantizationRule(weight_qtype=INT8, op_names=op_names or ())
        model = qwix.quantize_model(Table(), qwix.PtqProvider([theirs]))
        kinds = jax.eval_shape(model.init, KEY, indices)["params"]
        assert isinstance(kinds["w"], jax.ShapeDtypeStruct)


class Net(linen.Module):
    """A model of one layer."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, name="head")(x)


def test_module_paths():
    """Module paths begin with the model's class, as its name scopes do; Qwix's leave it out."""
    x = jnp.ones((2, 8))
    variables = Net().init(KEY, x)
    for path, ours_matches in (("Net/head", True), ("head", False)):
        provider = xla.QtProvider([xla.QuantizationRule(module_path=path, **W8A8)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", xla.QuantizationWarning)
            plan = provider.plan(Net().apply, variables, x)
        assert (plan.problems == ()) == ours_matches
        theirs = qwix.QtProvider([qwix.QuantizationRule(module_path=path, **W8A8)])
        qwix.quantize_model(Net(), theirs).apply(variables, x)
        assert (theirs.get_unused_rules() == []) != ours_matches


# --- how they are computed -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", [(our_ptq, qwix_ptq), (our_qt, qwix_qt)], ids=["ptq", "qt"])
def test_preferred_element_type(mode):
    """preferred_element_type is kept; Qwix drops it."""

    def fn(x, w):
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    x, w = DOT.draw(jnp.bfloat16)
    ours, qwixs = (run(fn, W8A8, w, x) for run in mode)
    assert (ours.dtype, qwixs.dtype) == (jnp.float32, jnp.bfloat16)


def test_zero_points_on_both_sides():
    """Zero points may be on both sides, and on kernels of convolutions; Qwix refuses these."""
    methods = {"weight_calibration_method": "minmax", "act_calibration_method": "minmax"}
    for op, match in ((DOT, "Only one operand"), (CONV, "rhs is not supported")):
        x, w = op.draw()
        for ours, qwixs in ((our_ptq, qwix_ptq), (our_qt, qwix_qt)):
            assert 1e-3 < relative(ours(op.fn, W8A8 | methods, w, x), op.exact(x, w)) < 0.02
            with pytest.raises(ValueError, match=match):
                qwixs(op.fn, W8A8 | methods, w, x)


def test_tiles_of_an_einsum():
    """An einsum with two contracted axes is tiled along the last, in training as for inference.

    Qwix's QtProvider tiles another one than its PtqProvider, here one that 8 does not divide.
    """
    x, w = EINSUM.draw()
    rule = W8A8 | {"tile_size": 8}
    np.testing.assert_allclose(
        our_qt(EINSUM.fn, rule, w, x), our_ptq(EINSUM.fn, rule, w, x), rtol=1e-5, atol=1e-5
    )
    qwix_ptq(EINSUM.fn, rule, w, x)
    with pytest.raises(ValueError, match="cannot be tiled"):
        qwix_qt(EINSUM.fn, rule, w, x)


def test_static_ranges_are_of_the_whole_array():
    """A static range is one for all of an activation; Qwix's is one per channel left of the batch.

    With activations (batch, time, ...) and a mean over the batch, Qwix's differ by time.
    """
    xs, w = batches(EINSUM)
    rule = W8A8 | {"act_static_scale": True}
    provider = xla.QtProvider([xla.QuantizationRule(**rule)])
    (statistics,) = provider.init_statistics(lambda w, x: EINSUM.fn(x, w), w, xs[0]).values()
    assert statistics.calibration().upper.shape == (1, 1, 1, 1)
    model = qwix.quantize_model(
        Model(EINSUM.fn, w.shape, w.dtype), qwix.QtProvider([qwix.QuantizationRule(**rule)])
    )
    _, state = model.apply({"params": {"w": w}}, xs[0], mutable=["quant_stats"])
    (stats,) = state["quant_stats"].values()
    assert stats["sum_of_absmax"].shape == (1, 8, 1, 1)


# --- derivatives ---------------------------------------------------------------------------------


def test_forward_mode():
    """Training functions have forward-mode derivatives; Qwix's are reverse-mode alone."""
    x, w = DOT.draw()
    _, tangent = jax.jvp(lambda w: our_qt(DOT.fn, W8A8, w, x), (w,), (w,))
    assert relative(tangent, DOT.exact(x, w)) < SUMS
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda w: qwix_qt(DOT.fn, W8A8, w, x), (w,), (w,))


@pytest.mark.parametrize("op", [CONV, RAGGED], ids=lambda op: op.name)
def test_float_gradients_are_at_the_operands(op):
    """Without bwd_qtype, gradients are those at the operands, of every operation.

    Qwix's of conv_general_dilated and ragged_dot are those at the dequantized codes.
    """
    x, w = op.draw()
    g = cotangent(op)
    ours, qwixs = (gradients(run, op.fn, W8A8, w, x, g) for run in (our_qt, qwix_qt))
    for side, other in enumerate((w, x)):
        exact = op.exact_gradient(side, g, other)
        assert relative(ours[side], exact) < SUMS
        assert 1e-3 < relative(qwixs[side], exact) < 0.02


def test_convolutions_have_no_gradient_where_they_are_clipped():
    """Where a range clips, the gradient is zero, of every operation; Qwix's of a conv is not."""
    x, w = CONV.draw()
    rule = W8A8 | {"act_calibration_method": "fixed,1", "bwd_qtype": INT8}
    outside = np.abs(x) > 1
    ours, qwixs = (
        gradients(run, CONV.fn, rule, w, x, cotangent(CONV))[0] for run in (our_qt, qwix_qt)
    )
    assert not ours[outside].any()
    assert (np.asarray(qwixs)[outside] != 0).mean() > 0.9


def test_static_ranges_have_no_gradient_outside():
    """Where a static range clips, the gradient is zero; Qwix's passes, as absmax clips nothing."""
    (first, second), w = batches(DOT, 2)
    second = second * 10
    rule, g = W8A8 | {"act_static_scale": True}, cotangent(DOT)

    def fn(params, x):
        return DOT.fn(x, params["w"])

    provider = xla.QtProvider([xla.QuantizationRule(**rule)])
    statistics = provider.init_statistics(fn, {"w": w}, first)
    provider.apply(fn, statistics)({"w": w}, first)
    run = provider.apply(fn, statistics, update=False)
    ours = jax.grad(lambda x: jnp.vdot(run({"w": w}, x), g))(second)

    model = qwix.quantize_model(
        Model(DOT.fn, w.shape, w.dtype), qwix.QtProvider([qwix.QuantizationRule(**rule)])
    )
    _, state = model.apply({"params": {"w": w}}, first, mutable=["quant_stats"])
    qwixs = jax.grad(lambda x: jnp.vdot(model.apply({"params": {"w": w}, **state}, x), g))(second)
    (statistic,) = statistics.values()
    outside = np.abs(second) > float(statistic.calibration().upper.max())
    assert 0.5 < outside.mean() < 1
    assert not ours[outside].any()
    assert (np.asarray(qwixs)[outside] != 0).all()


@pytest.mark.parametrize("what", ["weight", "act"])
def test_zero_points_with_bwd_qtype(what):
    """bwd_qtype goes with zero points: the operand is quantized again; Qwix asserts there are none.

    The gradient of the other operand is within what two quantized operands give.
    """
    x, w = DOT.draw()
    g = cotangent(DOT)
    rule = W8A8 | {"bwd_qtype": INT8, f"{what}_calibration_method": "minmax"}
    for side, gradient in enumerate(gradients(our_qt, DOT.fn, rule, w, x, g)):
        assert 1e-3 < relative(gradient, DOT.exact_gradient(side, g, (w, x)[side])) < 0.02
    with pytest.raises(AssertionError):
        gradients(qwix_qt, DOT.fn, rule, w, x, g)


def _backward_dots(run, rule):
    """Returns of each contraction of the backward pass whether it is one of integers."""
    x, w = DOT.draw()
    g = cotangent(DOT)
    text = jax.jit(lambda w, x: gradients(run, DOT.fn, rule, w, x, g)).lower(w, x).as_text()
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    return ["i8>, tensor" in dot and "xi32>" in dot for dot in dots]


def test_tiled_operands_with_bwd_qtype():
    """bwd_qtype goes with tiles: tiled operands are quantized again; with Qwix they are float."""
    rule = W8A8 | {"bwd_qtype": INT8, "tile_size": 8}
    assert _backward_dots(our_qt, rule) == [True] * 2
    assert _backward_dots(qwix_qt, rule) == [False] * 2
    x, w = DOT.draw()
    g = cotangent(DOT)
    for run in (our_qt, qwix_qt):
        for side, gradient in enumerate(gradients(run, DOT.fn, rule, w, x, g)):
            assert 1e-3 < relative(gradient, DOT.exact_gradient(side, g, (w, x)[side])) < 0.02


def test_gradients_of_grouped_convolutions():
    """Convolutions with feature groups have quantized gradients; Qwix's fail."""

    def fn(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=6,
        )

    x, _ = CONV.draw()
    w = jnp.asarray(np.random.default_rng(3).normal(size=(3, 3, 1, 6)), jnp.float32)
    rule = W8A8 | {"bwd_qtype": INT8}
    assert relative(our_qt(fn, rule, w, x), qwix_qt(fn, rule, w, x)) < 0.03
    g = np.asarray(np.random.default_rng(1).normal(size=(4, 8, 8, 6)), np.float32)
    exact = jax.grad(lambda x, w: jnp.vdot(fn(x, w), g), (0, 1))(x, w)
    for ours, wanted in zip(gradients(our_qt, fn, rule, w, x, g), exact, strict=True):
        assert 1e-3 < relative(ours, wanted) < 0.03
    with pytest.raises(ValueError, match="feature_group_count"):
        gradients(qwix_qt, fn, rule, w, x, g)


def test_stochastic_rounding_of_fp8():
    """bwd_stochastic_rounding rounds fp8 at random, too; Qwix rounds fp8 to nearest.

    The mean of many roundings tends to the gradient before rounding, with one scale per row.
    """
    x, w = DOT.draw()
    g = cotangent(DOT)
    # A float weight adds no other error; with Qwix an operation without one stays float.
    rule = {"weight_qtype": None, "bwd_qtype": FP8, "act_qtype": INT8}
    rule |= {"bwd_stochastic_rounding": "uniform", "channelwise_noise_axes": (0, 1)}
    provider = xla.QtProvider([xla.QtRule(**rule)])
    fn = provider.apply(lambda w, x: DOT.fn(x, w))

    @jax.jit
    def ours(key):
        return jax.grad(lambda x: jnp.vdot(fn(w, x, quant_key=key), g))(x)

    draws = [np.asarray(ours(key)) for key in jax.random.split(KEY, 64)]
    assert (draws[0] != draws[1]).any()
    exact = DOT.exact_gradient(0, g, w)
    assert relative(np.mean(draws, axis=0), exact) < relative(draws[0], exact) / 4

    rule = rule | {"weight_qtype": FP8}
    model = qwix.quantize_model(
        Model(DOT.fn, w.shape, w.dtype), qwix.QtProvider([qwix.QtRule(**rule)])
    )

    def qwixs(seed):
        def loss(x):
            rngs = {"stochastic_rounding": jax.random.key(seed)}
            return jnp.vdot(model.apply({"params": {"w": w}}, x, rngs=rngs), g)

        return jax.grad(loss)(x)

    np.testing.assert_array_equal(qwixs(0), qwixs(1))
