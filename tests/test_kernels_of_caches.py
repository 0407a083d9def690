"""Attention over caches that are carried as int8: the kernel takes values and scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla

B, S, H, K, D = 2, 24, 4, 2, 16
RULES = [xla.CacheRule("cache"), xla.QuantizationRule(kernel="fused")]


def step(params, x, cache, pos, axis=1):
    """Write a row, positions before heads, and attend to what is written so far."""
    q = (x @ params["q"]).reshape(B, 1, H, D)
    new = {name: (x @ params[name]).reshape(B, 1, K, D) for name in "kv"}
    order = (0, 1, 2, 3) if axis == 1 else (0, 2, 1, 3)
    write = jax.lax.dynamic_update_slice_in_dim
    cache = {name: write(cache[name], new[name].transpose(order), pos, axis) for name in "kv"}
    k, v = (cache[name].transpose(order) for name in "kv")
    lengths = jnp.full(B, pos + 1, jnp.int32)
    out = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)
    return out.reshape(B, -1), cache


def heads_first(params, x, cache, pos):
    """The same with heads before positions, which are moved for ``jax.nn``."""
    return step(params, x, cache, pos, axis=2)


@pytest.mark.parametrize("fn", [step, heads_first])
def test_kernel_reads_int8(fn):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {name: jax.random.normal(key, (32, n * D)) / 5
              for name, key, n in zip("qkv", keys, (H, K, K), strict=False)}  # fmt: skip
    x = jax.random.normal(keys[3], (6, B, 32))
    shape = (B, S, K, D) if fn is step else (B, K, S, D)
    cache = {name: jnp.zeros(shape) for name in "kv"}
    plan = xla.PtqProvider(RULES).plan(fn, params, x[0], cache, 0)
    assert all(one.axis == 3 for one in plan.caches.values())
    run, held, floats = jax.jit(plan.apply(fn)), plan.quantize_cache(cache), cache
    for pos, row in enumerate(x):
        found, held = run(params, row, held, pos)
        expected, floats = jax.jit(fn)(params, row, floats, pos)
        assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)
    text = run.lower(params, x[0], held, 0).as_text()
    (called,) = (line for line in text.splitlines() if "decode_attention" in line
                 and "custom_call" in line)  # fmt: skip
    sizes = "x".join(map(str, shape))  # as the cache lies in memory
    assert f"tensor<{sizes}xi8>" in called
    assert f"tensor<{sizes}xf32>" not in called
