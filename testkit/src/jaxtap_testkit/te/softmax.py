"""Softmax and its gradient in float64, by NumPy."""

import numpy as np


def softmax(x, scale, left_out=None):
    """Along the last axis, over those that aren't left out."""
    x = np.asarray(x).astype(np.float64) * np.float64(np.float32(scale))
    kept = np.ones(x.shape, bool) if left_out is None else ~np.broadcast_to(left_out, x.shape)
    most = np.max(np.where(kept, x, -np.inf), axis=-1, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        e = np.where(kept, np.exp(np.where(kept, x - most, 0)), 0)
    total = e.sum(-1, keepdims=True)
    return np.where(kept, e / np.where(total == 0, 1, total), 0)


def gradient(x, scale, dz, left_out=None):
    """Of the logits, all in float64."""
    y = softmax(x, scale, left_out)
    dz = np.asarray(dz).astype(np.float64)
    return y * (dz - (y * dz).sum(-1, keepdims=True)) * np.float64(np.float32(scale))


def beyond_diagonal(q, k):
    """What is left out of q rows and k columns."""
    return np.arange(k)[None, :] > np.arange(q)[:, None]


def worst(found, wanted):
    """The largest error."""
    found = np.asarray(found).astype(np.float64)
    return np.abs(found - wanted).max(initial=0)
