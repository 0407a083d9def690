"""QArray samples: NumPy references and inputs for tests of ops."""

import dataclasses

import numpy as np
from jax import lax

from quant_numerics import Convolution, QArray, get_qtype

NHWC = ("NHWC", "HWIO", "NHWC")

CONVOLUTIONS = {
    "default layout": ((2, 3, 6, 5), (4, 3, 3, 2), ((1, 1), "VALID"), {}),
    "nhwc same": ((2, 6, 5, 3), (3, 2, 3, 4), ((2, 1), "SAME"), {"dimension_numbers": NHWC}),
    "mixed layouts": (
        (6, 3, 5, 2),
        (2, 4, 3, 3),
        ((1, 2), [(1, 0), (2, 1)]),
        {"dimension_numbers": ("HCWN", "WOHI", "CNWH")},
    ),
    "explicit numbers": (
        (2, 6, 3),
        (3, 3, 4),
        ((1,), "SAME"),
        {"dimension_numbers": lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1))},
    ),
    "rhs dilation": ((2, 3, 9, 9), (4, 3, 3, 3), ((1, 1), "VALID", None, (2, 3)), {}),
    "transposed": ((2, 3, 4, 4), (4, 3, 3, 3), ((1, 1), [(2, 2), (1, 3)], (2, 3)), {}),
    "feature groups": (
        (2, 5, 5, 6),
        (3, 3, 2, 9),
        ((1, 1), "SAME"),
        {"dimension_numbers": NHWC, "feature_group_count": 3},
    ),
    "depthwise": (
        (2, 5, 5, 4),
        (3, 3, 1, 8),
        ((2, 2), "SAME"),
        {"dimension_numbers": NHWC, "feature_group_count": 4},
    ),
    "batch groups": (
        (6, 5, 5, 3),
        (2, 2, 3, 6),
        ((1, 1), "VALID"),
        {"dimension_numbers": NHWC, "batch_group_count": 3},
    ),
    "batch groups, features first": ((4, 3, 5), (6, 3, 2), ((1,), "SAME"), {"batch_group_count": 2,
        "dimension_numbers": ("NCH", "OIH", "CNH")}),
    "no spatial axes": ((2, 3), (4, 3), ((), ()), {}),
    "three spatial axes": ((1, 2, 3, 4, 3), (3, 2, 2, 2, 2), ((1, 1, 1), "SAME"), {}),
}  # fmt: skip
"""By name: shapes of both operands, strides and so on, other arguments of a convolution."""


def train_conv(x, w, *, dimension_numbers=None, **options):
    """Quantize and convolve for training; the arguments are those of lax and of ``train``."""
    fields = [field.name for field in dataclasses.fields(Convolution)]
    given = {name: options.pop(name) for name in fields if name in options}
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    return Convolution(numbers, **given).train(x, w, **options)


def normal(*shape, seed=0):
    """Return normal float32 numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def divisors(n):
    """Return all divisors of a number, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def per_element(part, shape):
    """Return scales or zero points, one per element, in float64."""
    part = np.asarray(part).astype(np.float64)
    for axis, size in enumerate(shape):
        if part.shape[axis] != size:
            part = np.repeat(part, size // part.shape[axis], axis=axis)
    return part


def value(q):
    """Return what a QArray or float array stands for, in float64."""
    if not isinstance(q, QArray):
        return np.asarray(q).astype(np.float64)
    kind = get_qtype(q.qtype)
    qvalue = np.asarray(q.qvalue)
    if kind.codebook is None:
        numbers = qvalue.astype(np.float64)
    else:
        numbers = np.array(kind.codebook)[qvalue.astype(int)]
    if q.zero_point is not None:
        numbers = numbers - per_element(q.zero_point, q.shape)
    scale = per_element(q.scale, q.shape)
    if q.global_scale is not None:
        scale = scale * per_element(q.global_scale, q.shape)
    return numbers * scale
