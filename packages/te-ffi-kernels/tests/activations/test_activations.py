"""act_lu, dact_lu, quantize_dact_dbias and activation: numbers, against NumPy and against XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te import activations as wanted_activations
from jaxtap_testkit.te.activations import error
from te_ffi_kernels import QuantizeLayout, ScalingMode, reference

pytestmark = pytest.mark.sample(2)

FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]
NAMES = list(te.ActivationEnum)
MODES = [ScalingMode(1), ScalingMode(2), ScalingMode(3), ScalingMode(64)]
PARAMS = te.ActivationParams(te.ClampedSwigluParams(1.5, 1.25, 0.5))
# As users of JAX write them.
IN_JAX = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "clamped_silu": lambda x: (y := jnp.minimum(x, 1.5)) * jax.nn.sigmoid(1.25 * y),
    "clamped_linear": lambda x: jnp.clip(x, -1.5, 1.5) + 0.5,
    "linear": lambda x: x,
}


def in_jax(x, names):
    parts = [IN_JAX[name](x[..., i, :].astype(jnp.float32)) for i, name in enumerate(names)]
    return (parts[0] if len(parts) == 1 else parts[0] * parts[1]).astype(x.dtype)


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", NAMES)
def test_forward_and_backward(names):
    number = te.ActivationEnum[names]
    rng = np.random.default_rng(number)
    lead, n = [((37,), 130), ((2, 3), 1030), ((1,), 1), ((), 77)][number % 4]
    dtype = FLOATS[number % 5 % 3]
    x = jnp.asarray(rng.normal(size=(*lead, len(names), n)) * 4, dtype)
    dz = jnp.asarray(rng.normal(size=(*lead, n)), dtype)

    def both(op):
        def run(x, dz):
            out, pull = jax.vjp(op, x)
            return out, *pull(dz)

        return jax.jit(run)(x, dz)

    found = both(lambda x: te.activation(x, names, PARAMS))
    plain = both(lambda x: in_jax(x, names))
    out, slopes = wanted_activations.forward(x, names, 1.5, 1.25, 0.5)
    dx = slopes * np.asarray(dz, np.float64)[..., None, :]
    for one, other, wanted in zip(found, plain, (out, dx), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        size = np.abs(wanted).max(initial=0)
        assert error(one, wanted) <= 1.05 * error(other, wanted) + 2e-7 * size + 1e-8
        if dtype == jnp.float32:
            np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=5e-7)


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", NAMES)
def test_reference(names):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(5, len(names), 33)) * 5, jnp.float32)
    out, slopes = wanted_activations.forward(x, names, 1.5, 1.25, 0.5)
    forward = jax.jit(reference.activation, static_argnums=(1, 2))(x, names, PARAMS)
    np.testing.assert_allclose(forward, out, rtol=1e-5, atol=1e-6)
    backward = jax.jit(reference.quantize_dact_dbias, static_argnums=(2, 3, 4))
    found = backward(jnp.ones((5, 33)), x, names, True, PARAMS)
    np.testing.assert_allclose(found[0], slopes, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(found[5], slopes.sum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda x: reference.activation(x, names, PARAMS).sum()))(x),
        slopes,
        rtol=1e-5,
        atol=2e-6,
    )


def test_tails():
    """Each number has its own few units in the last place, far from zero too."""
    x = np.concatenate([-np.geomspace(1e-3, 80, 500), np.geomspace(1e-3, 1e4, 500)])
    x = x.astype(np.float32)[None, None]
    for name in ("gelu", "silu", "quick_gelu"):
        found = te.act_lu(jnp.asarray(x), name)[0]
        slope = te.dact_lu(jnp.ones((1, 1000)), jnp.asarray(x), name)[0]
        out, slopes = wanted_activations.forward(x, (name,))
        with np.errstate(divide="ignore", invalid="ignore"):
            # A unit of what is in the exponent is as many of the result as that is large.
            room = 4e-7 * (4 + np.abs(x[0]) ** (3 if name == "gelu" else 1))
            tiny = np.abs(out) < 1e-35
            assert (tiny | (np.abs(found - out) <= room * np.abs(out))).all(), name
            assert (np.abs(slope - slopes) <= 2e-6 * np.abs(slopes) + 4e-7).all(), name


def test_ends():
    x = jnp.asarray([[[-jnp.inf, jnp.inf, jnp.nan, -1e30, 1e30]]])
    for name in ("gelu", "silu"):
        found = te.act_lu(x, name)[0][0]
        np.testing.assert_array_equal(found[jnp.asarray([0, 1, 3])], [0, jnp.inf, 0])
        assert np.isnan(found[2])
        np.testing.assert_allclose(found[4], 1e30, rtol=1e-6)
        slope = te.dact_lu(jnp.ones((1, 5)), x, name)[0][0, 0]
        np.testing.assert_array_equal(slope[jnp.asarray([0, 1, 3, 4])], [0, 1, 0, 1])


def raw(x):
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", list(QuantizeLayout))
def test_qvalue_are_those_of_the_result(mode, layout):
    number = int(mode) + int(layout)
    rng = np.random.default_rng(number)
    dtype, names = FLOATS[number % 3], NAMES[number % 12]
    x = jnp.asarray(rng.normal(size=(2, 32, len(names), 96)) * 2, dtype)
    dz = jnp.asarray(rng.normal(size=(2, 32, 96)), dtype)
    out = "int8" if layout == 1 and not mode.is_mx else "float8_e4m3fn"
    given = jnp.full((1,), 23.0)
    wide = x.astype(jnp.float32)
    forward = te.act_lu(x, names, None, out, mode, layout, given)
    backward = te.quantize_dact_dbias(dz, x, names, True, None, out, mode, layout, given)
    numbers = te.act_lu(wide, names)[0]
    slopes, *_, dbias = te.quantize_dact_dbias(dz.astype(jnp.float32), wide, names)
    for found, wanted, axis in ((forward, numbers, -1), (backward, slopes, -2)):
        scale = given
        if mode is ScalingMode.CURRENT_TENSOR_SCALING:
            wanted = wanted.astype(dtype).astype(jnp.float32)
            scale = te.compute_scale_from_amax(jnp.max(jnp.abs(wanted)).reshape(1), out)
        extra = jnp.zeros((0,), jnp.uint32), scale, jnp.zeros((1, 1), jnp.bfloat16)
        qvalue = te.dbias_quantize(wanted, scale, scale * 0, *extra, out, mode, layout, axis)
        for one, other in zip(found[:5], qvalue[:5], strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            np.testing.assert_array_equal(raw(one), raw(other))
    assert backward[5].dtype == dtype
    np.testing.assert_allclose(
        backward[5].astype(jnp.float32), dbias, rtol=0.02, atol=0.02 * np.abs(dbias).max()
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ScalingMode(0), *MODES])
def test_qvalue_of_the_reference_are_near(mode):
    x = normal(64, 2, 96) * 2
    dz = normal(64, 96, seed=1)
    names, out = ("silu", "linear"), "float8_e5m2" if mode else None
    more = (out, mode, 2, jnp.full((1,), 50.0), jnp.ones((1,)), None, not mode)
    for run in (
        lambda m: m.act_lu(x, names, None, *more),
        lambda m: m.dact_lu(dz, x, names, None, *more),
    ):
        for one, other in zip(run(te), jax.jit(lambda: run(reference))(), strict=True):  # noqa: B023
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            one, other = (np.asarray(a, np.float32) for a in (one, other))
            assert (np.abs(one - other) <= 1e-6 * np.abs(other) + 1e-6).mean() > 0.99


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES[1::2])
def test_a_quantized_layer_is_straight_through(mode):
    x, dz = normal(32, 2, 64), jnp.ones((32, 64))

    def layer(op, *more):
        def both(x):
            out, pull = jax.vjp(lambda x: op(x, ("gelu", "linear"), None, *more), x)
            return out, *pull(dz)

        return jax.jit(both)(x)

    plain, wanted = layer(te.activation)
    for op in (te.activation, reference.activation):
        out, dx = layer(op, "float8_e4m3fn", mode, jnp.full((1,), 60.0))
        assert 0 < np.abs(out - plain).max() < 0.5
        np.testing.assert_allclose(dx, wanted, rtol=1e-5, atol=1e-6)


def test_limits_count_as_inside():
    params = te.ActivationParams.create(("clamped_silu", "clamped_linear"), limit=2.0)
    assert params.clamped_swiglu == te.ClampedSwigluParams(2.0, 1.702, 1.0)
    assert te.ActivationParams.create("gelu") == te.ActivationParams()
    x = jnp.asarray([[[2.0, 2.1, 1.0, 1.0], [2.0, 1.0, -2.0, -2.1]]])
    for op in (te.dact_lu, reference.dact_lu):
        dx = op(jnp.ones((1, 4)), x, ("clamped_silu", "clamped_linear"), params)[0]
        np.testing.assert_array_equal(dx[0, 0] != 0, [True, False, True, True])
        np.testing.assert_array_equal(dx[0, 1] != 0, [True, True, True, False])


def test_nothing():
    for shape in ((0, 2, 5), (3, 2, 0)):
        x = jnp.ones(shape)
        dx = jax.jit(jax.grad(lambda x: te.activation(x, ("relu", "linear")).sum()))(x)
        assert dx.shape == shape
    assert not te.quantize_dact_dbias(jnp.ones((0, 5)), jnp.ones((0, 2, 5)), NAMES[1])[5].any()
