"""Attention over a cache in compiled programs: shared out, exported, and without copies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.meshes import put
from jaxtap_testkit.te.calls import assert_block


def made(b=2, t=1, heads=8, kv=4, s=32, d=16):
    rng = np.random.default_rng(0)
    shapes = (b, t, heads, d), (b, kv, s, d), (b, kv, s, d)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def test_each_device_has_its_sequences_and_heads(mesh):
    given, lengths = made(b=4), jnp.array([32, 5, 17, 1], jnp.int32)
    wanted = te.decode_attention(*given, lengths)
    specs = ("data", None, "model", None), ("data", "model"), ("data", "model")
    placed = [put(mesh, x, *spec) for x, spec in zip(given, specs, strict=True)]
    compiled = jax.jit(te.decode_attention).lower(*placed, lengths).compile()
    assert_block(compiled, "decode_attention", "f32[2,1,1,2,16]")
    assert "all-gather" not in compiled.as_text()
    np.testing.assert_allclose(compiled(*placed, lengths), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.optimized
def test_a_scan_over_tokens_copies_nothing_of_the_cache():
    q, keys, values = made(b=1)

    def step(cache, i):
        new = jnp.full((1, 4, 1, 16), i, jnp.float32)
        cache = [jax.lax.dynamic_update_slice(one, new, (0, 0, i, 0)) for one in cache]
        return cache, te.decode_attention(q, *cache, i + 1)

    def run(cache):
        return jax.lax.scan(step, cache, jnp.arange(20, dtype=jnp.int32))

    text = jax.jit(run, donate_argnums=0).lower([keys, values]).compile().as_text()
    assert 'custom_call_target="te_ffi_kernels.decode_attention"' in text
    assert not re.findall(r"f32\[1,4,32,16\]\S* (?:copy|transpose)\(", text)


@pytest.mark.optimized
def test_a_scan_over_layers_copies_nothing_of_their_caches():
    q, keys, values = made(b=1)
    stacks = [jnp.stack([x] * 3) for x in (keys, values)]

    def layer(carried, i):
        q, *cache = carried
        new = jnp.full((1, 1, 4, 1, 16), i, jnp.float32)
        cache = [jax.lax.dynamic_update_slice(one, new, (i, 0, 0, 7, 0)) for one in cache]
        return (te.decode_attention(q, *cache, 8, index=i), *cache), None

    def run(q, cache):
        return jax.lax.scan(layer, (q, *cache), jnp.arange(3, dtype=jnp.int32))[0]

    text = jax.jit(run, donate_argnums=1).lower(q, stacks).compile().as_text()
    assert 'custom_call_target="te_ffi_kernels.decode_attention"' in text
    copied = r"f32\[(?:3,)?1,4,32,16\]\S* (?:copy|transpose|dynamic-slice)\("
    assert not re.findall(copied, text)


def test_stacks_on_each_device(mesh):
    q, keys, values = made(b=4)
    stacks = [jnp.stack([x, 2 * x]) for x in (keys, values)]
    wanted = te.decode_attention(q, *stacks, 32, index=1)
    placed = [put(mesh, q, "data", None, "model")]
    placed += [put(mesh, x, None, "data", "model") for x in stacks]
    run = jax.jit(lambda q, k, v: te.decode_attention(q, k, v, 32, index=1))
    compiled = run.lower(*placed).compile()
    assert_block(compiled, "decode_attention", "f32[2,1,1,2,16]")
    assert "all-gather" not in compiled.as_text()
    np.testing.assert_allclose(compiled(*placed), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_on_other_platforms():
    given = made()
    text = jax.jit(te.decode_attention).trace(*given, 9)
    text = text.lower(lowering_platforms=("cuda",)).as_text()
    assert "te_ffi_kernels" not in text
    assert "dot_general" in text
