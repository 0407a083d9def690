"""The blocks of GGML's quantized types: values, scales and minima.

A type cuts the last axis of an array into blocks of 32 or 256 numbers. A block has bytes for its
scales, for its minima if the type has them, and for the bits of the numbers. The numbers of a block
that share a scale are a group. ``[n]`` is the number of blocks. The layouts are those of
llama.cpp's ``ggml-common.h``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


def nibbles(octets: np.ndarray, low_first: bool = True) -> np.ndarray:
    """Return uint8[*lead, 2 * n], the halves of each byte of uint8[*lead, n]."""
    halves = octets & 15, octets >> 4
    both = np.stack(halves if low_first else halves[::-1], axis=-1)
    return both.reshape(*octets.shape[:-1], 2 * octets.shape[-1])


def as_float4(numbers: np.ndarray) -> np.ndarray:
    """Return float4_e2m1fn of uint8, whose low four bits are those of each number."""
    table = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    both = np.concatenate([table, -table]).astype(jnp.float4_e2m1fn)
    return both[numbers]


def from_float4(numbers: np.ndarray) -> np.ndarray:
    """Return uint8 in 0 to 15 of float4_e2m1fn: see ``as_float4``."""
    return numbers.view(np.uint8) & 15


def whole_bytes(halves: np.ndarray) -> np.ndarray:
    """Return uint8[*lead, n / 2] of halves[*lead, n], low halves first."""
    return (halves[..., ::2] | halves[..., 1::2] << 4).astype(np.uint8)


class Groups(NamedTuple):
    """What blocks represent, per group: ``(values + shift) * scale + minimum``.

    Attributes:
        values: int8 [n, size], signed; of floats float4_e2m1fn.
        scale: float16 or float32 [n, groups]; of floats what the qtype has.
        minimum: of the same dtypes and shape; None for types without. ``BlockType.shift`` goes with
            it.
    """

    values: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A quantized type of GGML.

    Attributes:
        name: GGML's name.
        qtype: the format of the quantized values.
        size: numbers in a block.
        group: numbers that share a scale.
        bytes: bytes of a block.
        shift: what is added to each value if the type has minima; None otherwise.
        read: turns uint8 [n, bytes] into groups.
        write: turns groups into uint8 [n, bytes]; None for a type that can only be read.
    """

    name: str
    qtype: str
    size: int
    group: int
    bytes: int
    shift: int | None
    read: Callable[[np.ndarray], Groups]
    write: Callable[[Groups], np.ndarray] | None = None


