"""What activations must give, by NumPy in float64: independent of the package."""

import numpy as np


def swish(x, u, slope):
    """x * sigmoid(u) and its derivative, where u' is slope."""
    with np.errstate(over="ignore"):
        gate, rest = 1 / (1 + np.exp(-u)), 1 / (1 + np.exp(u))
        return x * gate, gate + x * slope * gate * rest


def point(name, x, limit=7.0, alpha=1.702):
    """A function and its derivative."""
    if name == "gelu":
        root = np.sqrt(2 / np.pi)
        return swish(x, 2 * root * (x + 0.044715 * x**3), 2 * root * (1 + 3 * 0.044715 * x**2))
    if name == "sigmoid":
        one = np.ones_like(x)
        value = swish(one, x, 0)[0]
        return value, value * swish(one, -x, 0)[0]
    if name == "silu":
        return swish(x, x, 1)
    if name == "quick_gelu":
        return swish(x, 1.702 * x, 1.702)
    if name == "clamped_silu":
        cut = np.minimum(x, limit)
        value, slope = swish(cut, alpha * cut, alpha)
        return value, np.where(x <= limit, slope, 0)
    part = np.maximum(x, 0)
    return (part, (x > 0) * 1.0) if name == "relu" else (part**2, 2 * part)


def forward(x, names, limit=7.0, alpha=1.702, offset=1.0):
    """The result, and what dx is for a cotangent of ones."""
    x = np.asarray(x).astype(np.float64)
    value, slope = point(names[0], x[..., 0, :], limit, alpha)
    if len(names) == 1:
        return value, slope[..., None, :]
    other = x[..., 1, :]
    follows = np.ones_like(other)
    if names[1] == "clamped_linear":
        follows = (np.abs(other) <= limit) * 1.0
        other = np.clip(other, -limit, limit) + offset
    return value * other, np.stack([slope * other, value * follows], axis=-2)


def error(found, wanted):
    """The largest error."""
    return np.abs(np.asarray(found).astype(np.float64) - wanted).max(initial=0)
