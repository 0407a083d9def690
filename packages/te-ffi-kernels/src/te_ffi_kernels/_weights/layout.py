"""The packed format, version 1, and packing in plain JAX.

A panel holds 16 columns of a weight, all rows, and what a kernel needs to know of them::

    bytes 0-3    "JTWP"
    4            version, 1
    5            bits, 8 or 4
    6            columns in use, 1 to 16
    7            0
    8-11         rows K
    12-15        group: rows that share a scale, 0 for all
    16-19        sum of the payload's words w[i] modulo 2**32
    20-23        sum of (i + 1) * w[i] modulo 2**32 (Fletcher's position-dependent sum)
    24-27        (sum of the six words above) ^ 0x9E3779B9
    28-63        0
    64-          the payload: scales float32[groups][16], then codes

All words are of 32 bits, little-endian. In 8 bits, codes are ``[K / 4][16][4]`` bytes of
code + 128, so that 64 bytes are what a dot-product instruction takes: four rows of 16 columns. In 4
bits, 64 bytes are eight rows: the low half of byte ``[i][column][j]`` is row ``8 * i + j``, the
high half row ``8 * i + 4 + j``, both code + 8. Rows are padded to a multiple of 64 with code 0;
groups are multiples of 8 rows that divide K, which is not padded then.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

COLUMNS = 16
HEADER = 64
VERSION = 1
ROW_ALIGNMENT = 64
GROUP_ALIGNMENT = 8
_MAGIC = int.from_bytes(b"JTWP", "little")
_SALT = 0x9E3779B9


def padded_rows(k: int, group: int) -> int:
    """Rows that are stored."""
    return k if group else -(-k // ROW_ALIGNMENT) * ROW_ALIGNMENT


def group_count(k: int, group: int) -> int:
    """Scales per column."""
    return k // group if group else 1


def panel_bytes(k: int, bits: int, group: int) -> int:
    """Bytes of a panel."""
    codes = COLUMNS * padded_rows(k, group) * bits // 8
    return HEADER + 4 * COLUMNS * group_count(k, group) + codes


def pack_panels(codes: jax.Array, scale: jax.Array, bits: int, group: int) -> jax.Array:
    """Packs int8[k, n] with float32[groups, n] to uint8[panels, panel_bytes]."""
    k, n = codes.shape
    panels = -(-n // COLUMNS)
    wide = panels * COLUMNS
    rows = padded_rows(k, group)
    codes = jnp.pad(codes, ((0, rows - k), (0, wide - n)))
    # [panel, row, column]
    codes = codes.reshape(rows, panels, COLUMNS).transpose(1, 0, 2)
    per_line = 4 if bits == 8 else 8
    lines = codes.reshape(panels, rows // per_line, per_line, COLUMNS).swapaxes(2, 3)
    values = lax.bitcast_convert_type(lines, jnp.uint8) + np.uint8(1 << (bits - 1))
    if bits == 4:
        values = (values & np.uint8(15)).reshape(panels, rows // 8, COLUMNS, 2, 4)
        values = values[:, :, :, 0] | (values[:, :, :, 1] << np.uint8(4))
    scale = jnp.pad(scale.astype(jnp.float32), ((0, 0), (0, wide - n)))
    scale = scale.reshape(group_count(k, group), panels, COLUMNS).transpose(1, 0, 2)
    parts = (lax.bitcast_convert_type(scale, jnp.uint8), values)
    # No -1: a weight may have no columns.
    flat = [part.reshape(panels, math.prod(part.shape[1:])) for part in parts]
    payload = jnp.concatenate(flat, axis=1)
    return jnp.concatenate([_headers(payload, k, n, bits, group), payload], axis=1)


def unpack_panels(
    buffer: jax.Array, k: int, n: int, bits: int, group: int
) -> tuple[jax.Array, jax.Array]:
    """Unpacks uint8[*lead, panels, panel_bytes] to int8[*lead, k, n], float32[*lead, groups, n].

    The header is not looked at, which only values could tell.
    """
    lead, panels = buffer.shape[:-2], buffer.shape[-2]
    groups, rows = group_count(k, group), padded_rows(k, group)
    start = HEADER + 4 * COLUMNS * groups
    scale = buffer[..., HEADER:start].reshape(*lead, panels, groups, COLUMNS, 4)
    scale = lax.bitcast_convert_type(scale, jnp.float32)
    values = buffer[..., start:]
    if bits == 4:
        values = values.reshape(*lead, panels, rows // 8, COLUMNS, 4)
        halves = jnp.stack([values & np.uint8(15), values >> np.uint8(4)], axis=-2)
        lines = halves.reshape(*lead, panels, rows // 8, COLUMNS, 8)
    else:
        lines = values.reshape(*lead, panels, rows // 4, COLUMNS, 4)
    codes = lax.bitcast_convert_type(lines, jnp.int8) - np.int8(8) if bits == 4 else (
        lax.bitcast_convert_type(lines ^ np.uint8(128), jnp.int8)
    )  # fmt: skip
    codes = codes.swapaxes(-2, -1).reshape(*lead, panels, rows, COLUMNS)
    return _columns(codes, n)[..., :k, :], _columns(scale, n)


def _columns(x: jax.Array, n: int) -> jax.Array:
    """[*lead, panels, rows, 16] as [*lead, rows, n]."""
    x = jnp.moveaxis(x, -3, -2)
    return x.reshape(*x.shape[:-2], math.prod(x.shape[-2:]))[..., :n]


def _headers(payload: jax.Array, k: int, n: int, bits: int, group: int) -> jax.Array:
    """uint8[panels, 64] for uint8[panels, bytes]."""
    panels = payload.shape[0]
    words = lax.bitcast_convert_type(payload.reshape(panels, payload.shape[1] // 4, 4), jnp.uint32)
    places = jnp.arange(1, words.shape[1] + 1, dtype=jnp.uint32)
    columns = np.minimum(n - COLUMNS * np.arange(panels), COLUMNS).astype(np.uint32)
    first = np.full(panels, _MAGIC, np.uint32)
    kinds = np.uint32(VERSION | bits << 8) | columns << np.uint32(16)
    fixed = [first, kinds, np.full(panels, k, np.uint32), np.full(panels, group, np.uint32)]
    sums = [words.sum(1, dtype=jnp.uint32), (words * places[None]).sum(1, dtype=jnp.uint32)]
    head = jnp.stack([*map(jnp.asarray, fixed), *sums], axis=1)
    check = head.sum(1, dtype=jnp.uint32) ^ np.uint32(_SALT)
    head = jnp.concatenate([head, check[:, None]], axis=1)
    head = lax.bitcast_convert_type(head, jnp.uint8).reshape(panels, 4 * head.shape[1])
    return jnp.pad(head, ((0, 0), (0, HEADER - head.shape[1])))
