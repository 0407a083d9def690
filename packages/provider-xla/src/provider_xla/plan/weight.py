"""How one parameter is quantized, or adapted: a parameter, or a weight derived from some."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import Expression
from interception_core import platform_of

from ..errors import QuantizationError
from ..extras import feature
from ..forms import AdapterForm
from ..kernels.packed import Packing, pack, packed_type
from ..program.matching import Axes
from ..rules.rule import Sparsity, sparsified

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
    """Return an array, or the type of one, quantized: a small one with few compiled programs.

    XLA compiles a program for each shape, which takes longer than to quantize a small array. So the
    slices of such an array (the elements that share a scale) become the rows of chunks, which have
    one of a few shapes, filled up with zeros. A row's scale and values depend on nothing outside of
    the row, and zeros change no range that an array's least and greatest values make.
    """
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


@dataclasses.dataclass(frozen=True)
class Granularity:
    """Along which axes of an array scales differ.

    Attributes:
        channel_axes: those with a scale per index.
        tile_axes: those with a scale per tile, with the size of a tile.
    """

    channel_axes: tuple[int, ...] = ()
    tile_axes: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def join(self, other: Granularity) -> Granularity:
        """Return the finest granularity that both operations can use."""
        # Scales may differ only along axes where both allow it. Tiles of the least common multiple
        # hold whole tiles of both.
        tiles = {}
        for axis in {*self.channel_axes, *self.tile_axes} & {*other.channel_axes, *other.tile_axes}:
            size = math.lcm(self.tile_axes.get(axis, 1), other.tile_axes.get(axis, 1))
            tiles[axis] = size
        channels = tuple(sorted(axis for axis, size in tiles.items() if size == 1))
        return Granularity(channels, {a: size for a, size in sorted(tiles.items()) if size > 1})

    def in_blocks(self, shape: Sequence[int], block: int) -> Granularity | None:
        """Return the same in tiles of a format's blocks; None if these are other tiles."""
        # A block may hold whole axes, such as a head that is smaller than it.
        rest = (*self.channel_axes, *self.tile_axes)
        whole = {axis: n for axis, n in enumerate(shape) if axis not in rest and n > 1}
        tiles = dict(sorted({**self.tile_axes, **whole}.items()))
        found = math.prod(tiles.values())
        return Granularity(self.channel_axes, tiles) if found == block else None

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of an array."""
        tiles = self.tile_axes
        return tuple(
            n if a in self.channel_axes else -(-n // tiles[a]) if a in tiles else 1
            for a, n in enumerate(shape)
        )

    def ragged_tiles(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the tiles that do not divide their axis: see ``QArray.ragged_tiles``."""
        return tuple(
            (axis - len(shape), tile)
            for axis, tile in sorted(self.tile_axes.items())
            if shape[axis] > tile and shape[axis] % tile
        )


def of_operand(
    axes: Axes,
    shape: Sequence[int],
    operand_shape: Sequence[int],
    contracted: Sequence[int],
    tile_sizes: Mapping[int, int],
) -> Granularity:
    """Return the finest granularity of a parameter that an operation can use.

    Contracted axes have one scale, or one per tile of the contraction. An axis that the operand
    lacks (a step of a scan) has a scale per index. ``axes`` are those that the parameter's became.
    """
    channels: list[int] = []
    tiles: dict[int, int] = {}
    merged: dict[int, list[int]] = {}
    for axis, became in enumerate(axes):
        if became is None:
            channels.append(axis)
        elif isinstance(became, int):
            merged.setdefault(became, []).append(axis)
        else:
            kept = [part for part in became if part not in contracted]
            if len(kept) == len(became):
                channels.append(axis)
            elif kept == list(became[: len(kept)]) and kept:
                # The outer parts stay: elements of the inner ones, side by side, share a scale.
                tiles[axis] = shape[axis] // math.prod(operand_shape[part] for part in kept)
            elif not kept:
                _split(axis, became, operand_shape, tile_sizes, channels, tiles)
    for became, parts in merged.items():
        if became not in contracted:
            channels.extend(parts)
        elif len(parts) == 1 and tile_sizes.get(became, 1) > 1:
            tiles[parts[0]] = tile_sizes[became]
        elif became in tile_sizes:
            _tile(parts, shape, tile_sizes[became], channels, tiles)
    return Granularity(tuple(sorted(channels)), dict(sorted(tiles.items())))


def _split(
    axis: int,
    became: Sequence[int],
    operand_shape: Sequence[int],
    tile_sizes: Mapping[int, int],
    channels: list[int],
    tiles: dict[int, int],
) -> None:
    """Tile an axis that became several, all of them contracted."""
    tile = 1
    for place, part in reversed(list(enumerate(became))):
        size, own = operand_shape[part], tile_sizes.get(part)
        tile *= size if own is None else own
        if own is not None and own < size:
            if size % own or any(tile_sizes.get(outer) != 1 for outer in became[:place]):
                return  # not one tile after the other: one scale
            break
    else:
        return
    channels.append(axis) if tile == 1 else tiles.update({axis: tile})