def _cut(blocks: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Return the fields of blocks, of so many bytes each."""
    ends = np.cumsum(sizes)
    assert blocks.shape[1] == ends[-1], (blocks.shape, sizes)
    return np.split(blocks, ends[:-1], axis=1)


def _half(field: np.ndarray) -> np.ndarray:
    """Return the float16 numbers of a field."""
    return np.ascontiguousarray(field).view("<f2")


def _bytes(numbers: np.ndarray) -> np.ndarray:
    """Return float16 numbers as a field."""
    return np.ascontiguousarray(numbers.astype("<f2")).view(np.uint8)


def _fields(field: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Return numbers of 1, 2 or 4 bits of uint8 [n, bytes]: per ``run`` bytes, low bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[None, None, :, None]
    parts = field.reshape(len(field), -1, 1, run) >> shifts
    return (parts & np.uint8(2**bits - 1)).reshape(len(field), -1)


def _joined(numbers: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Return the field that ``_fields`` takes apart."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[None, None, :, None]
    parts = numbers.astype(np.uint8).reshape(len(numbers), -1, 8 // bits, run) << shifts
    return np.bitwise_or.reduce(parts, axis=2).reshape(len(numbers), -1)


def _signed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Return numbers without a sign, less half of their range."""
    return (numbers.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


def _unsigned(values: np.ndarray, bits: int) -> np.ndarray:
    return (values.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)


def _read_q8_0(blocks: np.ndarray) -> Groups:
    scale, values = _cut(blocks, 2, 32)
    return Groups(np.ascontiguousarray(values).view(np.int8), _half(scale))


def _write_q8_0(groups: Groups) -> np.ndarray:
    values = np.ascontiguousarray(groups.values.astype(np.int8)).view(np.uint8)
    return np.concatenate([_bytes(groups.scale), values], axis=1)


def _plain(bits: int, has_minimum: bool) -> tuple[Callable, Callable]:
    """Return how 4- and 5-bit types without super-blocks are read and written."""
    halves = 2 if has_minimum else 1
    high = 4 if bits == 5 else 0

    def read(blocks: np.ndarray) -> Groups:
        heads, fifth, low = _cut(blocks, 2 * halves, high, 16)
        numbers = _fields(low, 4, 16)
        if high:
            numbers = numbers | np.unpackbits(fifth, axis=1, bitorder="little") << np.uint8(4)
        scale, *minimum = np.split(_half(heads), halves, axis=1)
        return Groups(_signed(numbers, bits), scale, *minimum)

    def write(groups: Groups) -> np.ndarray:
        numbers = _unsigned(groups.values, bits)
        heads = [_bytes(x) for x in (groups.scale, groups.minimum) if x is not None]
        fifth = [np.packbits(numbers >> 4, axis=1, bitorder="little")] if high else []
        return np.concatenate([*heads, *fifth, _joined(numbers & 15, 4, 16)], axis=1)

    return read, write


def _read_q2_k(blocks: np.ndarray) -> Groups:
    both, low, d, dmin = _cut(blocks, 16, 64, 2, 2)
    scale = _half(d).astype(np.float32) * (both & 15)
    minimum = -(_half(dmin).astype(np.float32) * (both >> 4))
    return Groups(_signed(_fields(low, 2, 32), 2), scale, minimum)


def _read_q3_k(blocks: np.ndarray) -> Groups:
    high, low, packed, d = _cut(blocks, 32, 64, 12, 2)
    # 16 scales of 6 bits: 4 low bits in 8 bytes, 2 high ones in 4.
    sixes = _fields(packed[:, :8], 4, 8) | _fields(packed[:, 8:], 2, 4) << np.uint8(4)
    scale = _half(d).astype(np.float32) * (sixes.astype(np.int8) - 32)
    numbers = _fields(low, 2, 32) | _fields(high, 1, 32) << np.uint8(2)
    return Groups(_signed(numbers, 3), scale)


def _scales_and_minima(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 8 scales and 8 minima of 6 bits in 12 bytes.

    The first four of each have a byte; the others 4 bits in the last four bytes, and the two high
    bits of those before.
    """
    first, second, rest = _cut(packed, 4, 4, 4)
    scale = [first & 63, (rest & 15) | (first >> 6) << np.uint8(4)]
    minimum = [second & 63, (rest >> 4) | (second >> 6) << np.uint8(4)]
    return np.concatenate(scale, axis=1), np.concatenate(minimum, axis=1)


def _read_q45_k(bits: int) -> Callable[[np.ndarray], Groups]:
    def read(blocks: np.ndarray) -> Groups:
        d, dmin, packed, high, low = _cut(blocks, 2, 2, 12, 32 if bits == 5 else 0, 128)
        sixes, minima = _scales_and_minima(packed)
        numbers = _fields(low, 4, 32)
        if bits == 5:
            numbers = numbers | _fields(high, 1, 32) << np.uint8(4)
        scale = _half(d).astype(np.float32) * sixes
        return Groups(_signed(numbers, bits), scale, -(_half(dmin).astype(np.float32) * minima))

    return read


def _read_q6_k(blocks: np.ndarray) -> Groups:
    low, high, eights, d = _cut(blocks, 128, 64, 16, 2)
    numbers = _fields(low, 4, 64) | _fields(high, 2, 32) << np.uint8(4)
    scale = _half(d).astype(np.float32) * np.ascontiguousarray(eights).view(np.int8)
    return Groups(_signed(numbers, 6), scale)


def _read_iq4_nl(blocks: np.ndarray) -> Groups:
    scale, low = _cut(blocks, 2, 16)
    return Groups(_fields(low, 4, 16), _half(scale))


def _read_iq4_xs(blocks: np.ndarray) -> Groups:
    d, high, low, numbers = _cut(blocks, 2, 2, 4, 128)
    # 8 scales of 6 bits: 4 low bits in 4 bytes, 2 high ones in 2, of each in turn.
    fours = np.stack([low & 15, low >> 4], axis=-1).reshape(len(low), 8)
    twos = high[..., None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    sixes = fours | twos.reshape(len(low), 8) << np.uint8(4)
    scale = _half(d).astype(np.float32) * (sixes.astype(np.int8) - 32)
    return Groups(_fields(numbers, 4, 16), scale)


def _read_tq1_0(blocks: np.ndarray) -> Groups:
    first, second, rest, d = _cut(blocks, 32, 16, 4, 2)
    # A byte has five digits of base 3, as a fraction of 256: the next is what times 3 overflows.
    digits = [
        (field[:, None] * np.asarray([1, 3, 9, 27, 81][:count], np.uint8)[:, None]).reshape(
            len(blocks), -1
        )
        for field, count in ((first, 5), (second, 5), (rest, 4))
    ]
    numbers = np.concatenate(digits, axis=1).astype(np.uint16) * 3 >> 8
    return Groups(numbers.astype(np.int8) - 1, _half(d))


def _read_tq2_0(blocks: np.ndarray) -> Groups:
    packed, d = _cut(blocks, 64, 2)
    numbers = _fields(packed, 2, 32)
    if (numbers == 3).any():  # 2, which no file of a ternary model has, nor int2
        raise ValueError("its numbers must be -1, 0 or 1, got 2")
    return Groups(numbers.astype(np.int8) - 1, _half(d))


def _read_mxfp4(blocks: np.ndarray) -> Groups:
    exponent, low = _cut(blocks, 1, 16)
    scale = np.ascontiguousarray(exponent).view(jnp.float8_e8m0fnu)
    return Groups(as_float4(_fields(low, 4, 16)), scale)


def _read_nvfp4(blocks: np.ndarray) -> Groups:
    scale, low = _cut(blocks, 4, 32)
    scale = np.where(scale == 127, np.uint8(0), scale)  # NaN is nothing here
    return Groups(as_float4(_fields(low, 4, 8)), scale.view(jnp.float8_e4m3fn))


TYPES = {
    one.name: one
    for one in (
        BlockType("Q8_0", "int8", 32, 32, 34, None, _read_q8_0, _write_q8_0),
        BlockType("Q4_0", "int4", 32, 32, 18, None, *_plain(4, False)),
        BlockType("Q4_1", "int4", 32, 32, 20, 8, *_plain(4, True)),
        BlockType("Q5_0", "int5", 32, 32, 22, None, *_plain(5, False)),
        BlockType("Q5_1", "int5", 32, 32, 24, 16, *_plain(5, True)),
        BlockType("Q2_K", "int2", 256, 16, 84, 2, _read_q2_k),
        BlockType("Q3_K", "int3", 256, 16, 110, None, _read_q3_k),
        BlockType("Q4_K", "int4", 256, 32, 144, 8, _read_q45_k(4)),
        BlockType("Q5_K", "int5", 256, 32, 176, 16, _read_q45_k(5)),
        BlockType("Q6_K", "int6", 256, 16, 210, None, _read_q6_k),
        BlockType("IQ4_NL", "iq4_nl", 32, 32, 18, None, _read_iq4_nl),
        BlockType("IQ4_XS", "iq4_nl", 256, 32, 136, None, _read_iq4_xs),
        BlockType("TQ1_0", "int2", 256, 256, 54, None, _read_tq1_0),
        BlockType("TQ2_0", "int2", 256, 256, 66, None, _read_tq2_0),
        BlockType("MXFP4", "mxfp4", 32, 32, 17, None, _read_mxfp4),
        BlockType("NVFP4", "nvfp4", 64, 16, 36, None, _read_nvfp4),
    )
}
"""The types that can be read, by name."""
DEQUANTIZED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
"""Types of vectors from a table, which become floats."""


def read(kind: BlockType, data: np.ndarray, shape: Sequence[int]) -> Groups:
    """Return what the bytes of an array stand for, in its shape.

    Args:
        kind: the type.
        data: uint8, the bytes of the array.
        shape: of the array; the last size is a multiple of the block's.

    Raises:
        ValueError: they stand for numbers that the type doesn't have.
    """
    *lead, last = shape
    found = kind.read(np.ascontiguousarray(data).reshape(-1, kind.bytes))
    scale, minimum = (
        None if part is None else part.reshape(*lead, last // kind.group) for part in found[1:]
    )
    assert scale is not None
    return Groups(found.values.reshape(shape), scale, minimum)


def write(kind: BlockType, groups: Groups) -> np.ndarray:
    """Return the bytes of an array, uint8 [*lead, bytes of a row]."""
    assert kind.write is not None
    lead, per = groups.values.shape[:-1], kind.size // kind.group
    scale, minimum = (None if part is None else part.reshape(-1, per) for part in groups[1:])
    assert scale is not None
    found = kind.write(Groups(groups.values.reshape(-1, kind.size), scale, minimum))
    return found.reshape(*lead, -1)
