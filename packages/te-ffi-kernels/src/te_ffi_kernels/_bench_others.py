"""Cases of ``jaxtap bench`` for ops without packed weights.

``jaxtap ops`` reads the signatures of ops off the same calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import te_ffi_kernels as te
from interception_core import Bench, BenchCase, KernelSpec

from ._bench import DTYPES, GROUP
from ._stages import isa

Size = tuple[int, ...]
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and the arrays that it is called with."""

TABLES = ((1024, 1024), (1024, 32000))
ROWS = ((128, 1024), (2048, 1024))
SCORES = ((1, 8, 128, 128), (1, 8, 1024, 1024))
"""Batch, heads, queries and keys."""
HEADS = ((1, 128, 8, 64), (1, 1024, 8, 64))
"""Batch, positions, heads and size."""
EXPERTS = ((128, 64), (2048, 64))
"""Tokens and experts."""
CHOSEN = 4
"""Experts of a token."""


def _normal(shape: Size, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _qvalue(shape: Size) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(-7, 8, shape, np.int8))


def _pack(bits: int, dtype: str, size: Size) -> Call:
    groups = size[0] // GROUP if bits == 4 else 1
    return getattr(te, f"pack_w{bits}"), (_qvalue(size), jnp.ones((groups, size[1]), dtype))


def _take(dtype: str, size: Size) -> Call:
    """Look up a few tokens in an embedding packed for the head."""
    pack, operands = _pack(4, "float16", size)
    fn = functools.partial(te.packed_take, out_dtype=dtype)
    return fn, (pack(*operands), jnp.arange(8, dtype=jnp.int32))


def _softmax(fusion: te.SoftmaxFusionType, dtype: str, size: Size) -> Call:
    masks = fusion == te.SoftmaxFusionType.SCALED_MASKED
    mask = jnp.zeros((size[0], 1, *size[2:]), jnp.uint8) if masks else None
    return lambda logits: te.softmax(logits, mask, 0.5, fusion), (_normal(size, dtype),)


def _norm(dtype: str, size: Size) -> Call:
    ones = jnp.ones(size[-1], dtype)
    return te.layernorm, (_normal(size, dtype), ones, ones)


def _activation(dtype: str, size: Size) -> Call:
    return te.activation, (_normal((size[0], 1, size[1]), dtype),)


def _quantize(dtype: str, size: Size) -> Call:
    one, nothing = jnp.ones(1, jnp.float32), jnp.zeros(0, jnp.float32)
    modes = te.ScalingMode.CURRENT_TENSOR_SCALING, te.QuantizeLayout.ROWWISE_COLWISE

    def fn(x: jax.Array) -> Any:
        state = nothing.astype(jnp.uint32)
        return te.dbias_quantize(x, one, one, state, nothing, nothing, "float8_e4m3fn", *modes)

    return fn, (_normal(size, dtype),)


def _dequantize(dtype: str, size: Size) -> Call:
    one = jnp.ones(1, jnp.float32)
    fn = functools.partial(te.dequantize, out_dtype=dtype)
    return fn, (_normal(size).astype(jnp.float8_e4m3fn), one, one, one)


def _fake_quantize(dtype: str, size: Size) -> Call:
    """Round to a range that is an average with that of the tensor."""
    terms = jnp.tile(jnp.array([-1.0, 1.0]), (1, 5, 1))
    fn = functools.partial(te.fake_quantize, batch_axes=1, observe=True)
    return lambda x, terms, seen: fn(x, jnp.abs(terms), 0, seen), (
        _normal(size, dtype),
        terms,
        jnp.zeros((1, 2)),
    )


def _quantize_int8(dtype: str, size: Size) -> Call:
    """Round at random, by column."""
    fn = functools.partial(te.quantize_int8, by_row=False)
    key = jnp.array([1, 2], jnp.uint32)
    return lambda x, factors, key: fn(x[None], factors[None], key=key), (
        _normal(size, dtype),
        jnp.ones(size[0]),
        key,
    )


def _dot_int8(dtype: str, size: Size) -> Call:
    """Multiply two matrices of so many rows."""
    scales = jnp.ones(size[1])
    return te.dot_int8, (_qvalue(size), _qvalue(size), scales, scales)


