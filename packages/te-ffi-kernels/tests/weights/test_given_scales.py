"""Matmuls of rows that all have a scale that was measured before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import te_ffi_kernels as te
from jaxtap_testkit.meshes import put
from jaxtap_testkit.te.calls import assert_block
from jaxtap_testkit.te.weights import matrix, weight

K, N = 96, 40
OPS = [(te.gemm_w8a8, te.pack_w8, 8), (te.gemm_w4a8, te.pack_w4, 4)]


def made(op, pack, bits, m=7, groups=1, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    qvalue, scale = weight(rng, K, N, bits, groups)
    x = jnp.asarray(rng.normal(size=(m, K)), dtype)
    return x, matrix(qvalue, scale), pack(jnp.asarray(qvalue), jnp.asarray(scale))


def rounded(x, scale):
    """Return what an array of the scale's integers stands for, in float64."""
    x, scale = np.nan_to_num(np.asarray(x, np.float64), posinf=1e9, neginf=-1e9), np.float32(scale)
    return np.clip(np.round(x / scale), -127, 127) * scale


@pytest.mark.sample(1)
@pytest.mark.parametrize(("op", "pack", "bits"), OPS)
def test_beside_float64(op, pack, bits):
    for dtype, m, groups, scale in (
        (jnp.float32, 7, 1, 0.031),
        (jnp.float32, 1, 3, 0.004),  # cuts off what is beyond 0.5
        (jnp.bfloat16, 70, 3, 0.0213),
        (jnp.float16, 3, 1, 1.0),
        (jnp.float32, 0, 1, 0.02),
    ):
        x, full, packed = made(op, pack, bits, m, groups, dtype)
        options = {"out_dtype": jnp.float32, "x_scale": scale}
        found, wanted = op(x, packed, **options), rounded(x, scale) @ full
        most = np.abs(wanted).max(initial=1)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * most)
        alike = getattr(te.reference, op.__name__)(x, packed, **options)
        np.testing.assert_allclose(found, alike, rtol=0, atol=1e-5 * most)


def test_what_is_not_finite_saturates():
    x, full, packed = made(*OPS[0])
    x = x.at[0, 0].set(jnp.inf).at[1, 2].set(-jnp.inf).at[2, 5].set(jnp.nan)
    for run in (te.gemm_w8a8, te.reference.gemm_w8a8):
        found = run(x, packed, x_scale=0.02)
        np.testing.assert_allclose(found, rounded(x, 0.02) @ full, rtol=0, atol=1e-4)


def test_of_a_stack_in_groups_rotated_and_with_additions():
    x, _, packed = made(*OPS[0])
    stack = jax.tree.map(lambda one: jnp.stack([0 * one, one]), packed)
    plain = te.gemm_w8a8(x, packed, x_scale=0.02)
    scale = jnp.float32(0.02)

    @jax.jit
    def last(x, scale):
        def step(y, i):
            return te.gemm_w8a8(x, stack, index=i, x_scale=scale), None

        return lax.scan(step, jnp.zeros_like(plain), jnp.array([1]))[0]

    np.testing.assert_array_equal(last(x, scale), plain)
    pair = jax.tree.map(lambda one: jnp.stack([one, one]), packed)
    sizes = jnp.array([3, 4])
    grouped = te.gemm_w8a8(x, pair, group_sizes=sizes, x_scale=scale)
    np.testing.assert_array_equal(grouped, plain)
    bias, residual = jnp.arange(N, dtype=jnp.float32), jnp.ones((len(x), N))
    added = te.gemm_w8a8(x, packed, x_scale=scale, bias=bias, residual=residual)
    np.testing.assert_array_equal(added, plain + bias[None] + residual)
    signs = jnp.asarray(np.random.default_rng(1).choice([-1, 1], K), jnp.int8)
    options = {"signs": signs, "rotation": 32, "x_scale": scale}
    rotated = te.gemm_w8a8(x, packed, **options)
    np.testing.assert_array_equal(rotated, te.reference.gemm_w8a8(x, packed, **options))


def test_mapped_and_differentiated():
    x, full, packed = made(*OPS[0])
    scales = jnp.array([0.01, 0.02])
    one = lambda scale: te.gemm_w8a8(x, packed, x_scale=scale)  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(one)(scales), jnp.stack([*map(one, scales)]))
    several = jnp.stack([x, 2 * x])
    mapped = jax.vmap(lambda x: te.gemm_w8a8(x, packed, x_scale=scales[1]))(several)
    for row, found in zip(several, mapped, strict=True):
        np.testing.assert_array_equal(found, te.gemm_w8a8(row, packed, x_scale=scales[1]))
    grad = jax.grad(lambda x: te.gemm_w8a8(x, packed, x_scale=scales[1]).sum())(x)
    np.testing.assert_allclose(grad, np.tile(full.sum(-1), (len(x), 1)), rtol=1e-4, atol=1e-4)


def test_each_device_has_the_scale(mesh):
    x, _, packed = made(*OPS[0], m=8)
    run = jax.jit(lambda x, scale, w: te.gemm_w8a8(x, w, x_scale=scale))
    placed, scale = put(mesh, x, "data", None), jnp.float32(0.02)
    wanted, compiled = run(x, scale, packed), run.lower(placed, scale, packed).compile()
    assert_block(compiled, "gemm_w8a8", f"f32[{8 // mesh.shape['data']},{N}]")
    np.testing.assert_array_equal(compiled(placed, scale, packed), wanted)


def test_on_other_platforms():
    """Kernels for GPUs measure each row: there the reference runs."""
    x, _, packed = made(*OPS[0])
    run = jax.jit(lambda x: te.gemm_w8a8(x, packed, x_scale=0.02))
    text = run.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "te_ffi_kernels" not in text


@pytest.mark.parametrize("scale", [jnp.ones(2), jnp.ones((1, 1)), 1, jnp.int8(1), True])
def test_a_scale_is_one_float(scale):
    x, _, packed = made(*OPS[0])
    with pytest.raises(TypeError, match="x_scale must be a scalar float"):
        te.gemm_w8a8(x, packed, x_scale=scale)
