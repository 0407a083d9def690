"""What TraceEngine adds to the tracing of a 12-layer model, beside PatchEngine with JIT off."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from paired import compare

import hijax_trace
from hijax_trace import TraceEngine
from interception_core import Interceptor, PatchEngine

LAYERS, WIDTH, HEADS, TOKENS = 12, 64, 4, 16
TARGETS = ("primitive:dot_general", "jax.numpy.einsum", "jax.nn.softmax", "jax.nn.gelu")
SIDES = {
    "plain": lambda fn: fn,
    "trace": lambda fn: TraceEngine().wrap(fn, tap()),
    "patch": lambda fn: PatchEngine(disable_jit=True).wrap(fn, tap()),
}


def tap():
    return Interceptor({target: lambda call, *args, **kwargs: NotImplemented for target in TARGETS})


def norm(p, x):
    mean, var = jnp.mean(x, axis=-1, keepdims=True), jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-6) * p["scale"] + p["bias"]


def block(p, x):
    """A pre-norm transformer layer, written as one writes it without a framework."""
    h = norm(p["norm1"], x)
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / np.float32(np.sqrt(WIDTH // HEADS))
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("bthk,hkd->btd", mixed, p["out"])
    return x + jax.nn.gelu(norm(p["norm2"], x) @ p["up"]) @ p["down"]


def params(key):
    """The parameters of one layer."""
    shapes = dict.fromkeys("qkv", (WIDTH, HEADS, WIDTH // HEADS))
    shapes |= {"out": (HEADS, WIDTH // HEADS, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    keys = jax.random.split(key, len(shapes))
    drawn = {
        n: jax.random.normal(k, s) * 0.1 for k, (n, s) in zip(keys, shapes.items(), strict=True)
    }
    unit = {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}
    return drawn | {"norm1": unit, "norm2": unit}


LAYER_PARAMS = [params(key) for key in jax.random.split(jax.random.key(0), LAYERS)]
STACKED = jax.tree.map(lambda *leaves: jnp.stack(leaves), *LAYER_PARAMS)
X = jnp.ones((2, TOKENS, WIDTH))


def unrolled(layers, x):
    for i, p in enumerate(layers):
        with jax.named_scope(f"layer_{i}"):
            x = block(p, x)
    return jnp.sum(x)


def jitted_layers():
    layer = jax.jit(lambda p, x: block(p, x))

    def model(layers, x):
        for i, p in enumerate(layers):
            with jax.named_scope(f"layer_{i}"):
                x = layer(p, x)
        return jnp.sum(x)

    return model


def scanned(stacked, x):
    step = jax.checkpoint(lambda x, p: (block(p, x), None))
    return jnp.sum(lax.scan(step, x, stacked)[0])


MODELS = {
    "unrolled": (lambda: unrolled, LAYER_PARAMS),
    "jitted layers": (jitted_layers, LAYER_PARAMS),
    "scan and remat": (lambda: scanned, STACKED),
}


def cold():
    """Before each: no cache of JAX's, and no garbage of the side before."""
    jax.clear_caches()
    gc.collect()


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


@pytest.fixture(params=["forward", "gradient"])
def differentiated(request):
    return jax.grad if request.param == "gradient" else lambda fn: fn


def test_trace(benchmark, model, differentiated):
    make_model, weights = model

    def make(wrap):
        return lambda: jax.jit(differentiated(wrap(make_model()))).trace(weights, X)

    compare(benchmark, SIDES, make, rounds=15, unit="ms", setup=cold)


def test_run(benchmark, model, differentiated):
    make_model, weights = model

    def make(wrap):
        compiled = jax.jit(differentiated(wrap(make_model()))).lower(weights, X).compile()
        return lambda: jax.block_until_ready(compiled(weights, X))

    compare(benchmark, SIDES, make, rounds=100, unit="ms")


JITS = {"plain": jax.jit, "trace": hijax_trace.jit}


def test_jit_without_boxes_first_call(benchmark):
    def make(jit):
        return lambda: jit(lambda layers, x: unrolled(layers, x)).trace(LAYER_PARAMS, X)

    compare(benchmark, JITS, make, rounds=15, unit="ms", setup=cold)


def test_jit_without_boxes_warm_call(benchmark):
    def make(jit):
        fn = jit(lambda x: x + 1)

        def run():
            for _ in range(1000):
                fn(X)
            return fn(X)

        return run

    compare(benchmark, JITS, make, rounds=30, unit="µs", per=1001)