def _grouped_quantize(dtype: str, size: Size) -> Call:
    modes = te.ScalingMode.CURRENT_TENSOR_SCALING, te.QuantizeLayout.ROWWISE
    sizes = jnp.full(8, size[0] // 8, jnp.int32)

    def fn(x: jax.Array, scale: jax.Array, sizes: jax.Array) -> Any:
        return te.grouped_quantize(x, scale, sizes, "float8_e4m3fn", *modes)

    return fn, (_normal(size, dtype), jnp.ones(8, jnp.float32), sizes)


def _groups(dtype: str, size: Size) -> Call:
    sizes = jnp.full(8, size[0] // 8, jnp.int32)
    return te.grouped_dense, (_normal(size, dtype), _normal((8, size[1], size[1]), dtype), sizes)


def _routing_map(size: Size) -> jax.Array:
    return te.fused_topk_with_score_function(_normal(size), CHOSEN)[1]


def _dispatch(dtype: str, size: Size) -> Call:
    """Move tokens of 1024 numbers to rows."""
    fn = lambda x, routed: te.token_dispatch(x, routed, CHOSEN * size[0], align_size=16)[0]  # noqa: E731
    return fn, (_normal((size[0], 1024), dtype), _routing_map(size))


def _combine(dtype: str, size: Size) -> Call:
    """Move them back, each row with its weight."""
    tokens, routed = _normal((size[0], 1024), dtype), _routing_map(size)
    rows, _, row_map, *_ = te.token_dispatch(tokens, routed, CHOSEN * size[0])
    return te.token_combine, (rows, row_map, jax.nn.softmax(_normal(size, dtype)))


def _topk(dtype: str, size: Size) -> Call:
    return functools.partial(te.topk, k_value=CHOSEN), (_normal(size, dtype),)


def _attention(dtype: str, size: Size) -> Call:
    kinds = (
        te.AttnBiasType.NO_BIAS,
        te.AttnMaskType.CAUSAL_MASK,
        te.QKVLayout.BSHD_BSHD_BSHD,
        te.AttnSoftmaxType.VANILLA_SOFTMAX,
    )

    def fn(*qkv: jax.Array) -> jax.Array:
        return te.fused_attn(qkv, None, None, None, *kinds, size[-1] ** -0.5, 0.0, True)

    return fn, (_normal(size, dtype),) * 3


def _router(dtype: str, size: Size) -> Call:
    def fn(logits: jax.Array) -> jax.Array:
        return te.fused_topk_with_score_function(logits, CHOSEN)[0]

    return fn, (_normal(size, dtype),)


def _router_loss(dtype: str, size: Size) -> Call:
    def fn(probs: jax.Array, tokens: jax.Array) -> jax.Array:
        return te.fused_moe_aux_loss(probs, tokens, CHOSEN, 0.01)

    tokens = jnp.full(size[1], CHOSEN * size[0] // size[1], jnp.int32)
    return fn, (jax.nn.softmax(_normal(size, dtype)), tokens)


def _gradient(make: Callable[[str, Size], Call], dtype: str, size: Size) -> Call:
    """Return the backward pass alone, with its residuals as arguments."""
    fn, operands = make(dtype, size)
    out, back = jax.vjp(fn, *operands)
    # Not ones and not x: the gradients of a softmax and of a norm are zero for such cotangents.
    ct = _normal(out.shape, dtype, seed=1).astype(out.dtype)
    return lambda back, ct: back(ct)[0], (back, ct)


_FORWARD: dict[str, tuple[Callable[[str, Size], Call], tuple[Size, ...]]] = {
    "norm_forward": (_norm, ROWS),
    "act_lu": (_activation, ROWS),
    "fused_attn_forward": (_attention, HEADS),
    "fused_topk_with_score_function_forward": (_router, EXPERTS),
    "fused_moe_aux_loss_forward": (_router_loss, EXPERTS),
    **{
        f"{fusion.name.lower()}_softmax_forward": (functools.partial(_softmax, fusion), SCORES)
        for fusion in te.SoftmaxFusionType
    },
}
_BACKWARD = {"act_lu": "dact_dbias_quantize"}
_CALLS = {
    **_FORWARD,
    **{
        _BACKWARD.get(op, op.replace("forward", "backward")): (
            functools.partial(_gradient, make),
            sizes,
        )
        for op, (make, sizes) in _FORWARD.items()
    },
    "packed_take": (_take, TABLES),
    "dbias_quantize": (_quantize, ROWS),
    "dequantize": (_dequantize, ROWS),
    "fake_quantize": (_fake_quantize, ROWS),
    "quantize_int8": (_quantize_int8, ROWS),
    "dot_int8": (_dot_int8, (*ROWS, (64, 2048))),
    "grouped_quantize": (_grouped_quantize, ROWS),
    "grouped_gemm_v2": (_groups, ROWS),
    "make_row_id_map": (_dispatch, EXPERTS),
    "permute_with_mask_map": (_dispatch, EXPERTS),
    "unpermute_with_mask_map": (_combine, EXPERTS),
    "unpermute_bwd_with_merging_probs": (functools.partial(_gradient, _combine), EXPERTS),
    "topk": (_topk, (*EXPERTS, (8, 32000))),
    "pack_w8": (functools.partial(_pack, 8), TABLES),
    "pack_w4": (functools.partial(_pack, 4), TABLES),
}


def calls(spec: KernelSpec) -> Bench:
    """Return calls of an op of each dtype and size."""
    make, sizes = _CALLS[spec.op]
    has_one = spec.op.startswith("pack_") or spec.op == "dot_int8"
    dtypes = ("float32",) if has_one else DTYPES
    cases = [
        BenchCase(
            {"dtype": dtype, "shape": "x".join(map(str, size))},
            functools.partial(make, dtype, size),
        )
        for dtype in dtypes
        for size in sizes
    ]
    return Bench(cases, variant=isa())
