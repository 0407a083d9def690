"""Rounding: quantize arrays of any shape, the small ones with few compiled programs.

XLA compiles a program for each shape, which takes longer than to quantize a small array. So the
slices of such an array (the elements that share a scale) become the rows of chunks, which have one
of a few shapes, filled up with zeros. A row's scale and values depend on nothing outside of the
row, and zeros change no range that an array's least and greatest values make.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
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


class How(NamedTuple):
    """How an array is quantized. Hashable.

    Attributes:
        qtype: name of the quantized type.
        channel_axes: axes with a scale for each index.
        tile_axes: axes with a scale for each tile, with the size of a tile.
        method: the calibration method.
        scale_dtype: name of the dtype of scales; None for that of the format.
        stepped: axes of which each index is quantized apart, with its own global scale.
    """

    qtype: str
    channel_axes: tuple[int, ...]
    tile_axes: tuple[tuple[int, int], ...] = ()
    method: str = "absmax"
    scale_dtype: str | None = None
    stepped: tuple[int, ...] = ()

    @property
    def granularity(self) -> dict[str, Any]:
        """Return where scales differ, as quant-numerics takes it."""
        tiles = dict(self.tile_axes)
        return {"channel_axes": self.channel_axes, "tile_axes": tiles, "method": self.method}


def quantized(leaf: Any, how: How) -> qn.QArray | qn.PackedQArray:
    """Return an array, or the type of one, quantized."""
    found = in_chunks(leaf, how)
    return in_one(leaf, how) if found is None else found


def fits_float16(leaf: Any, how: How) -> bool:
    """Return whether float16 holds all scales of an array as normal numbers."""
    found = _rows(leaf, how)
    if found is None:
        return bool(_fits_float16(leaf, how))
    return all(bool(one) for one, _ in _each_chunk(_fits_float16, found.rows, how))


def is_finite(leaf: Any) -> bool:
    """Return whether all numbers of an array are finite."""
    held = on_host(leaf)
    return bool(_all_finite(leaf) if held is None else np.isfinite(held).all())


@functools.partial(jax.jit, static_argnums=1)
def in_one(leaf: jax.Array, how: How) -> qn.QArray | qn.PackedQArray:
    """Quantize an array by a program for its shape."""
    if how.stepped:
        axis, *rest = how.stepped
        fewer = tuple(a - (a > axis) for a in how.channel_axes if a != axis)
        tiles = tuple((a - (a > axis), n) for a, n in how.tile_axes)
        steps = tuple(a - 1 for a in rest)
        inner = how._replace(channel_axes=fewer, tile_axes=tiles, stepped=steps)
        return jax.vmap(lambda x: in_one(x, inner), in_axes=axis, out_axes=axis)(leaf)
    q = qn.quantize(leaf, how.qtype, **how.granularity, scale_dtype=how.scale_dtype)
    return qn.pack(q) if qn.get_qtype(how.qtype).packable else q


@functools.partial(jax.jit, static_argnums=1)
def _fits_float16(leaf: jax.Array, how: How) -> jax.Array:
    # Ranges of zeros, such as of rows that fill the last chunk up, don't count.
    found = qn.calibrate(leaf, how.qtype, **how.granularity)
    return qn.has_normal_scales(found, how.qtype, "float16")


@jax.jit
def _all_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(leaf).all()


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


def _rows(leaf: Any, how: How) -> _Rows | None:
    """Return an array's slices as rows; None where chunks can't quantize it."""
    array = on_host(leaf)
    if array is None or qn.parse_calibration_method(how.method).name not in _METHODS:
        return None
    tiles, split, kept, rest, counts = dict(how.tile_axes), list[int](), [], [], list[int]()
    for axis, size in enumerate(array.shape):
        tile = 1 if axis in how.channel_axes else min(tiles.get(axis, size), size)
        if size % tile:  # the last tile is shorter
            return None
        counts.append(size // tile)
        kept.append(len(split))
        rest.append(len(split) + 1)
        split += [size // tile, tile]
    order = (*kept, *rest)
    rows = array.reshape(split).transpose(order).reshape(math.prod(counts), -1)
    if qn.get_qtype(how.qtype).block not in (None, rows.shape[1]):
        return None
    return _Rows(rows, tuple(split), order, tuple(counts))


def in_chunks(leaf: Any, how: How) -> qn.QArray | None:
    """Return an array quantized in chunks; None where they can't.

    Scales of slices with zero points may differ in the last bit, because XLA fuses a product and a
    sum in programs of some shapes and not in those of others.
    """
    kind = qn.get_qtype(how.qtype)
    found = None if kind.two_level or kind.packable else _rows(leaf, how)
    if found is None:
        return None
    values, scales, points = [], [], []
    for q, count in _each_chunk(in_one, found.rows, how):
        values.append(np.asarray(q.qvalue)[:count])
        scales.append(np.asarray(q.scale)[:count])
        points += [] if q.zero_point is None else [np.asarray(q.zero_point)[:count]]
    inner = [found.split[axis] for axis in found.order]
    whole = np.concatenate(values)[:, : found.rows.shape[1]].reshape(inner)
    whole = whole.transpose(np.argsort(found.order)).reshape(leaf.shape)
    committed = isinstance(leaf, jax.Array) and leaf.committed
    # Uncommitted arrays may meet those of any device, as those that a jitted function returns.
    put = functools.partial(jax.device_put, device=leaf.sharding if committed else None)
    return qn.QArray(
        put(np.ascontiguousarray(whole)),
        put(np.concatenate(scales).reshape(found.counts)),
        put(np.concatenate(points).reshape(found.counts)) if points else None,
        qtype=kind.name,
        dtype=found.rows.dtype,
    )


def _each_chunk(
    run: Callable[[jax.Array, How], Any], rows: np.ndarray, how: How
) -> Iterator[tuple[Any, int]]:
    """Yield the result of ``run`` for each chunk of rows [count, elements], and how many it has.

    A chunk is as wide as a block, or the next of a few widths, so that few programs are compiled.
    """
    (count, elements), block = rows.shape, qn.get_qtype(how.qtype).block
    width = block or _NARROWEST
    while width < elements:
        width *= 2
    height = max(CHUNK // width, 1)
    own = How(how.qtype, (0,), () if block is None else ((1, block),), how.method, how.scale_dtype)
    for start in range(0, count, height):
        part = chunk = rows[start : start + height]
        if part.shape != (height, width):
            chunk = np.zeros((height, width), rows.dtype)
            chunk[: len(part), :elements] = part
        # Also while a program is traced, in which the array is a constant.
        with jax.ensure_compile_time_eval():
            yield run(jax.device_put(chunk), own), len(part)
