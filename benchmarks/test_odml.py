"""QAT for LiteRT beside float and Qwix: what it adds to a train step of 12 layers of attention."""

import functools
import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import linen
from paired import compare

import provider_odml as odml

pytestmark = pytest.mark.filterwarnings("ignore:'VariableState':DeprecationWarning")  # Qwix's

LAYERS, WIDTH, HEADS, TOKENS, BATCH = 12, 256, 4, 64, 8
SIDES = {side: side for side in ("float", "jaxtap", "patch", "qwix")}
W8A8 = {"weight_qtype": "int8", "output_qtype": "int8"}


class Net(linen.Module):
    """A pre-norm encoder, as one writes it with Flax."""

    @linen.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            h = linen.LayerNorm()(x)
            x = x + linen.MultiHeadDotProductAttention(num_heads=HEADS)(h, h)
            h = linen.gelu(linen.Dense(4 * WIDTH)(linen.LayerNorm()(x)))
            x = x + linen.Dense(WIDTH)(h)
        return linen.Dense(10)(x)


NET = Net()
X = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, TOKENS, WIDTH)), jnp.float32)


@functools.cache
def parameters():
    return jax.jit(NET.init)(jax.random.key(0), X)["params"]


def descend(params, gradients):
    return jax.tree.map(lambda p, g: p - np.float32(1e-4) * g, params, gradients)


def float_step():
    def loss(params, x):
        return jnp.mean(NET.apply({"params": params}, x) ** 2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return value, descend(params, gradients)

    return step, (parameters(), X)


def our_step(engine):
    """With the statistics as an explicit argument, so that all sides are pure functions."""
    quantized = odml.qat(
        lambda params, x: NET.apply({"params": params}, x), odml.OdmlRule(**W8A8), engine=engine
    )
    stats = quantized.init(parameters(), X)

    def loss(params, state, x):
        out, state = quantized.with_state(stats, state, params, x)
        return jnp.mean(out**2), state

    def step(params, state, x):
        (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(params, state, x)
        return value, descend(params, gradients), state

    return step, (parameters(), stats.state, X)


@functools.cache
def qwix_stats():
    """Statistics of nothing: Qwix makes them in a run."""
    model = _qwix()
    kinds = jax.eval_shape(model.init, jax.random.key(0), X)["quant_stats"]
    return jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds)


def _qwix():
    provider = qwix.OdmlQatProvider([qwix.QuantizationRule(weight_qtype="int8", act_qtype="int8")])
    return qwix.quantize_model(NET, provider)


def qwix_step():
    model = _qwix()

    def loss(params, state, x):
        variables = {"params": params, "quant_stats": state}
        out, new = model.apply(variables, x, mutable=["quant_stats"])
        return jnp.mean(out**2), new["quant_stats"]

    def step(params, state, x):
        (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(params, state, x)
        return value, descend(params, gradients), state

    return step, (parameters(), qwix_stats(), X)


MAKE = {
    "float": float_step,
    "jaxtap": functools.partial(our_step, "trace"),
    "patch": functools.partial(our_step, "patch"),
    "qwix": qwix_step,
}


def cold():
    """Before each: no cache of JAX's, and no garbage of the side before."""
    jax.clear_caches()
    gc.collect()


def test_trace_of_a_train_step(benchmark):
    """The plan, which a model keeps, is found before."""

    def make(side):
        step, args = MAKE[side]()
        return lambda: jax.jit(lambda *args: step(*args)).trace(*args)

    compare(benchmark, SIDES, make, rounds=3, unit="ms", setup=cold)


def test_compile_of_a_train_step(benchmark):
    def make(side):
        step, args = MAKE[side]()

        def run():
            lowered = jax.jit(lambda *args: step(*args)).lower(*args)
            gc.collect()
            start = time.perf_counter()
            lowered.compile()
            return time.perf_counter() - start

        return run

    compare(benchmark, SIDES, make, rounds=2, unit="ms", setup=cold)


def test_train_step(benchmark):
    def make(side):
        step, args = MAKE[side]()
        compiled = jax.jit(step).lower(*args).compile()
        return lambda: jax.block_until_ready(compiled(*args))[0]

    compare(benchmark, SIDES, make, rounds=20, unit="ms")


def test_plan(benchmark):
    """Once for a model and shapes, beside the trace of the float model's forward pass."""

    def make(side):
        if side == "float":
            return lambda: jax.jit(lambda p, x: NET.apply({"params": p}, x)).trace(parameters(), X)
        engine = "trace" if side == "jaxtap" else side

        def run():
            fn = lambda params, x: NET.apply({"params": params}, x)  # noqa: E731
            odml.qat(fn, odml.OdmlRule(**W8A8), engine=engine).plan(parameters(), X)

        return run

    sides = {side: side for side in ("float", "jaxtap", "patch")}
    compare(benchmark, sides, make, rounds=5, unit="ms", setup=cold)
