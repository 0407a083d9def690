"""Attention and its gradients in float64, by NumPy."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Wanted:
    out: np.ndarray
    lse: np.ndarray  # [b, h, sq]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    bias: np.ndarray | None
    offset: np.ndarray


def wide(x):
    return np.asarray(x.astype("float32"), np.float64)


def attend(
    q,
    k,
    v,
    grad,
    sees,
    *,
    bias=None,
    pre_scale=False,
    offset=None,
    scale=1.0,
    kept=None,
):
    """Compute attention in float64, one query at a time.

    Args:
        sees: bool [b, sq, skv], which keys a query sees.
        offset: [h], a logit of no key for each head (softmax off by one or learned).
        kept: [b, h, sq, skv], the factors of dropout.
    """
    q, k, v, grad = (wide(x) for x in (q, k, v, grad))
    (b, sq, h, _), (skv, g) = q.shape, k.shape[1:3]
    out = np.zeros((b, sq, h, v.shape[3]))
    lse = np.full((b, h, sq), -np.inf)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    full = np.zeros((b, h, sq, skv))
    if bias is not None:
        full += wide(bias)
    dfull, doffset = np.zeros_like(full), np.zeros(h)
    for n, i, head in np.ndindex(b, sq, h):
        own, at = head // (h // g), np.flatnonzero(sees[n, i])
        s = k[n, at, own] @ q[n, i, head]
        added = full[n, head, i, at]
        s = (s + added) * scale if pre_scale else s * scale + added
        extra = [] if offset is None else [float(offset[head])]
        if not len(s) and not extra:
            continue
        top = max([*s, *extra])
        total = np.exp(s - top).sum() + sum(np.exp(x - top) for x in extra)
        lse[n, head, i] = top + np.log(total)
        p = np.exp(s - top) / total
        factor = np.ones_like(p) if kept is None else kept[n, head, i, at]
        out[n, i, head] = (p * factor) @ v[n, at, own]
        dv[n, at, own] += np.outer(p * factor, grad[n, i, head])
        dp = factor * (v[n, at, own] @ grad[n, i, head])
        delta = p @ dp
        ds = p * (dp - delta)
        dq[n, i, head] = scale * (ds @ k[n, at, own])
        dk[n, at, own] += scale * np.outer(ds, q[n, i, head])
        dfull[n, head, i, at] = ds * (scale if pre_scale else 1)
        if extra:
            doffset[head] -= np.exp(extra[0] - top) / total * delta
    dbias = None
    if bias is not None:
        over = tuple(i for i in (0, 1) if bias.shape[i] == 1)
        dbias = dfull.sum(axis=over, keepdims=True)
    return Wanted(out, lse, dq, dk, dv, dbias, doffset)


def visible(q_lengths, kv_lengths, sq, skv, *, causal, bottom_right, window):
    """bool [b, sq, skv]"""
    sees = np.zeros((len(q_lengths), sq, skv), bool)
    left, right = window
    for n, (queries, keys) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        for i, j in np.ndindex(int(queries), int(keys)):
            place = j - i - (keys - queries if bottom_right else 0)
            good = (left < 0 or place >= -left) and (right < 0 or place <= right)
            sees[n, i, j] = good and not (causal and place > 0)
    return sees


def philox(counter, key):
    """Four words, by Python's own integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ c[3] ^ k[1],
            first & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def kept(b, h, sq, skv, seed, probability):
    """The factors of dropout."""
    factors = np.zeros((b, h, sq, skv))
    for n, head, i, j in np.ndindex(b, h, sq, skv):
        word = philox((j // 4, i, n * h + head, 0), seed)[j % 4]
        factors[n, head, i, j] = word >= int(float(np.float32(probability)) * 2**32)
    return factors / (1 - float(np.float32(probability)))
