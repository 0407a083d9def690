"""What is in a folder, what a method of quantization is to its reader, and what methods share."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import quant_numerics as qn
from provider_xla.file_formats import StoreError

from ..float_files import INDEX, SINGLE, TensorFiles

CONFIG = "config.json"
KEYS = ("quantization_config", "compression_config")
"""The keys that a config may say under what is quantized, the second in older files."""


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the config of a folder.

    Raises:
        StoreError: there is none, or it is not a JSON object.
    """
    path = folder / CONFIG
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} must be the config of a checkpoint: {error}.") from error
    if not isinstance(found, dict):
        raise StoreError(f"{path} must be a JSON object, got a {type(found).__name__}.")
    return found


def tensors_in(folder: Path) -> TensorFiles:
    """Return the tensors of a checkpoint.

    Raises:
        StoreError: it has none, or a file is damaged.
    """
    if not folder.is_dir() or not any((folder / name).is_file() for name in (INDEX, SINGLE)):
        raise StoreError(f"{folder} must be a folder with {INDEX} or {SINGLE}, got neither.")
    return TensorFiles(folder)


class Method(abc.ABC):
    """How a folder's weights are quantized, made of what its config says.

    Attributes:
        parts: ends of the names of all tensors that a quantized weight may be made of; what is
            before one is the module.
        marks: those of them that only a quantized weight has.
        weight: what follows the module in the name of the weight.
    """

    parts: ClassVar[tuple[str, ...]]
    marks: ClassVar[tuple[str, ...]]
    weight: ClassVar[str] = ".weight"

    def __init__(self, where: str, config: Mapping[str, Any]):  # noqa: B027 (most need nothing)
        """Take what a config says; raise StoreError for what can't be read."""

    @abc.abstractmethod
    def read(self, module: str, found: Mapping[str, np.ndarray], dtype: DTypeLike | None) -> Any:
        """Return a weight [*lead, out, in] of its tensors, by their ends.

        Args:
            module: the name, for schemes by module.
            found: the tensors.
            dtype: that the weight stands for; None for what its file says.

        Returns:
            A QArray; or a ``Dequantized``, where no QArray has its groups.

        Raises:
            ValueError, TypeError or KeyError: tensors do not fit what the config says.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class Dequantized:
    """The numbers of a weight whose quantized values no QArray can have.

    Attributes:
        numbers: of the weight, floats.
        why: what is so of it, for a warning.
    """

    numbers: np.ndarray
    why: str


def grouped(
    values: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray | None,
    group_of: np.ndarray | None,
    qtype: str,
    dtype: DTypeLike,
) -> Any:
    """Return a weight of int8 [out, in] whose columns are in groups, or raise ValueError.

    ``scale`` and ``zero_point`` are [out, groups], and ``group_of`` is int [in], None where groups
    are side by side.
    """
    check_scales(scale)
    n, k = values.shape
    groups = scale.shape[-1]
    if scale.shape != (n, groups) or groups == 0 or k % groups:
        raise ValueError(
            f"scales of shape {list(scale.shape)} must be [{n}, groups of {k} columns]"
        )
    if zero_point is not None and not zero_point.any():
        zero_point = None
    if group_of is not None and (group_of == -1).all():  # not set
        group_of = None
    if group_of is not None and not np.array_equal(group_of, np.arange(k) // (k // groups)):
        if group_of.shape != (k,) or group_of.min() < 0 or group_of.max() >= groups:
            raise ValueError(f"groups of columns must be {k} numbers below {groups} (g_idx)")
        numbers = values.astype(np.float32)
        if zero_point is not None:
            numbers -= zero_point.astype(np.float32)[:, group_of]
        numbers *= scale.astype(np.float32)[:, group_of]
        return Dequantized(numbers.astype(dtype), "groups of columns that are not side by side")
    storage = qn.get_qtype(qtype).storage_dtype
    points = None if zero_point is None else zero_point.astype(storage)
    qvalue = jnp.asarray(values.astype(storage))
    return qn.qarray(qvalue, jnp.asarray(scale), qtype, dtype, zero_point=points)


def check_scales(scale: np.ndarray) -> None:
    """Check that scales are floats.

    Raises:
        ValueError: they are bytes or integers.
    """
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(f"its scales must be floats, got {scale.dtype.name}")


def pack_words(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last axis: integers of a few bits in 32-bit words, as compressed-tensors has.

    Args:
        values: int8 [*lead, n], signed numbers of ``bits`` bits.
        bits: 1 to 8.

    Returns:
        int32 [*lead, ceil(n * bits / 32)]: number i is at the bits from ``i * bits``, with half of
        the range added.
    """
    numbers = (values.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    every = np.unpackbits(numbers[..., None], axis=-1, count=bits, bitorder="little")
    stream = every.reshape(*values.shape[:-1], values.shape[-1] * bits)
    missing = -stream.shape[-1] % 32
    stream = np.pad(stream, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    return np.packbits(stream, axis=-1, bitorder="little").view("<i4").astype(np.int32)


def unpack_words(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """Unpack the last axis: see ``pack_words``.

    Raises:
        ValueError: there are too few words or too many for n numbers.
    """
    check_words(words)
    if words.shape[-1] != -(-n * bits // 32):
        raise ValueError(
            f"{n} numbers of {bits} bits must be in {-(-n * bits // 32)} words, got "
            f"{words.shape[-1]}"
        )
    octets = np.ascontiguousarray(words.astype("<i4")).view(np.uint8)
    stream = np.unpackbits(octets, axis=-1, bitorder="little")[..., : n * bits]
    numbers = np.packbits(stream.reshape(*words.shape[:-1], n, bits), axis=-1, bitorder="little")
    return (numbers[..., 0].astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


def check_words(words: np.ndarray) -> None:
    """Check that an array is of words.

    Raises:
        ValueError: it has another dtype.
    """
    if words.dtype != np.int32:
        raise ValueError(f"its words must be int32, got {words.dtype.name}")
