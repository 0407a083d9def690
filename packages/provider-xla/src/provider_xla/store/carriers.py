"""Carriers: arrays of every dtype as dtypes that safetensors readers know.

Readers differ in the small formats they know (the one for NumPy has no float8), and one tensor of
an unknown dtype makes some refuse the file. So quantized values of 2 and 4 bits are packed, and
8-bit floats are stored as their bits, all as uint8. A complex number is a pair of floats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

_BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
_COMPLEX = {"complex64": "float32", "complex128": "float64"}
SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
"""The dtypes that are stored as they are, and the format's names for them."""
DTYPES = SAFETENSORS | {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
"""With those that some other readers know too."""


def is_storable(dtype: str) -> bool:
    """Return whether arrays of a dtype can be stored."""
    return dtype in SAFETENSORS or dtype in _BITS or dtype in _COMPLEX or dtype[:6] == "float8"


def carrier(dtype: str, shape: Sequence[int]) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the carrier's dtype and shape for a dtype and shape.

    Quantized values of less than a byte are packed along the last axis, which is filled up to whole
    bytes.
    """
    shape = tuple(shape)
    if dtype in SAFETENSORS:
        return jnp.dtype(dtype), shape
    if dtype in _COMPLEX:
        return np.dtype(_COMPLEX[dtype]), (*shape, 2)
    if dtype in _BITS:
        shape = (*shape[:-1], -(-shape[-1] * _BITS[dtype] // 8)) if shape else (1,)
    return np.dtype(np.uint8), shape


def encode(array: np.ndarray) -> np.ndarray:
    """Return the array that stands for another, contiguous."""
    dtype, shape = array.dtype.name, array.shape
    array = np.ascontiguousarray(array).reshape(shape)  # it gives a scalar an axis
    if dtype in SAFETENSORS:
        return array
    if dtype in _COMPLEX:
        return array.reshape(*shape, 1).view(_COMPLEX[dtype])
    qvalue = array.view(np.uint8)
    return qvalue if dtype not in _BITS else _pack(qvalue, _BITS[dtype])


def decode(array: np.ndarray, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Return the array that another one stands for.

    Raises:
        ValueError: the array is not the carrier of that dtype and shape.
    """
    shape = tuple(shape)
    if (array.dtype, array.shape) != carrier(dtype, shape):
        raise ValueError(f"{array.dtype.name}{list(array.shape)} is not {dtype}{list(shape)}")
    if dtype in SAFETENSORS:
        return array
    if dtype in _COMPLEX:
        return np.ascontiguousarray(array).view(dtype).reshape(shape)
    if dtype not in _BITS:
        return array.view(jnp.dtype(dtype))
    bits = _BITS[dtype]
    qvalue = _unpack(array, bits, shape[-1] if shape else 1).reshape(shape)
    if dtype.startswith("int"):
        # Copy the sign bit into the bits above it. np.subtract, since `-` warns of a scalar that
        # wraps around.
        sign = np.uint8(1 << (bits - 1))
        return np.subtract(qvalue ^ sign, sign).view(np.int8).astype(jnp.dtype(dtype))
    return qvalue.view(jnp.dtype(dtype))


def _pack(qvalue: np.ndarray, bits: int) -> np.ndarray:
    """Pack along the last axis, a byte's first value in its low bits."""
    count = 8 // bits
    qvalue = np.atleast_1d(qvalue) & np.uint8(2**bits - 1)
    missing = -qvalue.shape[-1] % count
    if missing:
        qvalue = np.pad(qvalue, [(0, 0)] * (qvalue.ndim - 1) + [(0, missing)])
    result = qvalue[..., ::count].copy()
    for place in range(1, count):
        result |= qvalue[..., place::count] << np.uint8(bits * place)
    return result


def _unpack(packed: np.ndarray, bits: int, last: int) -> np.ndarray:
    count = 8 // bits
    qvalue = np.empty((*packed.shape, count), np.uint8)
    for place in range(count):
        qvalue[..., place] = (packed >> np.uint8(bits * place)) & np.uint8(2**bits - 1)
    full = packed.shape[-1] * count
    return qvalue.reshape(*packed.shape[:-1], full)[..., :last]


def layout(types: Mapping[str, tuple[np.dtype, Sequence[int]]]) -> dict[str, dict[str, Any]]:
    """Return what a header says of each tensor, in the order of their data."""
    entries, end = {}, 0
    # The largest elements first, as the format's usual writer does, so that all are aligned.
    for name in sorted(types, key=lambda name: -types[name][0].itemsize):
        dtype, shape = types[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": DTYPES[dtype.name],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    return entries


def header(metadata: Mapping[str, str], entries: Mapping[str, Any]) -> bytes:
    """Return a header, filled up so that the data are aligned."""
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def raw(array: np.ndarray) -> memoryview:
    """Return the bytes of an array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file for other libraries, with every dtype of ``DTYPES``."""
    entries = layout({name: (array.dtype, array.shape) for name, array in tensors.items()})
    text = header({"format": "pt"}, entries)  # what transformers asks for
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in entries:
            file.write(raw(tensors[name]))
