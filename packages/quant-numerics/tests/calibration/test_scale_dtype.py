"""Scales in 16 bits, against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from quant_numerics import (
    calibrate,
    dequantize,
    get_qtype,
    has_normal_scales,
    qarray,
    quantize,
    quantize_with,
    scale_of,
)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("qtype", ["int4", "int8", "nf4"])
def test_values_are_chosen_for_the_rounded_scales(qtype, dtype):
    x = np.random.default_rng(0).normal(size=(64, 48)).astype(np.float32)
    q = quantize(x, qtype, channel_axes=(1,), tile_axes={0: 16}, scale_dtype=dtype)
    kind = get_qtype(qtype)
    tiles = x.reshape(4, 16, 48).astype(np.float64)
    scale = (np.abs(tiles).max(1) / kind.qmax).astype(np.float32).astype(dtype)
    assert q.scale.dtype == dtype
    np.testing.assert_array_equal(q.scale, scale)
    ratio = tiles / scale[:, None].astype(np.float64)
    if kind.codebook is None:
        expected = np.clip(np.round(ratio), -kind.qmax, kind.qmax)
    else:
        expected = np.abs(ratio[..., None] - np.asarray(kind.codebook)).argmin(-1)
    differing = np.asarray(q.qvalue, np.int64) != expected.reshape(64, 48)
    assert differing.mean() < 1e-3  # float32 may round a tie to the other side
    again = quantize_with(x, qtype, *scale_of(
        calibrate(x, qtype, channel_axes=(1,), tile_axes={0: 16}), qtype, dtype))  # fmt: skip
    np.testing.assert_array_equal(again.qvalue, q.qvalue)
    np.testing.assert_array_equal(dequantize(qarray(q.qvalue, q.scale, qtype, "float32")),
                                  dequantize(q))  # fmt: skip


@pytest.mark.slow
def test_what_leaves_the_range_of_float16_is_told():
    for x, expected in (([1.0, 0.0], True), ([1e-6, 1.0], False), ([1.0, 1e9], False)):
        found = calibrate(np.asarray(x, np.float32), "int8", channel_axes=(0,))
        assert bool(has_normal_scales(found, "int8", "float16")) == expected
        assert bool(has_normal_scales(found, "int8", "bfloat16"))
    with pytest.raises(ValueError, match="scale_dtype must be float8_e8m0fnu"):
        quantize(jnp.ones(32), "mxfp8", tile_axes={0: 32}, scale_dtype="float16")
