"""Cases of ``jaxtap bench``: matmuls with packed weights, and attention over a cache."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from interception_core import Bench, BenchCase, KernelSpec, get_op

from ._measured import TABLE
from ._stages import isa
from .decode.op import decode_attention
from .packed_weights.pack import pack_w4, pack_w8

ROWS = (1, 2, 4, 8, 16, 64, 128, 512, 1024, 4096)
WEIGHTS = ((1024, 1024), (4096, 4096), (1024, 32000))
GROUP = 32
"""Rows of a weight in 4 bits that share a scale."""
DTYPES = ("float32", "bfloat16")
LAYERS = (
    (56, 64, 64, 3, 1),
    (28, 128, 128, 3, 1),
    (14, 256, 256, 3, 1),
    (7, 512, 512, 3, 1),
    (56, 144, 144, 3, 144),
    (14, 672, 672, 5, 672),
)
"""Of convolutions: side of an image, input and output channels, side of the window, groups."""
POSITIONS = (128, 512, 2048, 8192)
HEADS = ((16, 16), (16, 4))
"""Heads of queries, and heads of keys."""


def matmul(spec: KernelSpec) -> Bench:
    """Return matmuls with a packed weight, beside XLA's with floats.

    They are compared with the reference, which runs where the kernel does not.
    """
    bits = 4 if "w4" in spec.op else 8
    # Rows change fastest, so that each weight is packed once.
    cases = (
        _matmul(spec.op, bits, k, n, dtype, rows)
        for k, n in WEIGHTS
        for dtype in DTYPES
        for rows in ROWS
    )
    return Bench(cases, "reference", TABLE, isa())


def _matmul(op: str, bits: int, k: int, n: int, dtype: str, rows: int) -> BenchCase:
    def x() -> jax.Array:
        return jnp.asarray(np.random.default_rng(1).normal(size=(rows, k)), dtype)

    labels = {"dtype": dtype, "k": k, "n": n, "rows": rows}
    return BenchCase(
        labels,
        lambda: (get_op(op), (x(), _packed(bits, k, n))),
        {"float": lambda: (jnp.matmul, (x(), _float(bits, k, n, dtype)))},
    )


def _weight(bits: int, k: int, n: int) -> tuple[Any, Any]:
    rng, most = np.random.default_rng(0), 2 ** (bits - 1) - 1
    values = rng.integers(-most, most + 1, (k, n), np.int8)
    # A depthwise window has fewer rows than a group.
    groups, dtype = (max(1, k // GROUP), np.float16) if bits == 4 else (1, np.float32)
    return values, rng.uniform(0.001, 0.01, (groups, n)).astype(dtype)


@functools.lru_cache(maxsize=1)
def _packed(bits: int, k: int, n: int) -> Any:
    values, scale = map(jnp.asarray, _weight(bits, k, n))
    return (pack_w4 if bits == 4 else pack_w8)(values, scale)


@functools.lru_cache(maxsize=1)
def _float(bits: int, k: int, n: int, dtype: str) -> jax.Array:
    values, scale = _weight(bits, k, n)
    return jnp.asarray(values * np.repeat(scale.astype(np.float32), k // len(scale), 0), dtype)


def convolution(spec: KernelSpec) -> Bench:
    """Return convolutions of images with packed weights, beside XLA's with floats.

    They are compared with the reference, which runs where the kernel does not.
    """
    bits = 4 if "w4" in spec.op else 8
    # With float activations kernels are for depthwise convolutions alone.
    layers = LAYERS if spec.op.endswith("a8") else [one for one in LAYERS if one[-1] > 1]
    cases = (_convolution(spec.op, bits, *layer, images) for layer in layers for images in (1, 8))
    return Bench(cases, "reference", variant=isa())


def _convolution(
    op: str, bits: int, side: int, channels: int, n: int, window: int, groups: int, images: int
) -> BenchCase:
    labels = {"side": side, "channels": channels, "n": n, "window": window, "groups": groups}
    k, windows = window**2 * channels // groups, (window, window)

    def x() -> jax.Array:
        shape = (images, side, side, channels)
        return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)

    def packed() -> Any:
        values, scale = _weight(bits, k, n)
        scale = jnp.asarray(scale[:1], jnp.float32)
        return (pack_w4 if bits == 4 else pack_w8)(jnp.asarray(values), scale)

    def run(x: jax.Array, weight: Any) -> jax.Array:
        return get_op(op)(x, weight, windows, padding="SAME", groups=groups)

    def plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    def kernel() -> jax.Array:
        values, scale = _weight(bits, k, n)
        floats = values * scale[:1].astype(np.float32)
        return jnp.asarray(floats.reshape(*windows, channels // groups, n))

    return BenchCase(
        labels | {"images": images},
        lambda: (run, (x(), packed())),
        {"float": lambda: (plain, (x(), kernel()))},
    )


def attention(spec: KernelSpec) -> Bench:
    """Return attention of one query over a cache, beside XLA's."""
    cases = (
        _attention(dtype, heads, kv_heads, positions)
        for heads, kv_heads in HEADS
        for dtype in (*DTYPES, "int8")
        for positions in POSITIONS
    )
    return Bench(cases, "float", TABLE, isa())


def _attention(dtype: str, heads: int, kv_heads: int, positions: int) -> BenchCase:
    operands = _cache(dtype, heads, kv_heads, positions)
    # XLA has no attention over an int8 cache: it gets the same cache in float32.
    floats = _cache("float32" if dtype == "int8" else dtype, heads, kv_heads, positions)
    labels = {"dtype": dtype, "heads": heads, "kv_heads": kv_heads, "positions": positions}
    return BenchCase(
        labels, lambda: (_attend, operands()), {"float": lambda: (_plain, floats()[:3])}
    )


def _plain(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attend over a whole cache, without a length."""
    batch, queries, heads, size = q.shape
    q = q.reshape(batch, queries, keys.shape[1], -1, size) * (1 / math.sqrt(size))
    logits = jnp.einsum("btkgd,bksd->bkgts", q, keys)
    weights = jax.nn.softmax(logits, axis=-1)
    return jnp.einsum("bkgts,bksd->btkgd", weights, values).reshape(batch, queries, heads, size)


def _attend(q: jax.Array, keys: jax.Array, values: jax.Array, length: Any, *scales: Any) -> Any:
    named = dict(zip(("key_scale", "value_scale"), scales, strict=bool(scales)))
    return decode_attention(q, keys, values, length, **named)


def _cache(dtype: str, heads: int, kv_heads: int, positions: int) -> Any:
    size = 64

    def operands() -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(0)
        q = jnp.asarray(rng.normal(size=(1, 1, heads, size)), jnp.float32)
        shape = (1, kv_heads, positions, size)
        length = jnp.int32(positions)
        if dtype == "int8":
            keys, values = (jnp.asarray(rng.integers(-127, 128, shape, np.int8)) for _ in "kv")
            scales = (jnp.full(shape[:3], 0.01, jnp.float32) for _ in "kv")
            return q, keys, values, length, *scales
        keys, values = (jnp.asarray(rng.normal(size=shape), dtype) for _ in "kv")
        return q.astype(dtype), keys, values, length

    return operands
