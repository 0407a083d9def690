"""Attention, softmax, norms, activations and the router beside XLA."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paired import compare

import te_ffi_kernels as te

RNG = np.random.default_rng(0)
F32, BF16 = jnp.float32, jnp.bfloat16
FLOATS = {"f32": F32, "bf16": BF16}
HEADS, SIZE = 8, 64
NO_BIAS = te.AttnBiasType.NO_BIAS
BSHD = te.QKVLayout.BSHD_BSHD_BSHD
VANILLA = te.AttnSoftmaxType.VANILLA_SOFTMAX


def drawn(*shape, dtype=F32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


def waiting(fn, *args):
    """Returns a call of a compiled program that waits for all of its results."""
    compiled = jax.jit(fn).lower(*args).compile()
    return lambda: jax.block_until_ready(compiled(*args)) is None


def fused(q, k, v, causal):
    mask = te.AttnMaskType.CAUSAL_MASK if causal else te.AttnMaskType.NO_MASK
    scale = q.shape[-1] ** -0.5
    return te.fused_attn((q, k, v), None, None, None, NO_BIAS, mask, BSHD, VANILLA, scale, 0, False)


def plain(q, k, v, causal):
    """As one writes it, and as XLA runs it."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.dtype.type(q.shape[-1] ** -0.5)
    if causal:
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def attention_sides(batch, length, causal, gradient):
    def side(fn, dtype):
        qkv = [drawn(batch, length, HEADS, SIZE, dtype=dtype) for _ in range(3)]
        run = lambda q, k, v: fn(q, k, v, causal)  # noqa: E731
        if gradient:
            return waiting(
                jax.grad(lambda *qkv: run(*qkv).astype(F32).sum(), argnums=(0, 1, 2)), *qkv
            )
        return waiting(run, *qkv)

    return {
        "XLA f32": lambda: side(plain, F32),
        "kernel f32": lambda: side(fused, F32),
        "XLA bf16": lambda: side(plain, BF16),
    }, {
        "XLA bf16": lambda: side(plain, BF16),
        "kernel bf16": lambda: side(fused, BF16),
        "XLA f32": lambda: side(plain, F32),
    }


SIZES = {"B1 S1024": (1, 1024), "B1 S2048": (1, 2048), "B8 S128": (8, 128)}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [0, 1], ids=["f32", "bf16"])
def test_attention_forward(benchmark, size, causal, dtype):
    sides = attention_sides(*SIZES[size], causal, gradient=False)[dtype]
    compare(benchmark, sides, lambda make: make(), rounds=10, unit="ms")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [0, 1], ids=["f32", "bf16"])
def test_attention_forward_and_backward(benchmark, causal, dtype):
    sides = attention_sides(1, 1024, causal, gradient=True)[dtype]
    compare(benchmark, sides, lambda make: make(), rounds=10, unit="ms")


MEMORY = """
import resource, sys
import jax, jax.numpy as jnp
sys.path.insert(0, {folder!r})
import test_fused_kernels as t
fn = {{"XLA": t.plain, "kernel": t.fused}}[{side!r}]
qkv = [jnp.ones((1, {length}, 2, 64)) for _ in range(3)]
def loss(*qkv):
    return fn(*qkv, True).sum()
program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*qkv).compile()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
jax.block_until_ready(program(*qkv))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_of_attention(benchmark):
    """In separate processes: what the gradient of two heads adds to the peak, in bytes."""
    found = {}

    def one(side, length):
        code = MEMORY.format(folder=str(Path(__file__).parent), side=side, length=length)
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        return int(out.stdout)

    def both():
        for length in (4096, 8192):
            for side in ("XLA", "kernel"):
                found[f"{side} {length}"] = one(side, length) / 2**20

    benchmark.pedantic(both, rounds=1)
    benchmark.extra_info["unit"] = "MiB"
    benchmark.extra_info["seconds"] = found
    benchmark.extra_info["ratios"] = {
        f"{side}, twice the length": found[f"{side} 8192"] / max(found[f"{side} 4096"], 1)
        for side in ("XLA", "kernel")
    }


def softmax_sides(kind, shape):
    x = drawn(*shape)
    mask = jnp.asarray(RNG.random((shape[0], 1, *shape[2:])) < 0.3, jnp.uint8)

    def masked(x, mask):
        return jax.nn.softmax(jnp.where(mask != 0, jnp.finfo(x.dtype).min, x * 0.125))

    def causal(x, mask):
        seen = jnp.tril(jnp.ones(x.shape[-2:], bool))
        return jax.nn.softmax(jnp.where(seen, x * 0.125, jnp.finfo(x.dtype).min))

    ours = {
        "masked": lambda x, mask: te.scaled_masked_softmax_fwd(x, mask, 0.125),
        "causal": lambda x, mask: te.scaled_upper_triang_masked_softmax_fwd(x, 0.125),
    }
    return {
        "XLA": lambda: waiting({"masked": masked, "causal": causal}[kind], x, mask),
        "kernel": lambda: waiting(ours[kind], x, mask),
        "copy": lambda: waiting(lambda x: -x, x),
    }


def often(make):
    """Makes a side whose run is ten calls, one after the other."""
    call = make()

    def run():
        for _ in range(10):
            call()

    return run


@pytest.mark.parametrize("side", [128, 256, 512])
@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_softmax(benchmark, kind, side):
    sides = softmax_sides(kind, (2, 8, side, side))
    compare(benchmark, sides, often, rounds=10, unit="ms", per=10)


@pytest.mark.parametrize("experts", [64, 256])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_top_8(benchmark, score, experts):
    x = drawn(8192, experts)

    def run(module):
        return lambda x: module.fused_topk_with_score_function(x, 8, score_function=score)

    sides = {
        "XLA": lambda: waiting(run(te.reference), x),
        "kernel": lambda: waiting(run(te), x),
        "copy": lambda: waiting(lambda x: -x, x),
    }
    compare(benchmark, sides, lambda make: make(), rounds=10, unit="ms")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_norm(benchmark, kind, dtype, gradient):
    x, gamma, beta = drawn(2048, 2048, dtype=FLOATS[dtype]), drawn(2048), drawn(2048)

    def side(module):
        def run(x, gamma, beta):
            return module.layernorm(x, gamma, beta if kind == "layernorm" else None, kind)

        if not gradient:
            return waiting(run, x, gamma, beta)
        loss = lambda *given: (run(*given).astype(F32) * 0.5).sum()  # noqa: E731
        return waiting(jax.grad(loss, (0, 1)), x, gamma, beta)

    sides = {
        "XLA": lambda: side(te.reference),
        "kernel": lambda: side(te),
        "copy": lambda: waiting(lambda x: -x, x),
    }
    compare(benchmark, sides, often, rounds=10, unit="ms", per=10)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", [("gelu", "linear"), ("silu", "linear")], ids=["geglu", "swiglu"])
def test_gated_activation_and_quantize(benchmark, kind, dtype):
    x, one = drawn(2048, 2, 2048, dtype=FLOATS[dtype]), jnp.ones(1)

    def side(module):
        def run(x):
            return module.act_lu(
                x,
                kind,
                None,
                jnp.float8_e4m3fn,
                te.ScalingMode.DELAYED_TENSOR_SCALING,
                te.QuantizeLayout.ROWWISE,
                one,
            )

        return waiting(run, x)

    sides = {
        "XLA": lambda: side(te.reference),
        "kernel": lambda: side(te),
        "copy": lambda: waiting(lambda x: -x, x[:, 0]),
    }
    compare(benchmark, sides, often, rounds=10, unit="ms", per=10)
