"""The packed format, and packing in plain JAX.

A panel holds 16 columns of a weight in 8 bits, 32 of one in 4 bits, all rows, and what a kernel
needs to know of them::

    bytes 0-3    "JTWP"
    4            version: 1 in 8 bits, 2 in 4 bits, 3 in 4 bits with a table
    5            bits, 8 or 4
    6            columns in use, at least 1
    7            0 in 8 bits; bits of a scale in version 2; kind of scale + 16 * table in version 3
    8-11         rows K
    12-15        group: rows that share a scale, 0 for all
    16-19        sum of the payload's words w[i] modulo 2**32
    20-23        sum of (i + 1) * w[i] modulo 2**32 (Fletcher's position-dependent sum)
    24-27        (sum of the six words above) ^ 0x9E3779B9
    28-63        0
    64-          the payload

All words are of 32 bits, little-endian. The payload is, with C columns:

- in 8 bits scales float32[groups][C], then the quantized values of all rows;
- in 4 bits for each group scales[C], float32 or float16, then the quantized values of its rows. So
  a panel is read from its first byte to its last: with float16 scales in groups of 32, nine cache
  lines for each 32 rows, 4.5 bits a weight. Scales in float8_e4m3fn come after float32[C], with
  which the scales of each column are multiplied. Zeros fill the payload up to whole lines of 64
  bytes.

In 8 bits, quantized values are ``[K / 4][C][4]`` bytes of value + 128, so that 64 bytes are what a
dot-product instruction takes: four rows of 16 columns. In 4 bits, the low half of byte
``[i][column][j]`` is row ``8 * i + j``, the high half row ``8 * i + 4 + j``, both value + 8, or the
place in the table. Rows are padded to a multiple of 64 with value 0 (place 0); groups are multiples
of 8 rows that divide K, which is not padded then.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

HEADER = 64
LINE = 64
"""Bytes of a cache line, of which a payload has whole ones."""
ROW_ALIGNMENT = 64
GROUP_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True)
class Table:
    """The numbers that the 16 quantized values of 4 bits stand for: integers times a factor.

    Attributes:
        values: the integers.
        factor: what they are multiplied with.
        number: in headers and attributes.
    """

    values: tuple[int, ...]
    factor: float
    number: int

    @property
    def parts(self) -> tuple[tuple[tuple[int, ...], float], ...]:
        """Return bytes and factors that numbers are sums of, the high ones first.

        Kernels multiply integers of 8 bits: a number with more is two, each rescaled apart.
        """
        if max(map(abs, self.values)) < 128:
            return ((self.values, self.factor),)
        low = tuple((value + 128) % 256 - 128 for value in self.values)
        high = tuple((value - part) // 256 for value, part in zip(self.values, low, strict=True))
        return ((high, 256 * self.factor), (low, self.factor))


_HALF = (0, 1, 2, 3, 4, 6, 8, 12)
_NF4_ONE = 31908
_NF4_LOW = (-_NF4_ONE, -22214, -16754, -12601, -9076, -5896, -2905, 0)
_NF4_HIGH = (2539, 5135, 7853, 10782, 14062, 17952, 23068, _NF4_ONE)
TABLES = {
    "int4": Table(tuple(range(-8, 8)), 1.0, 0),
    # E2M1 of the OCP Microscaling Formats v1.0, by its bits, doubled.
    "e2m1": Table((*_HALF, *(-value for value in _HALF)), 0.5, 1),
    # llama.cpp's IQ4_NL.
    "iq4_nl": Table(
        (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), 1.0, 2
    ),
    # The 4-bit NormalFloat of QLoRA (arXiv:2305.14314), rounded to multiples of what is nearest to
    # all of them: 8e-6 at most.
    "nf4": Table((*_NF4_LOW, *_NF4_HIGH), 1 / _NF4_ONE, 3),
}
"""What quantized values of 4 bits stand for, by name. Those of "int4" are the numbers themselves;
those of others are places in the table, 0 to 15."""
_SCALES = ("float32", "float16", "float8_e8m0fnu", "float8_e4m3fn")
"""Dtypes of scales, by their numbers in headers and attributes."""
_MAGIC = int.from_bytes(b"JTWP", "little")
_SALT = 0x9E3779B9


def group_count(k: int, group: int) -> int:
    """Return the number of scales per column."""
    return k // group if group else 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a weight of k rows is packed. Hashable.

    Attributes:
        k: rows.
        bits: bits of a quantized value, 8 or 4.
        group: rows that share a scale, 0 for all.
        scale_dtype: "float32", or "float16" in 4 bits; of the table "e2m1" also "float8_e8m0fnu" or
            "float8_e4m3fn".
        table: in 4 bits, which of ``TABLES`` the values are of.
    """

    k: int
    bits: int
    group: int
    scale_dtype: str = "float32"
    table: str = "int4"

    @property
    def has_column_scale(self) -> bool:
        """Return whether there is a float for each column, by which its scales are multiplied."""
        return self.scale_dtype == "float8_e4m3fn"

    @property
    def version(self) -> int:
        """Return the version of the format."""
        return 1 if self.bits == 8 else 2 if self.table == "int4" else 3

    @property
    def columns(self) -> int:
        """Return the columns of a panel."""
        return 16 if self.bits == 8 else 32

    @property
    def groups(self) -> int:
        """Return scales per column."""
        return group_count(self.k, self.group)

    @property
    def rows(self) -> int:
        """Return how many rows are stored."""
        return self.k if self.group else -(-self.k // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of the scales of a group."""
        return self.columns * jnp.dtype(self.scale_dtype).itemsize

    @property
    def panel_bytes(self) -> int:
        """Return the bytes of a panel."""
        return HEADER + -(-self._used // LINE) * LINE

    @property
    def _used(self) -> int:
        """Return the bytes of a payload, without what fills its last line up."""
        values = self.columns * self.rows * self.bits // 8
        return self._column_bytes + self.groups * self.scale_bytes + values

    @property
    def _column_bytes(self) -> int:
        """Return the bytes of the floats of columns."""
        return 4 * self.columns if self.has_column_scale else 0

    @property
    def attributes(self) -> dict[str, Any]:
        """Return what kernels are told beside k and n."""
        if self.bits == 8:
            return {"group": self.group}
        kinds = {"scale_kind": _SCALES.index(self.scale_dtype), "table": TABLES[self.table].number}
        return {"group": self.group, **{name: kind for name, kind in kinds.items() if kind}}

    @property
    def question(self) -> dict[str, Any]:
        """Return what kernels are asked about beside shapes and dtypes."""
        asked = {"group": self.group, "bits": self.bits}
        return asked if self.version < 3 else asked | {"table": self.table}

    @property
    def _parts(self) -> int:
        """Return how many (scales, values) parts follow each other."""
        return 1 if self.bits == 8 else self.groups

    def panels(self, n: int) -> int:
        """Return the number of panels of n columns."""
        return -(-n // self.columns)

    def buffer(self, n: int) -> jax.ShapeDtypeStruct:
        """Return the type of n packed columns."""
        return jax.ShapeDtypeStruct((self.panels(n), self.panel_bytes), jnp.uint8)

    def pack(self, qvalue: jax.Array, scale: jax.Array, *column_scale: jax.Array) -> jax.Array:
        """Pack int8[k, n] with scale_dtype[groups, n] to uint8[panels, panel_bytes].

        Where columns have a float, ``column_scale`` is float32[n].
        """
        k, n = qvalue.shape
        panels = self.panels(n)
        wide = panels * self.columns
        qvalue = jnp.pad(qvalue, ((0, self.rows - k), (0, wide - n)))
        # [panel, row, column]
        qvalue = qvalue.reshape(self.rows, panels, self.columns).transpose(1, 0, 2)
        # [panel, line, column, row]: a line has the rows of a column that are in one word.
        per_line = 32 // self.bits
        lines = qvalue.reshape(panels, self.rows // per_line, per_line, self.columns).swapaxes(2, 3)
        values = lax.bitcast_convert_type(lines, jnp.uint8) + np.uint8(self._zero)
        if self.bits == 4:
            values = values & np.uint8(15)
            values = values.reshape(panels, self.rows // 8, self.columns, 2, 4)
            values = values[:, :, :, 0] | (values[:, :, :, 1] << np.uint8(4))
        if scale.dtype.itemsize == 1:  # not all of these have a zero
            scale = lax.bitcast_convert_type(scale, jnp.uint8)
        scale = jnp.pad(scale, ((0, 0), (0, wide - n)))
        scale = scale.reshape(self.groups, panels, self.columns).transpose(1, 0, 2)
        # One part per panel, or per group of it. Not reshaped with -1: there may be no columns.
        flat = [
            part.reshape(panels, self._parts, math.prod(part.shape[1:]) // self._parts)
            for part in (lax.bitcast_convert_type(scale, jnp.uint8), values)
        ]
        payload = jnp.concatenate(flat, axis=2).reshape(panels, self._used - self._column_bytes)
        for column in column_scale:
            first = jnp.pad(column, (0, wide - n)).reshape(panels, self.columns)
            first = lax.bitcast_convert_type(first, jnp.uint8).reshape(panels, self._column_bytes)
            payload = jnp.concatenate([first, payload], axis=1)
        payload = jnp.pad(payload, ((0, 0), (0, self.panel_bytes - HEADER - self._used)))
        return jnp.concatenate([self._headers(payload, n), payload], axis=1)

    def unpack(self, buffer: jax.Array, n: int) -> tuple[jax.Array, ...]:
        """Unpack uint8[*lead, panels, panel_bytes] to quantized values and scales.

        Headers are not checked: under a trace their values are not known.

        Returns:
            int8[*lead, k, n] and scale_dtype[*lead, groups, n]; and float32[*lead, n] where columns
            have a float.
        """
        lead, panels = buffer.shape[:-2], buffer.shape[-2]
        parts = self._parts
        payload = buffer[..., HEADER + self._column_bytes : HEADER + self._used]
        payload = payload.reshape(*lead, panels, parts, payload.shape[-1] // parts)
        start = self.groups // parts * self.scale_bytes
        size = jnp.dtype(self.scale_dtype).itemsize
        scale = payload[..., :start].reshape(*lead, panels, self.groups, self.columns, size)
        scale = scale[..., 0] if size == 1 else scale  # bytes are not put together
        scale = lax.bitcast_convert_type(scale, jnp.dtype(self.scale_dtype))
        values = payload[..., start:]
        if self.bits == 4:
            values = values.reshape(*lead, panels, self.rows // 8, self.columns, 4)
            halves = jnp.stack([values & np.uint8(15), values >> np.uint8(4)], axis=-2)
            lines = halves.reshape(*lead, panels, self.rows // 8, self.columns, 8)
            qvalue = lax.bitcast_convert_type(lines, jnp.int8) - np.int8(self._zero)
        else:
            lines = values.reshape(*lead, panels, self.rows // 4, self.columns, 4)
            qvalue = lax.bitcast_convert_type(lines ^ np.uint8(128), jnp.int8)
        qvalue = qvalue.swapaxes(-2, -1).reshape(*lead, panels, self.rows, self.columns)
        found = _columns(qvalue, n)[..., : self.k, :], _columns(scale, n)
        if not self.has_column_scale:
            return found
        first = buffer[..., HEADER : HEADER + self._column_bytes]
        first = first.reshape(*lead, panels, 1, self.columns, 4)
        return *found, _columns(lax.bitcast_convert_type(first, jnp.float32), n)[..., 0, :]

    @property
    def _zero(self) -> int:
        """Return what is added to quantized values."""
        return (128, 8, 0)[self.version - 1]

    def _headers(self, payload: jax.Array, n: int) -> jax.Array:
        """Return uint8[panels, 64] for uint8[panels, bytes]."""
        panels, size = payload.shape
        words = lax.bitcast_convert_type(payload.reshape(panels, size // 4, 4), jnp.uint32)
        places = jnp.arange(1, words.shape[1] + 1, dtype=jnp.uint32)
        columns = np.minimum(n - self.columns * np.arange(panels), self.columns).astype(np.uint32)
        kind = _SCALES.index(self.scale_dtype) + 16 * TABLES[self.table].number
        last = (0, 8 * jnp.dtype(self.scale_dtype).itemsize, kind)[self.version - 1]
        kinds = np.uint32(self.version | self.bits << 8 | last << 24)
        fixed: list[Any] = [_MAGIC, kinds | columns << np.uint32(16), self.k, self.group]
        fixed = [np.broadcast_to(np.asarray(word, np.uint32), panels) for word in fixed]
        sums = [words.sum(1, dtype=jnp.uint32), (words * places[None]).sum(1, dtype=jnp.uint32)]
        head = jnp.stack([*map(jnp.asarray, fixed), *sums], axis=1)
        check = head.sum(1, dtype=jnp.uint32) ^ np.uint32(_SALT)
        head = jnp.concatenate([head, check[:, None]], axis=1)
        head = lax.bitcast_convert_type(head, jnp.uint8).reshape(panels, 4 * head.shape[1])
        return jnp.pad(head, ((0, 0), (0, HEADER - head.shape[1])))


def _columns(x: jax.Array, n: int) -> jax.Array:
    """Return [*lead, panels, rows, columns] as [*lead, rows, n]."""
    x = jnp.moveaxis(x, -3, -2)
    return x.reshape(*x.shape[:-2], math.prod(x.shape[-2:]))[..., :n]
