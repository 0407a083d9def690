"""Many rows of bfloat16, which AMX and AVX512-BF16 multiply with weights in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.te.weights import matrix, weight

# Columns are no whole panels, and rows no whole tiles.
CASES = {
    "w4, groups of 32": (te.gemm_w4a16, 37, 96, 50, 32),
    "w4, groups of 64": (te.gemm_w4a16, 16, 320, 33, 64),
    "w4, groups of 128": (te.gemm_w4a16, 300, 384, 70, 128),
    "w4, groups of 256": (te.gemm_w4a16, 65, 512, 129, 256),
    "w4, groups of 24": (te.gemm_w4a16, 31, 72, 17, 24),
    "w4": (te.gemm_w4a16, 47, 201, 40, 0),
    "w8, groups of 32": (te.gemm_w8a16, 81, 96, 50, 32),
    "w8, groups of 128": (te.gemm_w8a16, 64, 384, 33, 128),
    "w8": (te.gemm_w8a16, 267, 201, 40, 0),
    "w8, as of few rows": (te.gemm_w8a16, 257, 65, 16, 0),
}


def made(case, *, scale_dtype=np.float32, wide=False, seed=0):
    """Return x, the packed weight, and the weight in float64."""
    op, m, k, n, group = CASES[case]
    bits = 4 if op is te.gemm_w4a16 else 8
    rng = np.random.default_rng([list(CASES).index(case), seed])
    qvalue, scale = weight(rng, k, n, bits, k // group if group else 1)
    if wide:
        scale = scale * 10.0 ** rng.integers(-9, 7, scale.shape)
    scale = scale.astype(scale_dtype)
    pack = te.pack_w4 if bits == 4 else te.pack_w8
    x = jnp.asarray(rng.normal(size=(m, k)), jnp.bfloat16)
    return op, x, pack(jnp.asarray(qvalue), jnp.asarray(scale)), matrix(qvalue, scale)


def assert_near(y, x, full, groups):
    """A weight with groups may be rounded to bfloat16; without, only x is, to 15 bits."""
    wide = np.asarray(x, np.float64)
    bound = (2.0**-8 + 2.0**-16 if groups else 2.0**-12) * (np.abs(wide) @ np.abs(full))
    assert (np.abs(np.asarray(y, np.float64) - wide @ full) <= bound).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_beside_float64(case):
    groups = CASES[case][-1]
    dtypes = (np.float32, np.float16) if CASES[case][0] is te.gemm_w4a16 else (np.float32,)
    for scale_dtype in dtypes:
        op, x, w, full = made(case, scale_dtype=scale_dtype)
        y = op(x, w, out_dtype=jnp.float32)
        assert_near(y, x, full, groups)
        for dtype in (jnp.bfloat16, jnp.float16):  # rounded once
            np.testing.assert_array_equal(op(x, w, out_dtype=dtype), y.astype(dtype))
    op, x, w, full = made(case, wide=True)
    assert_near(op(x, w, out_dtype=jnp.float32), x, full, groups)


@pytest.mark.sample(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("case", ["w4, groups of 32", "w4", "w8"])
def test_a_bad_value_spoils_its_row_alone(case, bad):
    op, x, w, _ = made(case)
    clean = np.asarray(op(x, w), np.float32)
    y = np.asarray(op(x.at[3, 17].set(bad), w), np.float32)
    assert not np.isfinite(y[3]).any()
    np.testing.assert_array_equal(np.delete(y, 3, 0), np.delete(clean, 3, 0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("op", [te.gemm_w4a16, te.gemm_w8a16])
def test_weights_of_a_stack(op):
    """By index and by groups: the bits are those of each weight alone."""
    rng, k, n, group = np.random.default_rng(7), 96, 70, 32
    parts = [weight(rng, k, n, 4 if op is te.gemm_w4a16 else 8, k // group) for _ in range(3)]
    qvalue, scale = (jnp.asarray(np.stack(part)) for part in zip(*parts, strict=True))
    w = (te.pack_w4 if op is te.gemm_w4a16 else te.pack_w8)(qvalue, scale)
    x = jnp.asarray(rng.normal(size=(180, k)), jnp.bfloat16)
    sizes = (70, 3, 100)  # and 7 rows without a weight
    y = op(x, w, group_sizes=jnp.array(sizes), out_dtype=jnp.float32)
    begin = 0
    for i, size in enumerate(sizes):
        one, of_group = jax.tree.map(lambda b, i=i: b[i], w), x[begin : begin + size]
        alone = op(of_group, one, out_dtype=jnp.float32)
        np.testing.assert_array_equal(y[begin : begin + size], alone)
        np.testing.assert_array_equal(op(of_group, w, index=i, out_dtype=jnp.float32), alone)
        assert_near(alone, of_group, matrix(*parts[i]), True)
        begin += size
    np.testing.assert_array_equal(y[begin:], 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", [0, 8, 24, 64, 700])
def test_damaged_weights_are_refused(place):
    # Sound weights of other tests, of the same bits, may have been where the damaged ones are now.
    op, x, w, _ = made("w4, groups of 64", seed=place)
    good = op(x, w)
    damaged = jax.tree.map(lambda b: b.at[1, place].set(b[1, place] ^ np.uint8(3)), w)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="packed weight: panel 1"):
        jax.block_until_ready(op(x, damaged))
    np.testing.assert_array_equal(op(x, w), good)
