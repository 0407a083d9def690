"""normalization_fwd, normalization_bwd and layernorm: numbers, against NumPy and against XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import te_ffi_kernels as te
from jaxtap_testkit import examples
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te import norms as wanted_norms
from jaxtap_testkit.te.norms import error
from te_ffi_kernels import QuantizeLayout, ScalingMode, reference

pytestmark = pytest.mark.sample(2)

FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]
KINDS = ["layernorm", "rmsnorm"]
MODES = [ScalingMode(1), ScalingMode(2), ScalingMode(3), ScalingMode(64)]
PLAIN = jax.jit(reference.normalization_fwd, static_argnums=range(3, 9))
PLAIN_BACKWARD = jax.jit(reference.normalization_bwd, static_argnums=range(6, 9))


@st.composite
def problems(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lead = draw(st.sampled_from([(), (1,), (5,), (33,), (2, 3), (0,), (70,)]))
    n = draw(st.sampled_from([1, 2, 15, 64, 65, 130, 1000, 1030, 4100]))
    dtype = draw(st.sampled_from(FLOATS))
    weights = draw(st.sampled_from([dtype, jnp.dtype(jnp.float32)]))
    middle = draw(st.sampled_from([0.0, 1.0, 100.0]))
    make = lambda shape, at, d: jnp.asarray(rng.normal(at, 1.5, shape).astype(np.dtype(d)))  # noqa: E731
    x, dz = make((*lead, n), middle, dtype), make((*lead, n), 0, dtype)
    gamma, beta = make(n, 1, weights), make(n, 0, weights)
    kind, zero_centered = draw(st.sampled_from(KINDS)), draw(st.booleans())
    return dz, x, gamma, beta, zero_centered, draw(st.sampled_from([1e-6, 1e-3])), kind


@pytest.mark.slow
@examples(8)
@given(problems())
def test_forward(problem):
    _, x, gamma, beta, zero_centered, epsilon, kind = problem
    args = (x, gamma, beta, zero_centered, epsilon, kind)
    found, plain = te.normalization_fwd(*args), PLAIN(*args)
    for one, other in zip(found, plain, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    out, mean, rsigma = wanted_norms.forward(x, gamma, beta, kind, zero_centered, epsilon)
    step = float(jnp.finfo(x.dtype).eps)
    size = np.abs(out).max(initial=1)
    assert error(found[0], out) <= 1.01 * error(plain[0], out) + step / 4 + 4e-7 * size
    if kind == "layernorm":
        # A sum of float32 numbers is as exact as they are large, not as their mean is.
        room = 2e-7 * np.abs(np.asarray(x, np.float64)).max(initial=1)
        assert error(found[5], mean) <= error(plain[5], mean) + room
    else:
        assert not found[5].any()
    assert error(found[6], rsigma) <= error(plain[6], rsigma) + 6e-7 * rsigma.max(initial=0)


@examples(8)
@given(problems())
def test_backward(problem):
    dz, x, gamma, beta, zero_centered, epsilon, kind = problem
    *_, mu, rsigma = te.normalization_fwd(x, gamma, beta, zero_centered, epsilon, kind)
    args = (dz, x, mu, rsigma, gamma, beta, zero_centered, epsilon, kind)
    found, plain = te.normalization_bwd(*args), PLAIN_BACKWARD(*args)
    exact = wanted_norms.backward(dz, x, gamma, kind, zero_centered, epsilon)
    assert (found[2] is None) == (kind == "rmsnorm")
    for i, one, other, wanted in zip(range(3), found, plain, exact, strict=True):
        if one is None:
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        step = float(jnp.finfo(one.dtype).eps)
        size = np.abs(wanted).max(initial=1e-3)
        # Means are rounded to float32, which for numbers far from 0 is much.
        room = (1e-6 if i == 2 else 1e-5) * size
        assert error(one, wanted) <= 1.2 * error(other, wanted) + step * size / 4 + room


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(dtype, kind):
    rng = np.random.default_rng(3)
    x, dz = (jnp.asarray(rng.normal(1, 2, (37, 96)), dtype) for _ in range(2))
    gamma, beta = (jnp.asarray(rng.normal(1, 0.5, 96), dtype) for _ in range(2))

    def layer(op):
        run = lambda x, gamma, beta: op(x, gamma, beta, kind, True, 1e-5)  # noqa: E731
        return jax.jit(lambda *args: jax.vjp(run, *args)[1](dz))(x, gamma, beta)

    exact = wanted_norms.backward(dz, x, gamma, kind, True, 1e-5)
    found, plain = layer(te.layernorm), layer(reference.layernorm)
    for i, one, other, wanted in zip(range(3), found, plain, exact, strict=True):
        if kind == "rmsnorm" and i == 2:
            assert not one.any()
            continue
        assert error(one, wanted) <= 1.05 * error(other, wanted) + 2e-6 * np.abs(wanted).max()


@pytest.mark.slow
def test_statistics_have_gradients():
    x = normal(5, 33) + 2
    gamma, beta = jnp.linspace(0.5, 1, 33), jnp.linspace(-1, 1, 33)
    for kind in KINDS:

        def loss(op, x, kind=kind):
            *_, mu, rsigma = op(x, gamma, beta, False, 1e-5, kind)
            return jnp.sum(mu**2) + jnp.sum(jnp.sin(rsigma))

        one, other = (
            jax.jit(jax.grad(loss, 1), static_argnums=0)(m.normalization_fwd, x)
            for m in (te, reference)
        )
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def raw(x):
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", list(QuantizeLayout))
def test_qvalue_are_those_of_the_result(mode, layout):
    rng = np.random.default_rng(int(mode) * 3 + int(layout))
    dtype = FLOATS[rng.integers(3)]
    x = jnp.asarray(rng.normal(3, 2, (2, 32, 96)), dtype)
    gamma, beta = jnp.asarray(rng.normal(size=(2, 96)), jnp.float32)
    kind = KINDS[int(layout) % 2]
    out = "float8_e5m2" if mode.is_mx else "int8" if int(layout) == 1 else "float8_e4m3fn"
    # In float32, since that is what is quantized; but rounded where it's of this array.
    wide = x.astype(jnp.float32)
    numbers, *_, mu, rsigma = te.normalization_fwd(wide, gamma, beta, True, 1e-5, kind)
    given = scale = jnp.full((1,), 23.0)
    if mode is ScalingMode.CURRENT_TENSOR_SCALING:
        numbers = numbers.astype(dtype).astype(jnp.float32)
        scale = te.compute_scale_from_amax(jnp.max(jnp.abs(numbers)).reshape(1), out)
    extra = jnp.zeros((0,), jnp.uint32), scale, jnp.zeros((1, 1), jnp.bfloat16)
    wanted = te.dbias_quantize(numbers, scale, scale * 0, *extra, out, mode, layout)
    args = (x, gamma, beta, True, 1e-5, kind, out, mode, layout, given, scale * 0)
    found = te.normalization_fwd(*args)
    for one, other in zip(found[:5], wanted[:5], strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(raw(one), raw(other))
    np.testing.assert_array_equal(found[5], mu)
    np.testing.assert_array_equal(found[6], rsigma)


def test_reference_of_qvalue_is_near():
    x = normal(64, 96, seed=5)
    gamma, beta = jnp.ones(96), jnp.zeros(96)
    for mode in MODES:
        args = (x, gamma, beta, False, 1e-5, "layernorm", "float8_e5m2", mode, 2, jnp.ones(1) * 9)
        for one, other in zip(te.normalization_fwd(*args), PLAIN_CODES(*args), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            one, other = (np.asarray(a, np.float32) for a in (one, other))
            near = np.abs(one - other) <= 1e-6 * np.abs(other) + 1e-6
            assert near.mean() > 0.99


PLAIN_CODES = jax.jit(reference.normalization_fwd, static_argnums=range(3, 9))


def test_amax():
    x = jnp.asarray([[1.0, -3.0, 2.0, 0.0]])
    args = (x, jnp.ones(4), None, False, 0.0, "rmsnorm")
    found = te.normalization_fwd(*args, output_amax_when_no_scaling=True)
    np.testing.assert_array_equal(found[4], jnp.max(jnp.abs(found[0])).reshape(1))
    given = {"amax": jnp.full((1,), 9.0)}
    assert te.normalization_fwd(*args, **given, output_amax_when_no_scaling=True)[4] == 9
    assert te.normalization_fwd(*args, **given)[4] == 9
    assert te.normalization_fwd(*args, "int8", 1, 0, **given)[4] == 9
    assert te.normalization_fwd(*args, "int8", 1, 0)[4] == found[4]


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES[1::2])
def test_a_quantized_layer_is_straight_through(mode):
    kind = KINDS[mode.is_mx]
    x, dz = (normal(32, 64, seed=i) for i in range(2))
    gamma, beta = jnp.linspace(0.5, 1.5, 64), jnp.linspace(-1, 1, 64)

    def layer(op, *more):
        run = lambda x, gamma, beta: op(x, gamma, beta, kind, False, 1e-6, *more)  # noqa: E731

        def both(x, gamma, beta):
            out, pull = jax.vjp(run, x, gamma, beta)
            return out, pull(dz)

        return jax.jit(both)(x, gamma, beta)

    scale = jnp.full((1,), 60.0)
    plain, wanted = layer(te.layernorm)
    for op in (te.layernorm, reference.layernorm):
        out, grads = layer(op, "float8_e4m3fn", mode, scale)
        assert 0 < np.abs(out - plain).max() < 0.3
        for one, other in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    # Of the op itself: cotangents of quantized values are quantized values.
    args = (gamma, beta, False, 1e-6, kind, "float8_e5m2", mode, 2, scale)
    loss = lambda x: jnp.sum(te.normalization_fwd(x, *args)[0].astype(jnp.float32) * dz)  # noqa: E731
    assert np.isfinite(jax.jit(jax.grad(loss))(x)).all()


def test_far_from_zero():
    x = normal(4, 4096) + 1e4
    out, *_ = wanted_norms.forward(x, np.ones(4096), np.zeros(4096), "layernorm", False, 1e-6)
    found = te.layernorm(x, jnp.ones(4096), jnp.zeros(4096))
    assert error(found, out) < 2e-6


def test_sums_are_the_same_each_time():
    rng = np.random.default_rng(0)
    x, dz = (jnp.asarray(rng.normal(size=(1037, 130)), jnp.float32) for _ in range(2))
    gamma = jnp.ones(130)
    *_, mu, rsigma = te.normalization_fwd(x, gamma, gamma, False, 1e-6, "layernorm")
    args = (dz, x, mu, rsigma, gamma, gamma, False, 1e-6, "layernorm")
    first = te.normalization_bwd(*args)
    for _ in range(5):
        for one, other in zip(first, te.normalization_bwd(*args), strict=True):
            np.testing.assert_array_equal(one, other)


def test_names_of_norms():
    x = jnp.ones((2, 3))
    for name in ("rmsnorm", "RMSNorm", "rms_norm", 1):
        np.testing.assert_allclose(te.layernorm(x, jnp.ones(3), None, name), x, rtol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("shape", "kind"), [((0, 4), "layernorm"), ((3, 0), "rmsnorm")])
def test_nothing(shape, kind):
    x, gamma = jnp.ones(shape), jnp.ones(shape[-1:])
    loss = lambda *args: te.layernorm(*args, kind).sum()  # noqa: E731
    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(x, gamma, gamma)
    assert [g.shape for g in grads] == [x.shape, gamma.shape, gamma.shape]
    assert not grads[1].any()


def test_it_is_the_kernel_that_runs():
    x, gamma = jnp.ones((8, 16)), jnp.ones(16)
    run = jax.jit(jax.grad(lambda x: te.layernorm(x, gamma, gamma).sum()))
    text = run.lower(x).compile().as_text()
    for op in ("norm_forward", "norm_backward"):
        assert f'custom_call_target="te_ffi_kernels.{op}"' in text
