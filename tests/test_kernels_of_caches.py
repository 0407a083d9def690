"""Attention over caches: the kernel reads them as they are carried, and where they lie."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from jaxtap_testkit.compat import compiling
from jaxtap_testkit.xla_samples import draw

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


@pytest.mark.sample(1)
@pytest.mark.parametrize("fn", [step, heads_first])
def test_kernel_reads_int8(fn):
    *weights, x = draw((32, H * D), (32, K * D), (32, K * D), (6, B, 32), seed=1)
    params = {name: weight / 5 for name, weight in zip("qkv", weights, strict=True)}
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


L = 3


def attention(params, x, k, v, pos):
    q = (x @ params["q"]).reshape(B, 1, H, D)
    lengths = jnp.full(B, pos + 1, jnp.int32)
    out = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)
    return x + out.reshape(B, -1) @ params["o"]


def written(params, x, k, v, pos):
    """The same as operations: with heads before positions, as ``k`` and ``v`` lie."""
    q = (x @ params["q"]).reshape(B, K, H // K, D)
    scores = jnp.einsum("bkgd,bskd->bkgs", q, k) / np.sqrt(D)
    weights = jax.nn.softmax(jnp.where(jnp.arange(S) <= pos, scores, -1e30))
    return x + jnp.einsum("bkgs,bskd->bkgd", weights, v).reshape(B, -1) @ params["o"]


def stepped(attend, heads_first, _):
    """Return a step of a scan over layers that steps along their caches and returns them."""

    def step(params, x, cache, pos):
        def layer(x, given):
            p, cache = given
            order = (0, 2, 1, 3) if heads_first else (0, 1, 2, 3)
            new = {name: (x @ p[name]).reshape(B, 1, K, D).transpose(order) for name in "kv"}
            at = (0, 0, pos, 0) if heads_first else (0, pos, 0, 0)
            cache = {n: jax.lax.dynamic_update_slice(cache[n], new[n], at) for n in "kv"}
            k, v = (cache[name].transpose(order) for name in "kv")
            return attend(p, x, k, v, pos), cache

        return jax.lax.scan(layer, x, (params, cache))

    return step


def decoder(attend, heads_first, take):
    """Return a step of a scan over layers that carries the caches of all of them."""

    def step(params, x, cache, pos):
        def layer(carried, given):
            x, cache = carried
            p, i = given
            order = (0, 2, 1, 3) if heads_first else (0, 1, 2, 3)
            new = {name: (x @ p[name]).reshape(B, 1, K, D).transpose(order) for name in "kv"}
            at = (i, 0, 0, pos, 0) if heads_first else (i, 0, pos, 0, 0)
            cache = {n: jax.lax.dynamic_update_slice(cache[n], new[n][None], at) for n in "kv"}
            k, v = (take(cache[name], i).transpose(order) for name in "kv")
            return (attend(p, x, k, v, pos), cache), None

        return jax.lax.scan(layer, (x, cache), (params, jnp.arange(L)))[0]

    return step


DECODERS = {
    "stepped, positions first": (attention, False, None),
    "stepped, heads first": (written, True, None),
    "named, positions first": (attention, False, lambda s, i: s[i]),
    "named, heads first": (attention, True, lambda s, i: s[i]),
    "written, heads first": (
        written,
        True,
        lambda s, i: jax.lax.dynamic_index_in_dim(s, i, keepdims=False),
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_scan_over_layers_copies_no_cache(name, kind):
    made = stepped if name.startswith("stepped") else decoder
    fn, heads_first = made(*DECODERS[name]), DECODERS[name][1]
    sizes = (L, 32, H * D), (L, 32, K * D), (L, 32, K * D), (L, H * D, 32)
    *weights, x = draw(*sizes, (4, B, 32))
    params = {part: weight / 20 for part, weight in zip("qkvo", weights, strict=True)}
    shape = (L, B, K, S, D) if heads_first else (L, B, S, K, D)
    cache = {part: jnp.zeros(shape) for part in "kv"}
    rules = RULES if kind == "int8" else RULES[1:]
    plan = xla.PtqProvider(rules).plan(fn, params, x[0], cache, 0)
    run = jax.jit(plan.apply(fn), donate_argnums=2)
    held = plan.quantize_cache(cache) if kind == "int8" else cache
    with compiling(cheap=False):
        compiled = run.lower(params, x[0], held, 0).compile()
    floats = jax.tree.map(jnp.copy, cache)
    for pos, row in enumerate(x):
        found, held = compiled(params, row, held, pos)
        expected, floats = jax.jit(fn)(params, row, floats, pos)
        off = 0.02 if kind == "int8" else 1e-5
        assert np.linalg.norm(found - expected) < off * np.linalg.norm(expected)
    text = compiled.as_text()
    (called,) = set(re.findall(r"custom-call\(.*te_ffi_kernels.decode_attention.*", text))
    letter = "s8" if kind == "int8" else "f32"
    assert f"{letter}[{','.join(map(str, shape))}]" in called
    # Neither one layer's cache nor all of them, in any order of axes.
    axes = {"x".join(sorted(map(str, one))) for one in (shape, shape[1:], (1, *shape[1:]))}
    for found, how in re.findall(r"\w+\[([\d,]+)\]\S* (copy|transpose|dynamic-slice)\(", text):
        assert "x".join(sorted(found.split(","))) not in axes, (how, found)


def test_a_scan_over_layers_without_a_batch_copies_no_stack():
    # As people write one sequence. The kernel has a batch, so it reads a layer that is cut out.
    def step(params, x, cache, pos):
        def layer(x, given):
            p, cache = given
            new = {name: (x @ p[name]).reshape(1, K, D) for name in "kv"}
            cache = {n: jax.lax.dynamic_update_slice(cache[n], new[n], (pos, 0, 0)) for n in "kv"}
            q = (x @ p["q"]).reshape(K, H // K, D)
            scores = jnp.einsum("kgd,skd->kgs", q, cache["k"]) / np.sqrt(D)
            weights = jax.nn.softmax(jnp.where(jnp.arange(S) <= pos, scores, -1e30))
            out = jnp.einsum("kgs,skd->kgd", weights, cache["v"])
            return x + out.reshape(1, -1) @ p["o"], cache

        return jax.lax.scan(layer, x, (params, cache))

    sizes = (L, 32, H * D), (L, 32, K * D), (L, 32, K * D), (L, H * D, 32)
    *weights, x = draw(*sizes, (4, 1, 32))
    params = {part: weight / 20 for part, weight in zip("qkvo", weights, strict=True)}
    cache = {part: jnp.zeros((L, S, K, D)) for part in "kv"}
    plan = xla.PtqProvider(RULES[1:]).plan(step, params, x[0], cache, 0)
    run = jax.jit(plan.apply(step), donate_argnums=2)
    with compiling(cheap=False):
        compiled = run.lower(params, x[0], cache, 0).compile()
    floats, text = jax.tree.map(jnp.copy, cache), compiled.as_text()
    for pos, row in enumerate(x):
        found, cache = compiled(params, row, cache, pos)
        expected, floats = jax.jit(step)(params, row, floats, pos)
        assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)
    assert "te_ffi_kernels.decode_attention" in text
    if jax.__version_info__ >= (0, 11):  # whose XLA keeps the barrier before the cut
        assert re.findall(rf"f32\[{L},{S},{K},{D}\]\S* copy\(", text) == []
