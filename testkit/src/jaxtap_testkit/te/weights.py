"""Weights and activations for tests."""

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
