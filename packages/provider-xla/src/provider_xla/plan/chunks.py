"""Chunks: quantize arrays of any shape with few compiled programs.

XLA compiles a program for each shape, which takes longer than to quantize a small array. So the
slices of such an array (the elements that share a scale) become the rows of chunks, which have one
of a few shapes, filled up with zeros. A row's scale and values depend on nothing outside of the
row, and zeros change no range that an array's least and greatest values make.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from interception_core import platform_of

CHUNK = 2**18
"""Elements of a chunk."""

MOST = 2**24
"""Elements of an array up to which compiling for its shape costs more than moving it."""

_NARROWEST = 32
"""Rows have 32, 64, 128, ... elements."""

_METHODS = ("absmax", "minmax")
"""The calibration methods that zeros in a slice don't change."""

Tiles = Sequence[tuple[int, int]]


def on_host(leaf: Any) -> np.ndarray | None:
    """Return a small array that the CPU holds, as NumPy's; None for others."""
    if isinstance(leaf, np.ndarray):
        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
        held = jax.default_backend() == "cpu"
    elif isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        held = len(leaf.sharding.device_set) == 1 and platform_of(leaf) == "cpu"
        held = held and leaf.is_fully_addressable
    else:
        return None
    return np.asarray(leaf) if held and 0 < leaf.size <= MOST else None


class _Rows(NamedTuple):
    """An array whose slices are rows.

    Attributes:
        rows: [slices, elements].
        split: the shape of the array with its tiled axes split.
        order: where the axes of ``rows``, split, are in ``split``.
        counts: the shape of the scales.
    """

    rows: np.ndarray
    split: tuple[int, ...]
    order: tuple[int, ...]
    counts: tuple[int, ...]


def _rows(array: np.ndarray, channel_axes: Sequence[int], tile_axes: Tiles) -> _Rows | None:
    """Return an array's slices as rows; None if a last tile is shorter."""
    tiles, split, kept, rest, counts = dict(tile_axes), list[int](), [], [], list[int]()
    for axis, size in enumerate(array.shape):
        tile = 1 if axis in channel_axes else min(tiles.get(axis, size), size)
        if size % tile:
            return None
        counts.append(size // tile)
        kept.append(len(split))
        rest.append(len(split) + 1)
        split += [size // tile, tile]
    order = (*kept, *rest)
    rows = array.reshape(split).transpose(order).reshape(math.prod(counts), -1)
    return _Rows(rows, tuple(split), order, tuple(counts))


def quantized(
    leaf: Any,
    qtype: str,
    channel_axes: Sequence[int],
    tile_axes: Tiles,
    method: str,
    scale_dtype: str | None,
) -> qn.QArray | None:
    """Return what ``qn.quantize`` does; None where chunks can't.

    Scales of slices with zero points may differ in the last bit, because XLA fuses a product and a
    sum in programs of some shapes and not in those of others.
    """
    found, kind = _slices(leaf, channel_axes, tile_axes, method), qn.get_qtype(qtype)
    if found is None or kind.two_level or kind.packable:
        return None
    if kind.block not in (None, found.rows.shape[1]):
        return None
    run = functools.partial(_quantized, qtype=qtype, method=method, scale_dtype=scale_dtype)
    parts = _in_chunks(run, found.rows, kind.block)
    values, scale, *points = (
        np.concatenate(part) for part in zip(*parts, strict=True) if part[0] is not None
    )
    inner = [found.split[axis] for axis in found.order]
    whole = values[:, : found.rows.shape[1]].reshape(inner).transpose(np.argsort(found.order))
    committed = isinstance(leaf, jax.Array) and leaf.committed
    # Uncommitted arrays may meet those of any device, as those that a jitted function returns.
    put = functools.partial(jax.device_put, device=leaf.sharding if committed else None)
    return qn.QArray(
        put(np.ascontiguousarray(whole.reshape(leaf.shape))),
        put(scale.reshape(found.counts)),
        put(points[0].reshape(found.counts)) if points else None,
        qtype=kind.name,
        dtype=found.rows.dtype,
    )


def fits_float16(
    leaf: Any, qtype: str, channel_axes: Sequence[int], tile_axes: Tiles, method: str
) -> bool | None:
    """Return whether float16 holds all scales as normal numbers; None where chunks can't tell."""
    found, block = _slices(leaf, channel_axes, tile_axes, method), qn.get_qtype(qtype).block
    if found is None or block not in (None, found.rows.shape[1]):
        return None
    run = functools.partial(_fits_float16, qtype=qtype, method=method)
    # Rows of zeros, which fill the last chunk up, don't count.
    return all(bool(np.all(part)) for (part,) in _in_chunks(run, found.rows, block))


def _slices(leaf: Any, channel_axes: Sequence[int], tile_axes: Tiles, method: str) -> _Rows | None:
    array = on_host(leaf)
    if array is None or qn.parse_calibration_method(method).name not in _METHODS:
        return None
    return _rows(array, channel_axes, tile_axes)


def _in_chunks(
    run: Callable[[jax.Array], tuple[Any, ...]], rows: np.ndarray, width: int | None
) -> list[tuple[Any, ...]]:
    """Return the results of ``run`` for each chunk of rows [count, elements].

    ``width`` is a chunk's; None for the next of a few, so that few programs are compiled.
    """
    count, elements = rows.shape
    if width is None:
        width = _NARROWEST
        while width < elements:
            width *= 2
    height = max(CHUNK // width, 1)
    found = []
    for start in range(0, count, height):
        part = chunk = rows[start : start + height]
        if part.shape != (height, width):
            chunk = np.zeros((height, width), rows.dtype)
            chunk[: len(part), :elements] = part
        # Also while a program is traced, in which the array is a constant.
        with jax.ensure_compile_time_eval():
            results = run(jax.device_put(chunk))
        found.append(tuple(r if r is None else np.asarray(r)[: len(part)] for r in results))
    return found


@functools.partial(jax.jit, static_argnames=("qtype", "method", "scale_dtype"))
def _quantized(
    rows: jax.Array, *, qtype: str, method: str, scale_dtype: str | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    q = qn.quantize(rows, qtype, **_each_row(qtype), method=method, scale_dtype=scale_dtype)
    return q.qvalue, q.scale, q.zero_point


@functools.partial(jax.jit, static_argnames=("qtype", "method"))
def _fits_float16(rows: jax.Array, *, qtype: str, method: str) -> tuple[jax.Array]:
    found = qn.calibrate(rows, qtype, **_each_row(qtype), method=method)
    return (jnp.broadcast_to(qn.has_normal_scales(found, qtype, "float16"), rows.shape[:1]),)


def _each_row(qtype: str) -> dict[str, Any]:
    block = qn.get_qtype(qtype).block
    return {"channel_axes": (0,), "tile_axes": {} if block is None else {1: block}}
