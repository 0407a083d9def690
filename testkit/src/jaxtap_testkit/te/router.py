"""What the router gives, in NumPy and float64: independent of the package."""

import numpy as np


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def scores(x, function):
    if function == "sigmoid":
        return 1 / (1 + np.exp(-x))
    return np.sqrt(np.log1p(np.exp(x))) if function == "sqrtsoftplus" else x


def best(x, k):
    """Return a mask of each row's k largest, first of equals."""
    order = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    mask = np.zeros(x.shape, bool)
    np.put_along_axis(mask, order, True, -1)
    return mask


def chosen(x, topk, function, *, before=False, groups=0, group_topk=0, bias=None):
    """The routing map."""
    ranked = scores(np.asarray(x, np.float64), function)
    if before and function == "softmax":
        ranked = softmax(ranked)
    if bias is not None:
        ranked = ranked + np.asarray(bias, np.float64)
    if group_topk <= 0:
        return best(ranked, topk)
    in_groups = ranked.reshape(*ranked.shape[:-1], groups, -1)
    sums = np.sort(in_groups, -1)[..., -(topk // group_topk) :].sum(-1)
    among = np.repeat(best(sums, group_topk), in_groups.shape[-1], -1)
    return best(np.where(among, ranked, -np.inf), topk)


def weights(x, mask, function, *, before=False, scaling=1.0, dense=False):
    """Of those in a mask; all scores if `dense`."""
    x = np.asarray(x, np.float64)
    found = scores(x, function)
    one = mask.sum(-1).max(initial=1) == 1
    if function == "softmax":
        found = softmax(found) if before or dense else softmax(np.where(mask, found, -np.inf))
    elif dense:
        found = found / found.sum(-1, keepdims=True)
    elif not one:
        found = found / np.where(mask, found, 0).sum(-1, keepdims=True)
    return found if dense else np.where(mask, found * scaling, 0)


def gradient(x, mask, grad, **options):
    """Of logits, by differences in float64."""
    x, grad = np.asarray(x, np.float64), np.asarray(grad, np.float64)
    step, out = 1e-5, np.zeros(x.shape)
    for i in range(x.shape[-1]):
        up, down = x.copy(), x.copy()
        up[..., i] += step
        down[..., i] -= step
        change = weights(up, mask, **options) - weights(down, mask, **options)
        out[..., i] = (grad * change).sum(-1) / (2 * step)
    return out


def packed(mask):
    """A bit for each expert, the lowest first."""
    return np.packbits(mask, axis=-1, bitorder="little")


def loss(probs, counts, topk, coeff):
    tokens, experts = probs.shape
    sums = np.asarray(probs, np.float64).sum(0)
    return experts * coeff / (topk * tokens**2) * (sums * np.asarray(counts, np.float64)).sum()
