"""Attention over caches that are carried as int8: the kernel takes values and scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla

B, S, H, K, D = 2, 24, 4, 2, 16
RULES = [xla.CacheRule("cache"), xla.QuantizationRule(kernel="fused")]


def step(params, x, cache, pos):
    """Write a row, positions before heads, and attend to what is written so far."""
    q = (x @ params["q"]).reshape(B, 1, H, D)
    new = {name: (x @ params[name]).reshape(B, 1, K, D) for name in "kv"}
    write = jax.lax.dynamic_update_slice_in_dim
    cache = {name: write(cache[name], new[name], pos, 1) for name in "kv"}
    lengths = jnp.full(B, pos + 1, jnp.int32)
    out = jax.nn.dot_product_attention(q, cache["k"], cache["v"], key_value_seq_lengths=lengths)
    return out.reshape(B, -1), cache


def heads_first(params, x, cache, pos):
    """The same with heads before positions, which are moved for ``jax.nn``."""
    there = jax.tree.map(lambda c: c.swapaxes(1, 2), cache)
    out, there = step(params, x, there, pos)
    return out, jax.tree.map(lambda c: c.swapaxes(1, 2), there)


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
    assert f"tensor<{B}x{S}x{K}x{D}xi8>" in called
    assert f"tensor<{B}x{S}x{K}x{D}xf32>" not in called
