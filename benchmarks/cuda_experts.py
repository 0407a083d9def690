"""The ops of a layer of experts, for cuda_ops.py: tokens to rows and back, matmuls, topk."""

import jax.numpy as jnp
import numpy as np

CHOSEN = 8


def normal(*shape, dtype):
    """Numbers that no program knows."""
    return jnp.asarray(np.random.default_rng().normal(size=shape), dtype)


def routed(tokens, experts):
    """A routing map of CHOSEN experts, or all, for each token."""
    order = np.random.default_rng().random((tokens, experts)).argsort(1)
    return jnp.asarray(order < min(CHOSEN, experts))


def there_and_back(module, x, routing_map, probs, align=None):
    """Tokens to rows, padded, and back with their weights."""
    total = min(CHOSEN, probs.shape[1]) * len(x)
    rows, _, places, offsets, _ = module.token_dispatch(x, routing_map, total, align_size=align)
    return module.token_combine(rows, places, probs, offsets)


def multiply(module, x, w, sizes):
    """Groups of rows, each with its own matrix."""
    return module.grouped_dense(x, w, sizes)


def multiply_quantized(module, x, w, sizes, mode, dtype="float8_e4m3fn"):
    """The same in quantized values, which takes grouped_quantize."""
    groups = w.shape[0]
    ones = jnp.ones((groups,), jnp.float32)
    q, _, s, *_ = module.grouped_quantize(x, ones, sizes, dtype, mode, 0)
    each = jnp.ones((groups,), jnp.int32)
    turned = w.swapaxes(1, 2)
    r, _, t, *_ = module.grouped_quantize(turned, ones, each, dtype, mode, 0)
    given = (q.reshape(x.shape), s, r.reshape(turned.shape), t, jnp.zeros((0,)), sizes)
    return module.grouped_gemm_v2(*given, ones, 0 * ones, jnp.bfloat16, ((1,), (2,)), mode)


def cases(side, dtype):
    """(name, function of (module, operands), operands)."""
    for experts in (8, 128):
        x, probs = normal(side, side // 2, dtype=dtype), normal(side, experts, dtype=dtype)
        yield (
            f"tokens to {experts} experts and back",
            lambda m, *args: there_and_back(m, *args, align=16),
            (x, routed(side, experts), probs),
        )
        w = normal(experts, side // 2, side // 8, dtype=dtype)
        sizes = jnp.full((experts,), side // experts, jnp.int32)
        yield f"matmuls of {experts} groups", multiply, (x, w, sizes)
        yield (
            f"matmuls of {experts} groups, float8",
            lambda m, *args: multiply_quantized(m, *args, 1),
            (x, w, sizes),
        )
    yield "topk, 8 of 32000", lambda m, x: m.topk(x, 8), (normal(side // 16, 32000, dtype=dtype),)
