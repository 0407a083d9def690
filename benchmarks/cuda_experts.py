"""The ops of a layer of experts, for cuda_ops.py: tokens to rows and back, matmuls, topk."""

import jax
import jax.numpy as jnp
import numpy as np

import te_ffi_kernels as te

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


def exercise(dtype):
    """Calls each kernel on sizes at which its ways part."""
    for tokens, experts, hidden in ((0, 4, 8), (7, 3, 33), (300, 40, 160)):
        x, probs = normal(tokens, hidden, dtype=dtype), normal(tokens, experts, dtype=dtype)
        for align in (None, 16) if tokens else ():
            run = lambda *args, align=align: there_and_back(te, *args, align)  # noqa: E731
            out, back = jax.vjp(lambda x, p: run(x, routed(tokens, experts), p), x, probs)  # noqa: B023
            jax.block_until_ready(back(out))
    for k, n, sizes in ((64, 48, [3, 0, 29]), (33, 7, [1, 1, 6])):
        x, w = normal(sum(sizes) + 5, k, dtype=dtype), normal(len(sizes), k, n, dtype=dtype)
        sizes = jnp.asarray(sizes, jnp.int32)
        out, back = jax.vjp(lambda x, w: multiply(te, x, w, sizes), x, w)  # noqa: B023
        jax.block_until_ready(back(out))
        for mode in (1, 64) if k == 64 else ():
            for code in ("float8_e4m3fn", "int8"):
                jax.block_until_ready(multiply_quantized(te, x, w, sizes, mode, code))
    for cols, k in ((8, 1), (300, 8), (5000, 1000)):
        jax.block_until_ready(te.topk(normal(3, cols, dtype=dtype), k))


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
