"""Gradients, vmap, scan, jit, export: what programs do with the ops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te.formats import raw
from te_ffi_kernels import ScalingMode

pytestmark = pytest.mark.sample(2)

NONE, ONE, ZERO = jnp.zeros((0,)), jnp.ones((1,)), jnp.zeros((1,))
MODES = [ScalingMode(1), ScalingMode(2), ScalingMode(64)]


def quantize(x, mode=1, layout=2, out="float8_e4m3fn", scale=ONE * 8):
    extra = jnp.zeros((0,), jnp.uint32), ZERO, jnp.zeros((1, 1), jnp.bfloat16)
    return te.dbias_quantize(x, scale, ZERO, *extra, out, mode, layout, -1, None, True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", [0, 1, 2])
def test_straight_through(mode, layout):
    """Quantized values times scales are x, to a gradient, whichever direction they are of."""
    x, weight, bias_weight = normal(32, 64) * 1e3, normal(32, 64, seed=1), normal(64, seed=2)

    def loss(x):
        out = quantize(x, mode, layout, "float8_e5m2")
        both = []
        if layout != 1:
            both.append(te.dequantize(out[0], ZERO, ZERO, out[2], jnp.float32, mode))
        if layout != 0:
            back = te.dequantize(out[1], ZERO, ZERO, out[3], jnp.float32, mode, True)
            both.append(back if mode.is_mx else back.T)
        return sum(jnp.sum(b * weight) for b in both) + jnp.sum(out[5] * bias_weight)

    found = jax.jit(jax.grad(loss))(x)
    times = 2 if layout == 2 else 1
    # Cotangents of quantized values are float8_e5m2 themselves, which are off by up to an eighth.
    error = np.abs(found - times * weight - bias_weight[None])
    assert (error <= 0.13 * times * np.abs(weight) + 2e-3).all()


@pytest.mark.slow
def test_sums_of_columns_have_an_exact_gradient():
    x, weight = normal(5, 7).astype(jnp.bfloat16), normal(7, seed=1)
    found = jax.grad(lambda x: jnp.sum(quantize(x, 1, 2, "int8")[5] * weight.astype(x.dtype)))(x)
    np.testing.assert_array_equal(found, jnp.broadcast_to(weight.astype(x.dtype), x.shape))


def test_gradient_of_dequantize():
    qvalue, scales = normal(6, 8).astype(jnp.float8_e4m3fn), jnp.linspace(0.5, 2, 6)

    def loss(scales):
        out = te.dequantize(qvalue, ZERO, ZERO, scales, jnp.float32, ScalingMode.CHANNEL_SCALING)
        return jnp.sum(out**2)

    wanted = 2 * scales * jnp.sum(qvalue.astype(jnp.float32) ** 2, axis=1)
    np.testing.assert_allclose(jax.grad(loss)(scales), wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_vmap_and_scan(mode):
    x = normal(3, 32, 64)
    by_vmap = jax.vmap(lambda x: quantize(x, mode))(x)
    by_scan = jax.lax.scan(lambda c, x: (c, quantize(x, mode)), 0, x)[1]
    for i in range(3):
        for one, other, wanted in zip(by_vmap, by_scan, quantize(x[i], mode), strict=True):
            np.testing.assert_array_equal(raw(one[i]), raw(wanted))
            np.testing.assert_array_equal(raw(other[i]), raw(wanted))


def gemm(lhs, rhs):
    return te.gemm_v2(lhs, NONE, rhs, NONE, NONE, ONE, ZERO, jnp.float32, ((1,), (0,)), 0)


@pytest.mark.slow
def test_vmap_of_matmuls():
    lhs, rhs = normal(3, 5, 7), normal(3, 7, 4, seed=1)
    np.testing.assert_allclose(jax.vmap(gemm)(lhs, rhs), lhs @ rhs, rtol=1e-5, atol=1e-5)
    found = jax.vmap(gemm, (0, None))(lhs, rhs[0])
    np.testing.assert_allclose(found, lhs @ rhs[0], rtol=1e-5, atol=1e-5)
    grads = jax.vmap(jax.grad(lambda a, b: gemm(a, b).sum()), (0, None))(lhs, rhs[0])
    np.testing.assert_allclose(grads[0], jnp.broadcast_to(rhs[0].sum(1), (5, 7)), rtol=1e-5)


@pytest.mark.slow
def test_gradients_of_gradients(leaks):
    lhs, rhs = normal(3, 4), normal(4, 5, seed=1)
    loss = lambda op: lambda a: jnp.sum(jnp.sin(op(a, rhs)))  # noqa: E731
    second = lambda op: jax.grad(lambda a: jnp.sum(jax.grad(loss(op))(a) ** 2))  # noqa: E731
    found, wanted = leaks(second(gemm))(lhs), jax.jit(second(jnp.matmul))(lhs)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_amax_can_be_donated():
    extra = jnp.zeros((0,), jnp.uint32), ZERO, jnp.zeros((1, 1), jnp.bfloat16)

    def step(x, amax):
        return te.dbias_quantize(x, ONE, amax, *extra, "float8_e5m2", 1, 0)[4]

    amax = jax.jit(step, donate_argnums=1)(jnp.ones((4, 4)) * 3, jnp.zeros((1,)) + 2)
    assert amax == 3


def test_export():
    def both(x):
        out = quantize(x)
        return te.dequantize(out[0], ZERO, ZERO, out[2]), gemm(x, x.T)

    x = normal(8, 16)
    exported = jax.export.export(
        jax.jit(both), platforms=["cpu"], disabled_checks=te.export_checks()
    )(x)
    again = jax.export.deserialize(exported.serialize())
    for one, other in zip(again.call(x), jax.jit(both)(x), strict=True):
        np.testing.assert_array_equal(one, other)


def test_export_of_symbolic_sizes_runs_the_reference():
    sizes = jax.export.symbolic_shape("a, b")
    shape = jax.ShapeDtypeStruct(sizes, jnp.float32)
    run = jax.jit(lambda x: gemm(x, x.T))
    exported = jax.export.export(run, platforms=["cpu"])(shape)
    x = normal(3, 5)
    np.testing.assert_allclose(exported.call(x), x @ x.T, rtol=1e-5, atol=1e-5)


def test_warm_ups_are_of_call_sites():
    run = jax.jit(lambda x: quantize(quantize(x)[0].astype(jnp.float32), 2)[0])
    before = te.warm_counts().get("te_ffi_kernels.dbias_quantize", 0)
    compiled = run.lower(normal(32, 64)).compile()
    for _ in range(3):
        jax.block_until_ready(compiled(normal(32, 64)))
    assert te.warm_counts()["te_ffi_kernels.dbias_quantize"] == before + 2
