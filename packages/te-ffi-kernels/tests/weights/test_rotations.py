"""Matmuls of rows that the kernel rotates: by signs, then by a Hadamard matrix of each block."""

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
OPS = [
    (te.gemm_w8a8, te.pack_w8, 8),
    (te.gemm_w8a16, te.pack_w8, 8),
    (te.gemm_w4a16, te.pack_w4, 4),
    (te.gemm_w4a8, te.pack_w4, 4),
]


def hadamard(size):
    """Return Sylvester's matrix: [[H, H], [H, -H]]."""
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return found


def rotated(x, signs, block):
    """Rotate rows in float64, by matrices."""
    blocks = (np.asarray(x, np.float64) * np.asarray(signs)).reshape(len(x), K // block, block)
    return (blocks @ hadamard(block)).reshape(x.shape) / np.sqrt(block)


def made(op, pack, bits, m=7, groups=1, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    qvalue, scale = weight(rng, K, N, bits, groups)
    signs = jnp.asarray(rng.choice([-1, 1], K), jnp.int8)
    x = jnp.asarray(rng.normal(size=(m, K)), dtype)
    return x, signs, matrix(qvalue, scale), pack(jnp.asarray(qvalue), jnp.asarray(scale))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("op", "pack", "bits"), OPS)
def test_beside_float64(op, pack, bits):
    for dtype, m, groups, block in (
        (jnp.float32, 7, 1, 32),
        (jnp.float32, 1, 3, 8),
        (jnp.bfloat16, 70, 3, 32),
        (jnp.float16, 3, 1, 2),
        (jnp.float32, 0, 1, 16),
    ):
        x, signs, full, packed = made(op, pack, bits, m, groups, dtype)
        options = {"signs": signs, "rotation": block}
        found = op(x, packed, out_dtype=jnp.float32, **options)
        wanted = rotated(x, signs, block) @ full
        quantizes = op in (te.gemm_w8a8, te.gemm_w4a8)
        off = 0.03 if quantizes else 1e-4
        np.testing.assert_allclose(found, wanted, rtol=0, atol=off * np.abs(wanted).max(initial=1))
        reference = getattr(te.reference, op.__name__)
        alike = reference(x, packed, out_dtype=jnp.float32, **options)
        # Up to the order of sums of floats.
        np.testing.assert_allclose(
            found, alike, rtol=1e-5, atol=2e-4 * np.abs(wanted).max(initial=1)
        )


def test_int8_is_that_of_rows_that_are_rotated_before():
    """Bit by bit: a kernel rotates in the order of its reference."""
    for _, pack, bits in OPS[:1]:
        x, signs, _, packed = made(te.gemm_w8a8, pack, bits)
        for block in (2, 4, 8, 16, 32):
            before = te.reference.gemm_w8a8(x, packed, signs=signs, rotation=block)
            found = te.gemm_w8a8(x, packed, signs=signs, rotation=block)
            np.testing.assert_array_equal(found, before)


def test_of_a_stack_mapped_and_differentiated():
    x, signs, full, packed = made(*OPS[0])
    stack = jax.tree.map(lambda one: jnp.stack([0 * one, one]), packed)
    options = {"signs": signs, "rotation": 16}
    plain = te.gemm_w8a8(x, packed, **options)

    @jax.jit
    def last(x):
        def step(y, i):
            return (te.gemm_w8a8(x, stack, index=i, **options), None)

        return lax.scan(step, jnp.zeros_like(plain), jnp.array([1]))[0]

    np.testing.assert_array_equal(last(x), plain)
    several = jnp.stack([x, 2 * x])
    mapped = jax.vmap(lambda x: te.gemm_w8a8(x, packed, **options))(several)
    np.testing.assert_allclose(mapped, jnp.stack([plain, 2 * plain]), rtol=1e-6)
    grad = jax.grad(lambda x: te.gemm_w8a8(x, packed, **options).sum())(x)
    blocks = hadamard(16) / 4
    back = (full.sum(-1).reshape(-1, 16) @ blocks).reshape(-1) * np.asarray(signs)
    np.testing.assert_allclose(grad, np.tile(back, (len(x), 1)), rtol=1e-4, atol=1e-4)


def test_each_device_rotates_its_rows(mesh):
    x, signs, _, packed = made(*OPS[0], m=8)
    run = jax.jit(lambda x, s, w: te.gemm_w8a8(x, w, signs=s, rotation=32))
    placed = put(mesh, x, "data", None), put(mesh, signs, None)
    wanted, compiled = run(x, signs, packed), run.lower(*placed, packed).compile()
    assert_block(compiled, "gemm_w8a8", f"f32[{8 // mesh.shape['data']},{N}]")
    np.testing.assert_array_equal(compiled(*placed, packed), wanted)


def test_on_other_platforms():
    """Without a kernel that rotates, rows are rotated before one that does not, or by XLA."""
    x, signs, _, packed = made(*OPS[0])
    run = jax.jit(lambda x: te.gemm_w8a8(x, packed, signs=signs, rotation=32))
    text = run.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    # Where kernels for CUDA are built, one that takes rotated rows is called.
    assert "rotation" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotation": 32}, "signs must be int8"),
        ({"rotation": 3}, "a power of two from 2 that divides the 96 rows"),
        ({"rotation": 64}, "that divides the 96 rows of the weight, got 64"),
        ({"signs": jnp.ones(K, jnp.int8)}, "got 0"),
        ({"signs": jnp.ones(K), "rotation": 32}, r"signs must be int8\[96\]"),
        ({"signs": jnp.ones(K + 1, jnp.int8), "rotation": 32}, r"int8\[97\]"),
    ],
)
def test_errors(options, message):
    x, _, _, packed = made(*OPS[0])
    with pytest.raises(ValueError, match=message):
        te.gemm_w8a8(x, packed, **options)


@pytest.mark.slow
def test_rows_in_groups_are_not_rotated():
    x, signs, _, packed = made(*OPS[0])
    stack = jax.tree.map(lambda one: one[None], packed)
    with pytest.raises(ValueError, match="Rotate x before the call"):
        te.gemm_w8a8(x, stack, group_sizes=jnp.array([7]), signs=signs, rotation=32)
