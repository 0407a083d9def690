"""Fake quantization to the average of a tensor's ranges, in one call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..op import Op
from ..partition import axes_in, partition_rows
from . import config as checks
from . import reference
from .config import Config


def fake_quantize(
    x: jax.Array,
    terms: jax.Array,
    row: jax.Array | int = 0,
    seen: jax.Array | None = None,
    *,
    bits: int = 8,
    symmetric: bool = False,
    batch_axes: int = 0,
    decay: float | None = None,
    observe: bool = False,
    join: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Round a tensor to the integers of its range, an average over steps of training.

    The range of a tensor is the mean of the ranges of its batch indices, each from its least to its
    greatest number, with 0 in it. It is added to the ranges of earlier steps, and their average
    says what an integer is worth and which one means 0: fake quantization as in Jacob et al. 2017,
    arXiv:1712.05877, section 3.

    Two tables have a row for each tensor of a model, so that a tensor takes one call.

    Args:
        x: float32, bfloat16 or float16 of any shape.
        terms: float32[rows, 5, 2], for the lower and the upper bounds: the sum of the ranges before
            and its divisor, both as they are once one more range is added to the sum; the sum and
            its divisor as they are without it; and the number of ranges in the sum.
        row: which row is that of x, int32; from 0 to rows - 1.
        seen: float32[rows, 2], the ranges that this step has seen; not finite if none. They count
            if ``observe`` is False or ``join`` is True.
        bits: of the integers, 2 to 16: from -2**(bits-1) to 2**(bits-1) - 1, and if symmetric from
            1 - 2**(bits-1) on.
        symmetric: whether ranges are [-upper, upper], and the integer 0 means 0.
        batch_axes: how many of the first axes are those of a batch.
        decay: of an exponential average: a range has the weight 1 - decay. None: the sum is a
            plain one.
        observe: whether the range of x is that of this step. If not, it is the one in ``seen``, and
            without that none, unless no step has had any: then it is the range of x.
        join: with ``observe``, whether the range of x is joined with the one in ``seen``.

    Returns:
        x rounded, of its dtype, NaN where x is NaN; the average bounds, float32[2]; and ``seen``
        with the range of this step if it is observed. A bound that isn't finite is not added.
        Differentiable with respect to x: the derivative is 1 within the average bounds and 0 beyond
        (arXiv:1308.3432). Under ``vmap`` of x the mapped axis is one more of the batch.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or value than above.
    """
    row = jnp.asarray(row, jnp.int32)
    config = checks.config(
        x,
        terms,
        row,
        seen,
        bits=bits,
        symmetric=symmetric,
        batch_axes=batch_axes,
        decay=decay,
        observe=observe,
        join=join,
    )
    # Constants for differentiation, so that it doesn't look into the op.
    operands = (x, terms, row) if seen is None else (x, terms, row, seen)
    out, inside, bounds, *new = _OP(config, *lax.stop_gradient(operands))
    return _clipped(config.bits_axis, x, out, inside), bounds, new[0] if new else seen


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _clipped(bits_axis: int | None, x: jax.Array, out: jax.Array, inside: jax.Array) -> jax.Array:
    """Return ``out``, with the derivative of clipping x."""
    return out


@_clipped.defjvp
def _clipped_jvp(bits_axis: int | None, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (_, out, inside), tangent = primals, tangents[0]

    # So that the derivative keeps the bits, and not what they stand for.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def clipped(tangent: jax.Array, inside: jax.Array) -> jax.Array:
        is_inside = reference.unpacked(inside, bits_axis, tangent.shape)
        return lax.select(is_inside, tangent, lax.full_like(tangent, 0))

    return out, clipped(tangent, inside)


def _results(config: Config, x: jax.Array, *tables: jax.Array) -> tuple[Any, ...]:
    shape = reference.shape_of_bits(config.bits_axis, x.shape)
    found = [(x.shape, x.dtype), (shape, jnp.uint8), ((2,), jnp.float32)]
    if config.observe:
        found.append((tables[-1].shape, jnp.float32))
    return tuple(jax.ShapeDtypeStruct(*one) for one in found)


def _attributes(config: Config, *_: jax.Array) -> dict[str, Any]:
    return {
        "bits": config.bits,
        "symmetric": config.symmetric,
        "batch_axes": config.batch_axes,
        "bits_axis": -1 if config.bits_axis is None else config.bits_axis,
        "share": np.float32(config.share),
        "observe": config.observe,
        "join": config.join,
        "seen": config.seen,
    }


def _partition(config: Config, block: Any, x: jax.Array, *tables: jax.Array) -> Any:
    """Find the extremes of blocks of x in plain JAX; where x is whole, call the kernel."""
    whole = functools.partial(block, config)
    names = [f"b{i}" for i in range(x.ndim)]
    bits = list(names)
    alike, multiples = {}, {}
    if (axis := config.bits_axis) is not None:
        bits[axis], alike, multiples = "bits", {"bits": names[axis]}, {names[axis]: 8}
    parts = {"terms": ["rows", "five", "two"], "row": [], "seen": ["rows", "two"]}
    given = [names, *list(parts.values())[: len(tables)]]
    found = [names, bits, ["two"], *([parts["seen"]] if config.observe else [])]

    def on_device(specs: Any) -> Any:
        axes = tuple(tuple(sorted(axes_in((one,)))) for one in specs[0])
        if not any(axes):
            return whole
        return functools.partial(reference.fake_quantize, config, axes=axes)

    tables_axes = {"rows", "five", "two"}
    options = {"alike": alike, "multiples": multiples, "on_device": on_device}
    return partition_rows(whole, given, found, tables_axes, **options)


def _batch(run: Any, config: Config, size: int, in_batched: Any, *operands: jax.Array) -> Any:
    """Make the mapped axis of x one more of the batch's."""
    if in_batched[0] and not any(in_batched[1:]):
        axis = None if config.bits_axis is None else config.bits_axis + 1
        more = dataclasses.replace(config, batch_axes=config.batch_axes + 1, bits_axis=axis)
        return run(more, *operands), (True, True, *(False,) * (1 + config.observe))
    axes = [0 if one else None for one in in_batched]
    found = jax.vmap(functools.partial(reference.fake_quantize, config), axes)(*operands)
    return found, (True,) * len(found)


_OP = Op(
    "fake_quantize",
    reference.fake_quantize,
    results=_results,
    attributes=_attributes,
    partition=_partition,
    batch=_batch,
)
