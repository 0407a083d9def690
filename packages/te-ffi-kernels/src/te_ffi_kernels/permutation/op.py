"""token_dispatch and token_combine: tokens to the rows of their experts, and back."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from .. import checks
from ..op import Op, gradient_of
from ..partition import partition_rows
from . import config, reference


def token_dispatch(
    inp: jax.Array,
    routing_map: jax.Array,
    num_out_tokens: int,
    probs: jax.Array | None = None,
    align_size: int | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array | None, jax.Array]:
    """Copy tokens to the rows of the experts they are routed to.

    As ``token_dispatch`` of ``transformer_engine.jax.permutation``. Rows of an expert follow each
    other, in the order of tokens; `align_size` pads them with zeros, so that the groups of rows fit
    a grouped matmul.

    Args:
        inp: float32, bfloat16 or float16 [tokens, hidden]; there may be more axes before.
        routing_map: bool or integers [tokens, experts], not 0 where a token goes to an expert.
        num_out_tokens: how many rows there are at most, without padding: the number of tokens times
            the experts of a token. Rows beyond are left out.
        probs: float32, bfloat16 or float16 [tokens, experts], moved with the tokens.
        align_size: the rows of each expert are padded to a multiple of it; None for no padding.

    Returns:
        - the rows [num_out_tokens, hidden], or with padding as many as there can be: the multiple
            of `align_size` at or below ``num_out_tokens + experts * (align_size - 1)``. Zero where
            no token goes.
        - the probabilities of rows, or None.
        - int32 [tokens, 2 * experts + 1], the map of rows: for each token its rows, counted without
            padding; then their experts, in ascending order; then how many there are. Rows and
            experts are filled up with -1.
        - int32 [experts] with padding, else None: what padding adds to the rows of each expert.
        - int32 [experts]: how many rows each expert has, padding among them.

    Differentiable with respect to inp and probs.

    Rows are counted in int32: tokens times experts, and rows with their padding, must be below
    2**31.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or value than above.
    """
    op = "token_dispatch"
    checks.dtype(op, "inp", inp.dtype, checks.FLOATS)
    x = config.flat(op, "inp", inp, "hidden")
    if jnp.issubdtype(routing_map.dtype, jnp.inexact):
        raise TypeError(
            f"{op}: routing_map must be bool or of integers, got {routing_map.dtype.name}"
        )
    routed = config.flat(op, "routing_map", routing_map, "experts")
    routed = routed if routed.dtype in (jnp.bool_, jnp.uint8) else routed != 0
    config.tokens(op, "routing_map", routed, x.shape[0], "inp")
    experts = routed.shape[1]
    config.countable(op, "routing_map", math.prod(routed.shape), "tokens times experts")
    rows = config.count(op, "num_out_tokens", num_out_tokens)
    given = jnp.zeros((0,), x.dtype)
    if probs is not None:
        given = config.probs(op, "probs", probs, (x.shape[0], experts))
    row_id_map, counts = _ROW_MAP(None, routed)
    offsets = jnp.zeros((0,), jnp.int32)
    if align_size is not None:
        align = config.count(op, "align_size", align_size)
        rows = (rows + experts * (align - 1)) // align * align
        aligned = -(-counts // align) * align
        padding = aligned - counts
        offsets, counts = jnp.cumsum(padding, dtype=jnp.int32) - padding, aligned
    config.countable(op, "num_out_tokens", rows, "with their padding")
    out, permuted = _PERMUTE(rows, x, row_id_map, given, offsets)
    return (
        out,
        None if probs is None else permuted,
        row_id_map,
        None if align_size is None else offsets,
        counts,
    )


def token_combine(
    inp: jax.Array,
    row_id_map: jax.Array,
    merging_probs: jax.Array | None = None,
    pad_offsets: jax.Array | None = None,
) -> jax.Array:
    """Sum the rows that experts made of each token, in float32.

    As ``token_combine`` of ``transformer_engine.jax.permutation``: what ``token_dispatch`` did,
    backwards.

    Args:
        inp: float32, bfloat16 or float16 [rows, hidden].
        row_id_map: as ``token_dispatch`` gives it.
        merging_probs: float32, bfloat16 or float16 [tokens, experts], which rows are multiplied
            with; there may be more axes before.
        pad_offsets: as ``token_dispatch`` gives it.

    Returns:
        [tokens, hidden] of inp's dtype. Differentiable with respect to inp and merging_probs.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or value than above.
    """
    op = "token_combine"
    checks.dtype(op, "inp", inp.dtype, checks.FLOATS)
    if inp.ndim != 2:
        raise ValueError(f"{op}: inp must have shape [rows, hidden], got {inp.shape}")
    offsets = jnp.zeros((0,), jnp.int32) if pad_offsets is None else pad_offsets
    experts = config.row_map(op, row_id_map, offsets)
    nothing = jnp.zeros((0,), inp.dtype)
    given = nothing
    if merging_probs is not None:
        given = config.probs(op, "merging_probs", merging_probs, (row_id_map.shape[0], experts))
    return _UNPERMUTE(None, inp, row_id_map, given, nothing, offsets)[0]


def _row_map_results(_: None, routed: jax.Array) -> Any:
    tokens, experts = routed.shape
    return (
        jax.ShapeDtypeStruct((tokens, 2 * experts + 1), jnp.int32),
        jax.ShapeDtypeStruct((experts,), jnp.int32),
    )


_ROW_MAP = Op("make_row_id_map", reference.row_map, results=_row_map_results)


def _by_column(
    given: list[str], found: list[str], run: Any, *operands: jax.Array, sums: tuple[int, ...] = ()
) -> Any:
    """Share out the columns ("h") of a call, all else being whole.

    Args:
        given: the axes of each operand, a letter each, as "th".
        found: the same for each result.
        run: the call.
        operands: its operands, of which some may be empty.
        sums: indices of the results that are sums over columns.
    """
    axes = [
        [*names]
        if math.prod(x.shape) or len(names) == x.ndim
        else [f"{i}{j}" for j in range(x.ndim)]
        for i, (names, x) in enumerate(zip(given, operands, strict=True))
    ]
    axes = [[f"n{name}" for name in one] for one in axes]
    results = [[f"n{name}" for name in one] for one in found]
    whole = {name for one in (*axes, *results) for name in one} - {"nh"}
    return partition_rows(run, axes, results, whole, sums)


def _permute_results(rows: int, x: jax.Array, _: jax.Array, probs: jax.Array, *rest: Any) -> Any:
    return (
        jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype),
        jax.ShapeDtypeStruct((rows if probs.size else 0,), probs.dtype),
    )


def _permute_partition(rows: int, block: Any, *operands: jax.Array) -> Any:
    run = functools.partial(block, rows)
    return _by_column(["th", "tm", "te", "e"], ["rh", "q"], run, *operands)


def _permute_gradient(rows: int, saved: Any, cts: Any) -> Any:
    row_id_map, offsets, has_probs = saved
    nothing = jnp.zeros((0,), cts[0].dtype)
    permuted = cts[1] if has_probs.size else nothing
    x_ct, probs_ct = _UNPERMUTE(None, cts[0], row_id_map, nothing, permuted, offsets)
    return x_ct, None, probs_ct if has_probs.size else None, None


_PERMUTE = Op(
    "permute_with_mask_map",
    reference.permute,
    results=_permute_results,
    partition=_permute_partition,
    save=lambda rows, operands, found: (operands[1], operands[3], operands[2]),
    gradient=_permute_gradient,
)


def _unpermute_results(
    _: None,
    x: jax.Array,
    row_id_map: jax.Array,
    merging: jax.Array,
    permuted: jax.Array,
    *rest: Any,
) -> Any:
    tokens, width = row_id_map.shape
    shape = (tokens, width // 2) if permuted.size else (0, 0)
    return (
        jax.ShapeDtypeStruct((tokens, x.shape[1]), x.dtype),
        jax.ShapeDtypeStruct(shape, permuted.dtype),
    )


def _unpermute_partition(_: None, block: Any, *operands: jax.Array) -> Any:
    run = functools.partial(block, None)
    return _by_column(["rh", "tm", "te", "r", "e"], ["th", "op"], run, *operands)


def _unpermute_gradient(_: None, saved: Any, cts: Any) -> Any:
    x, row_id_map, merging, permuted, offsets = saved
    nothing = jnp.zeros((0,), merging.dtype)
    permuted_ct = None
    if merging.size:
        x_ct, merging_ct = _GRADIENT(None, cts[0], row_id_map, x, merging, offsets)
    else:
        x_ct, merging_ct = _PERMUTE(x.shape[0], cts[0], row_id_map, nothing, offsets)[0], None
    if permuted.size:
        zeros = jnp.zeros((row_id_map.shape[0], 1), permuted.dtype)
        permuted_ct = _PERMUTE(x.shape[0], zeros, row_id_map, cts[1], offsets)[1]
    return x_ct, None, merging_ct, permuted_ct, None


_UNPERMUTE = Op(
    "unpermute_with_mask_map",
    reference.unpermute,
    results=_unpermute_results,
    partition=_unpermute_partition,
    gradient=_unpermute_gradient,
)


def _gradient_results(
    _: None, grad: jax.Array, row_id_map: jax.Array, x: jax.Array, merging: jax.Array, *rest: Any
) -> Any:
    return (
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(merging.shape, merging.dtype),
    )


def _gradient_partition(_: None, block: Any, *operands: jax.Array) -> Any:
    run = functools.partial(block, None)
    return _by_column(["th", "tm", "rh", "te", "e"], ["rh", "te"], run, *operands, sums=(1,))


_GRADIENT = Op(
    "unpermute_bwd_with_merging_probs",
    reference.unpermute_gradient,
    results=_gradient_results,
    partition=_gradient_partition,
    gradient=gradient_of(reference.unpermute_gradient),
)
