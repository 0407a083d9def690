"""Weights and activations for tests."""

import jax.numpy as jnp
import numpy as np


def weight(rng, k, n, bits=8, groups=1):
    """Return quantized values int8[k, n] and scale float32[groups, n]."""
    most = 2 ** (bits - 1) - 1
    qvalue = rng.integers(-most, most + 1, (k, n)).astype(np.int8)
    return qvalue, rng.uniform(0.001, 0.1, (groups, n)).astype(np.float32)


def matrix(qvalue, scale):
    """Return what they stand for, in float64."""
    k, _ = qvalue.shape
    return qvalue.astype(np.float64) * np.repeat(scale.astype(np.float64), k // scale.shape[0], 0)


def quantized_rows(x):
    """Return int8 values of rows and their scales, by NumPy in float32."""
    x = np.asarray(x, np.float32)
    most = np.abs(x).max(-1, keepdims=True, initial=0)
    scale = np.maximum(most * np.float32(1 / 127), np.finfo(np.float32).tiny)
    return np.clip(np.rint(x / scale), -127, 127).astype(np.int64), scale


# By the definitions of the formats, beside which kernels have integers times a factor.
_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
# Dettmers et al., "QLoRA" (arXiv:2305.14314), appendix E.
_NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
NUMBERS = {
    "e2m1": np.asarray(_HALF + [-value for value in _HALF]),
    "iq4_nl": np.asarray(_IQ4_NL, np.float64),
    "nf4": np.asarray(_NF4),
}
KINDS = (
    ("e2m1", "float32"),
    ("e2m1", "float8_e8m0fnu"),
    ("e2m1", "float8_e4m3fn"),
    ("iq4_nl", "float16"),
    ("nf4", "float32"),
)
"""Tables of 4 bits, and dtypes of scales that go with them."""


def table_weight(rng, k, n, groups, table, scale_dtype):
    """Return arguments of ``te.pack_w4``, and the matrix that they stand for, in float64."""
    places = rng.integers(0, 16, (k, n)).astype(np.int8)
    scale = rng.uniform(0.001, 0.1, (groups, n)) * (1000 if scale_dtype == "float8_e4m3fn" else 1)
    scale = np.asarray(jnp.asarray(scale, jnp.float32).astype(scale_dtype))
    given, wide = {"table": table}, scale.astype(np.float64)
    if scale_dtype == "float8_e4m3fn":
        given["column_scale"] = rng.uniform(1e-4, 1e-3, n).astype(np.float32)
        wide = wide * given["column_scale"]
    values = NUMBERS[table][places] * np.repeat(wide, k // groups, 0)
    return (jnp.asarray(places), jnp.asarray(scale)), given, values
