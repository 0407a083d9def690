"""The sentence encoder all-MiniLM-L6-v2, written plainly: functions over a tree of parameters.

A BERT of 6 layers, width 384 and 12 heads, with the norms after the additions (Devlin et al. 2018,
arXiv:1810.04805; Wang et al. 2020, arXiv:2002.10957), then the mean over the tokens and a unit
norm. Kernels of dense layers are ``[in, out]``.
"""

import jax
import jax.numpy as jnp
from jax import lax

HEADS = 12


def encode(params, tokens, mask):
    """Returns the embeddings of sentences.

    Args:
        params: the tree that ``load.arrange`` returns.
        tokens: ids, int ``[batch, length]``.
        mask: bool ``[batch, length]``, False where a sentence is padded.

    Returns:
        ``[batch, width]``, each row of norm 1.
    """
    x = embed(params["embeddings"], tokens)
    for i, p in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            x = layer(p, x, mask)
    return normalize(mean(x, mask))


def embed(p, tokens):
    """Returns ``[batch, length, width]``: words and positions, added and normed."""
    words = jnp.take(p["words"], tokens, axis=0, mode="clip")
    return norm(p["norm"], words + p["positions"][: tokens.shape[1]])


def layer(p, x, mask):
    """Returns ``[batch, length, width]``: attention and two dense layers, each added and normed."""
    mixed = attention(dense(p, "qkv", x), mask)
    x = norm(p["attention_norm"], x + dense(p, "out", mixed))
    return norm(p["mlp_norm"], x + dense(p, "down", gelu(dense(p, "up", x))))


def attention(qkv, mask):
    """Returns ``[batch, length, width]`` of queries, keys and values, ``[..., 3 * width]``."""
    batch, length, width = *qkv.shape[:2], qkv.shape[2] // 3
    q, k, v = jnp.split(qkv.reshape(batch, length, 3 * HEADS, width // HEADS), 3, axis=2)
    mixed = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None, :])
    return mixed.reshape(batch, length, width)


def dense(p, name, x):
    with jax.named_scope(name):
        return x @ p[name]["kernel"] + p[name]["bias"]


def gelu(x):
    """Exact. ``jax.nn.gelu`` has erfc here, which takes twice as long on CPU as erf."""
    return x * (0.5 + 0.5 * lax.erf(x * 2**-0.5))


def norm(p, x):
    return jax.nn.standardize(x, epsilon=1e-12) * p["scale"] + p["bias"]


def mean(x, mask):
    """Returns ``[batch, width]``: the mean over the tokens, padding left out."""
    weights = mask[..., None].astype(x.dtype)
    return (x * weights).sum(1) / jnp.maximum(weights.sum(1), 1)


def normalize(x):
    return x * lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-24))