def _tile(
    parts: Sequence[int],
    shape: Sequence[int],
    tile_size: int,
    channels: list[int],
    tiles: dict[int, int],
) -> None:
    """Tile an axis that several, outer to inner, were merged into."""
    left = tile_size
    for axis in reversed(parts):
        if left == 1:
            channels.append(axis)
        elif left % shape[axis] == 0:
            tiles[axis] = shape[axis]
            left //= shape[axis]
        elif shape[axis] % left == 0:
            tiles[axis], left = left, 1
        else:
            return  # a tile would end within an index of the axis before


@dataclasses.dataclass(frozen=True, eq=False)
class Derived:
    """How a derived weight is computed.

    Attributes:
        path: its name in a plan, which is the text of its expression.
        expression: computes it from parameters.
        carrier: the pytree path of the parameter that it is stored beside.
        shape: its shape. If a loop computes it, leading axes hold all steps.
        dtype: its float dtype.
    """

    path: str
    expression: Expression
    carrier: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def leaves(self) -> tuple[str, ...]:
        """The pytree paths of the parameters that it is computed from."""
        return tuple(leaf.path for leaf in self.expression.leaves())


@dataclasses.dataclass(frozen=True)
class WeightPlan:
    """How one parameter is quantized.

    Attributes:
        path: its pytree path.
        shape: its shape.
        dtype: its dtype.
        rule: the number of the rule.
        qtype: the name of its quantized type.
        method: the calibration method.
        granularity: which axes have scales.
        stepped: axes along which each index is a separate array (the layers of a scan).
        ops: the ids of the operations that use it.
        packings: by platform, how it is packed for the kernels that compute its operations; a
            platform on which XLA computes them has no entry.
        platform: the one that the plan's parameters are on, and for which bytes are counted.
        sparsity: which of its elements are zeros; None if none have to be.
        derived: how it is computed from parameters; None for a parameter.
        scale_dtype: name of the dtype of its scales; None for that of the format.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    rule: int
    qtype: str
    method: str
    granularity: Granularity
    stepped: tuple[int, ...]
    ops: tuple[str, ...]
    packings: Mapping[str, Packing] = dataclasses.field(default_factory=dict)
    platform: str = ""
    sparsity: Sparsity | None = None
    derived: Derived | None = None
    scale_dtype: str | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the paths of the parameters behind it."""
        return (self.path,) if self.derived is None else self.derived.leaves

    @property
    def bytes_before(self) -> int:
        """Return the bytes of the float array."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @functools.cached_property
    def bytes_after(self) -> int:
        """Return the stored bytes, packed for a kernel where it is."""
        return self.bytes_on(self.packings.get(self.platform))

    def bytes_on(self, packing: Packing | None) -> int:
        """Return the stored bytes on a platform."""
        return _form(self.how, self.shape, self.dtype, packing).nbytes

    def form(self, packing: Packing | None = None) -> Any:
        """Return the type of what is stored, packed or not."""
        return _form(self.how, self.shape, self.dtype, packing)

    @property
    def bytes(self) -> tuple[int, int]:
        """Return the bytes before and after."""
        return self.bytes_before, self.bytes_after

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Return its type."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "path": self.path,
            "shape": list(self.shape),
            "dtype": self.dtype.name,
            "rule": self.rule,
            "qtype": self.qtype,
            "method": self.method,
            "channel_axes": list(self.granularity.channel_axes),
            "tile_axes": {str(a): n for a, n in self.granularity.tile_axes.items()},
            "scale_dtype": self.scale_dtype,
            "ops": list(self.ops),
            "derived_from": [] if self.derived is None else list(self.derived.leaves),
            "packed": list(self.packings),
            "sparsity": None
            if self.sparsity is None
            else [str(self.sparsity[0]), self.sparsity[1]],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }

    def has_wide_scales(self, leaf: Any) -> bool:
        """Return whether a value's scales leave float16's normal range."""
        if self.scale_dtype != "float16":
            return False
        return not fits_float16(leaf, self.how)

    def of_values(self, leaf: Any) -> WeightPlan:
        """Return this plan, with float32 scales if a value needs them.

        Args:
            leaf: the value. A type or a tracer has no values to look at, and changes nothing.
        """
        concrete = isinstance(leaf, jax.Array | np.ndarray) and not isinstance(
            leaf, jax.core.Tracer
        )
        wide = concrete and self.has_wide_scales(leaf)
        return dataclasses.replace(self, scale_dtype=None) if wide else self

    def check(self, leaf: Any) -> None:
        """Raise QuantizationError if a value cannot be quantized as planned.

        A tracer has no value to check.
        """
        if isinstance(leaf, jax.core.Tracer):
            return
        if not is_finite(leaf):
            raise QuantizationError(
                f"{self.path} has values that are not finite, and can't be quantized to "
                f"{self.qtype} (rule {self.rule}). Find out where they come from, or leave it "
                "float by a rule without weight_qtype."
            )
        if self.has_wide_scales(leaf):
            raise QuantizationError(
                f"The scales of {self.path} (rule {self.rule}) must be normal numbers of float16, "
                "from 6.1e-5 to 65504, got others. Make the plan with these parameters, not with "
                "their types: it then has float32 scales here. Or give the rule "
                "scale_dtype='bfloat16'."
            )

    def quantized(self, leaf: Any) -> qn.QArray | qn.PackedQArray:
        """Return values quantized as planned, unchecked; see ``check``."""
        if self.sparsity is not None:
            leaf = _sparsified(leaf, self.sparsity)
        return quantized(leaf, self.how)

    @property
    def how(self) -> How:
        """Return how its array is quantized."""
        tiles = tuple(self.granularity.tile_axes.items())
        stepped = self.stepped if qn.get_qtype(self.qtype).name == "nvfp4" else ()
        channels = tuple(self.granularity.channel_axes)
        return How(self.qtype, channels, tiles, self.method, self.scale_dtype, stepped)


def quantize_leaf(plan: WeightPlan, leaf: Any, check: bool = True) -> qn.QArray | qn.PackedQArray:
    """Quantize one parameter, and wait until that is done.

    Raises:
        QuantizationError: it has values that are not finite, or scales that the plan's dtype of
            scales does not hold.
    """
    if check:
        plan.check(leaf)
    return jax.block_until_ready(plan.quantized(leaf))


def prepack_leaf(plan: WeightPlan, q: qn.StoredForm, platform: str | None = None) -> Any:
    """Pack a quantized parameter if its plan and sharding allow it, for ``platform`` or its own.

    QuantizationError: it has another format, shape or scales than the plan says.
    """
    return q.with_values(lambda values: _packed(plan, values, platform))


def _packed(plan: WeightPlan, q: Any, platform: str | None) -> Any:
    first = jax.tree.leaves(q)[0]
    packing = plan.packings.get(platform_of(first) if platform is None else platform)
    if packing is None or q.platform is not None:
        return q
    counts = plan.granularity.scale_shape(plan.shape)
    if (q.shape, q.qtype, q.scale_shape) != (plan.shape, plan.qtype, counts):
        raise QuantizationError(
            f"{plan.path} (rule {plan.rule}) is {q.qtype}{list(q.shape)} with scales of shape "
            f"{list(q.scale_shape)}, but the plan has {plan.qtype}{list(plan.shape)} with scales "
            f"of shape {list(counts)}. Pack what this plan, or one like it, has quantized."
        )
    sharding = getattr(first, "sharding", None)
    if packing.unshardable(q.shape, sharding):
        return q
    whole = getattr(q, "global_scale", None)
    sizes = () if whole is None else whole.shape
    if any(n > 1 for axis, n in enumerate(sizes) if axis not in packing.lead):
        return q  # of another library: kernels have one for each weight of a stack
    if getattr(q, "zero_point", None) is None:
        return pack(q, packing)
    # Kernels know no zero points. The sums of the activation know what they add.
    held = feature("pack-zero-points")(q.unpacked())
    return held.with_values(lambda values: pack(values, packing))


_sparsified = jax.jit(sparsified, static_argnums=1)


# Thousands of parameters have a few forms.
@functools.lru_cache(maxsize=4096)
def _form(how: How, shape: tuple[int, ...], dtype: np.dtype, packing: Packing | None) -> Any:
    """Return the type of an array that is quantized, and packed."""
    leaf = jax.ShapeDtypeStruct(shape, dtype)
    stored = in_one.eval_shape(leaf, how)
    return stored if packing is None else packed_type(stored, packing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterPlan:
    """The adapter of one parameter, wherever the program uses it.

    Attributes:
        path: pytree path of the parameter.
        dtype: its dtype.
        rule: the number of the rule.
        ops: the ids of the operations whose rule asked for it.
        form: what it computes, and the shapes of its arrays.
    """

    path: str
    dtype: np.dtype
    rule: int
    ops: tuple[str, ...]
    form: AdapterForm

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its arrays, by name."""
        return dict(self.form.shapes)

    @property
    def size(self) -> int:
        """The number of elements of its arrays."""
        return sum(map(math.prod, self.form.shapes.values()))

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        values = {"path": self.path, "dtype": self.dtype.name, "rule": self.rule, "ops": self.ops}
        values |= dataclasses.asdict(self.form) | {"kind": self.form.kind, "shapes": self.shapes}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
