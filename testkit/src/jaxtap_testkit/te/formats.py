"""References for quantized formats, by NumPy and ml_dtypes."""

import ml_dtypes
import numpy as np

E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
FORMATS = {"float8_e4m3fn": E4M3, "float8_e5m2": E5M2, "int8": np.int8}


def most(name):
    """Largest code of a format."""
    return 127.0 if name == "int8" else float(ml_dtypes.finfo(FORMATS[name]).max)


def raw(x):
    """Bits of an array."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def flushed(x):
    """As float32, with subnormal numbers as zeros of their sign."""
    with np.errstate(invalid="ignore"):
        numbers = np.asarray(x).astype(np.float32)
        tiny = np.abs(numbers) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), numbers), numbers)


def rounded(ratio, name):
    """Return quantized values: half to even, saturated; NaN is 0 in int8."""
    nan = np.isnan(ratio)
    cut = np.clip(np.where(nan, 0, ratio), -most(name), most(name))
    if name == "int8":
        return np.rint(cut).astype(np.int8)
    qvalue = cut.astype(FORMATS[name])
    qvalue.view(np.uint8)[nan] = 0x7F
    return qvalue


def absmax(x, axis=None):
    """Largest magnitude, not counting NaN; keeps axes."""
    x = np.abs(x.astype(np.float64))
    return np.where(np.isnan(x), 0, x).max(axis=axis, initial=0, keepdims=axis is not None)


def per_tensor(matrix, scale, name):
    """Quantized values of a float32 matrix."""
    return rounded(matrix * np.float32(scale), name)


def per_channel(matrix, name, axis):
    """Quantized values and scales of rows (axis 1) or columns (axis 0)."""
    largest = absmax(matrix, axis).astype(np.float32)
    usable = (largest > 0) & np.isfinite(largest)
    scale = np.minimum(
        np.float32(most(name)) / np.where(usable, largest, np.float32(1)), np.float32(2.0**126)
    )
    scale = np.where(usable, scale, np.float32(1))
    return rounded(matrix * scale, name), (np.float32(1) / scale).reshape(-1)


def mx(matrix, name, axis):
    """Return values and biased exponents of blocks of 32."""
    rows, cols = matrix.shape
    shape = (rows, cols // 32, 32) if axis == 1 else (rows // 32, 32, cols)
    blocks = matrix.astype(np.float64).reshape(shape)
    over = 2 if axis == 1 else 1
    largest = absmax(blocks, over)
    exponent = np.full(largest.shape, -127)
    finite = (largest > 0) & np.isfinite(largest)
    exponent[finite] = np.ceil(np.log2(largest[finite] / most(name))).astype(int)
    # The logarithm may be off by a rounding.
    exponent[finite & (largest > most(name) * 2.0**exponent)] += 1
    exponent[finite & (largest <= most(name) * 2.0 ** (exponent - 1))] -= 1
    exponent = np.where(np.isinf(largest), 127, np.maximum(exponent, -127))
    with np.errstate(invalid="ignore"):
        qvalue = rounded(blocks / 2.0**exponent, name)
    return qvalue.reshape(rows, cols), (exponent + 127).astype(np.uint8).squeeze(over)


def gelu(x):
    """In its form with tanh."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    """Its derivative."""
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    inner = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + np.tanh(u)) + 0.5 * x * (1 - np.tanh(u) ** 2) * inner
