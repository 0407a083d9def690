"""GGUF, llama.cpp's files: read and write trees of QArrays."""

from __future__ import annotations

import functools
import glob
import os
import re
import struct
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from provider_xla import QuantizationWarning
from provider_xla.file_formats import StoreError, atomic_write, require_extra

from . import blocks
from .affine import AffineWeight
from .blocks import BlockType, Groups
from .float_files import Names
from .names import Targets, load_tree, tensors_of

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""The name of a part of a split file, as llama.cpp's gguf-split gives it."""
_SPLIT = "split."
"""Begins the keys of a part."""
_ARCHITECTURE = "general.architecture"
_ALIGNMENT = "general.alignment"
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
_PLAIN = {**_FLOATS, **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)}}
_LONGEST_NAME, _MOST_AXES = 63, 4
"""Limits of GGML: bytes of a tensor's name, and its axes."""


def load_gguf(
    path: str | os.PathLike[str], *, like: Any = None, names: Names = None, dtype: Any = "float32"
) -> Any:
    """Load the tensors of a GGUF file, quantized as they are.

    A tensor is [out, in], as PyTorch's, with its blocks along the last axis. Q8_0, Q4_0, Q5_0, Q3_K
    and Q6_K become ``QArray`` (the latter two and Q5_0 in packed storage), and so do MXFP4, NVFP4,
    TQ1_0 and TQ2_0 (int2), IQ4_NL and IQ4_XS (iq4_nl); those with a minimum (Q4_1, Q5_1, Q2_K,
    Q4_K, Q5_K) ``AffineWeight``, floats and integers arrays (of NumPy where JAX would cut 64 bits
    to 32). IQ1, IQ2 and IQ3 are dequantized, and a warning says so.

    Args:
        path: of the file; of a split one, that of any part: all are read.
        like: a tree of arrays or types, such as ``plan.params``, that says the structure, shapes
            and dtypes; None for a dictionary by the names of tensors.
        names: with ``like``, which tensors make each of its leaves, as for ``quantize_file``; a
            transform gets these forms: ``Source("blk.0.ffn_up.weight", transform=lambda w: w.T)``.
        dtype: without ``like``, the float dtype that quantized tensors stand for.

    Returns:
        The tree. ``rules_of`` makes the rules that it was quantized by, and ``plan.prepack`` packs
        it for kernels.

    Raises:
        StoreError: ``path`` is not a whole GGUF file, or a part of one whose other parts are
            missing or don't fit; or a tensor is missing, has another shape, or is of a type that
            can't be read (from a big-endian file: another than float32, float16, float64 and
            integers).
        MissingExtraError: gguf is not installed: ``provider-xla[gguf]``.
    """
    file = GgufFile(path)
    read: list[str] = []

    def tensor(name: str) -> Any:
        read.append(name)
        return file.read(name, dtype)

    tree = load_tree(str(path), file.shapes, tensor, like, names)
    file.warn_of_tables(read)
    return tree


def read_gguf_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a GGUF file says beside its tensors, for ``save_gguf``.

    The first part of a split file says it for all.

    Returns:
        By key: text, bool, a NumPy number of the file's type, an array of these, or a list of text.

    Raises:
        StoreError, MissingExtraError: as ``load_gguf``.
    """
    return GgufFile(path).metadata()


class GgufFile:
    """A GGUF file, whole or split, whose tensors are read one at a time.

    Args:
        path: of the file; of a split one, that of any part.

    Attributes:
        path: of the file.
        shapes: of the tensors by name, as PyTorch has them: ``[out, in]`` for a matrix.
        types: of the tensors by name, as GGML calls them.

    Raises:
        StoreError, MissingExtraError: as ``load_gguf``.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._parts = _parts(self.path)
        self._tensors = {
            tensor.name: (part.path, tensor, part.is_swapped)
            for part in self._parts
            for tensor in part.reader.tensors
        }
        found = self._tensors.items()
        self.shapes = {name: _shape(tensor) for name, (_, tensor, _) in found}
        self.types = {name: str(tensor.tensor_type.name) for name, (_, tensor, _) in found}

    @property
    def files(self) -> list[Path]:
        """All parts of it; itself if it isn't split."""
        return [part.path for part in self._parts]

    def metadata(self) -> dict[str, Any]:
        """Return what the file says beside its tensors: see ``read_gguf_metadata``.

        Raises:
            StoreError: a text is not UTF-8, or a list has lists.
        """
        found = {}
        for key, field in self._parts[0].reader.fields.items():
            if key.startswith(("GGUF.", _SPLIT)):
                continue
            try:
                kind, value = _kind(field), field.contents()
            except (ValueError, IndexError) as error:
                raise StoreError(
                    f"{key} of {self.path} can't be read: {error}. Take another copy."
                ) from error
            is_list = field.types[0].name == "ARRAY"
            if kind in ("string", "bool"):
                found[key] = value
            else:
                found[key] = np.asarray(value, kind) if is_list else np.dtype(kind).type(value)
        return found

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is not of floats or integers."""
        return self.types[name] not in _PLAIN.values()

    def read(self, name: str, dtype: Any = "float32") -> Any:
        """Return a tensor in the form that ``load_gguf`` gives it, not packed.

        Args:
            name: of the tensor.
            dtype: the float dtype that quantized numbers stand for.

        Raises:
            StoreError: the file's type is not read, or its bytes can't be of that type.
        """
        return _read(*self._tensors[name], dtype)

    def warn_of_tables(self, names: Iterable[str]) -> None:
        """Warn of tensors that ``read`` has dequantized, since no form has their type."""
        names = [name for name in names if self.types[name] in blocks.DEQUANTIZED]
        if names:
            warnings.warn(
                f"{len(names)} tensors of {self.path} are float now, {names[0]} first: no "
                f"QArray has vectors from a table ({', '.join(blocks.DEQUANTIZED)}). Quantize "
                "them by a rule.",
                QuantizationWarning,
                stacklevel=3,
            )


def save_gguf(
    path: str | os.PathLike[str],
    params: Any,
    *,
    names: Targets = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write parameters to a GGUF file, quantized as they are.

    int8, int4 and int5 in tiles of 32 along the last axis, or of a multiple, with scales that
    float16 has, are written as Q8_0, Q4_0 and Q5_0; what ``load_gguf`` read as Q4_1 and Q5_1 is
    written so. Values and scales are the same bit for bit.

    Args:
        path: of the file, which is there whole or not at all.
        params: any tree of arrays and of what ``plan.quantize`` or ``load_gguf`` returned.
        names: which tensors the parameters become, by the name of the leaf: a name, a ``Target``
            or several. GGML's matrices are [out, in]: ``Target("blk.0.ffn_up.weight", lambda w:
            w.T)``. None for the names of the leaves.
        metadata: keys of the file, such as "general.architecture", as ``read_gguf_metadata``
            returns them; Python's ints are uint32 and floats float32. Keys of a part of a split
            file ("split.count") are refused: one whole file is written.
        overwrite: whether to replace what is there.

    Raises:
        StoreError: ``path`` exists; or GGUF has no type for the leaf that the message names.
        MissingExtraError: gguf is not installed: ``provider-xla[gguf]``.
    """
    library = require_extra("gguf", "gguf")
    metadata = dict(metadata or {})
    for key in metadata:
        if key.startswith(_SPLIT):
            raise StoreError(
                f"metadata must have no keys of a part of a split file, got {key}: one whole file "
                "is written. Leave it out."
            )
    tensors = tensors_of(params, names)
    kinds = library.GGMLQuantizationType
    with atomic_write(Path(path), overwrite) as new:
        writer = library.GGUFWriter(new, metadata.pop(_ARCHITECTURE, "jax"))
        try:
            alignment = metadata.pop(_ALIGNMENT, None)
            if alignment is not None:
                writer.add_custom_alignment(int(alignment))
            for key, value in metadata.items():
                _add(library, writer, key, value)
            for leaf, name, make in tensors:
                _check_name(leaf, name)
                kind, data = _written(f"{leaf} as {name}", make())
                writer.add_tensor(name, data, raw_dtype=kinds[kind])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        except (ValueError, TypeError, struct.error, OSError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{path} can't be written: {error}") from error
        finally:
            writer.close()


def _kind(field: Any) -> str:
    """Return the type of a key's value, or of what is in its list, which may be empty."""
    first = field.types[0]
    if first.name == "ARRAY":
        # Behind the length and the text of the key, and the type of its value.
        first = type(first)(int(field.parts[3][0]))
        if first.name == "ARRAY":
            raise ValueError("a list of lists, which GGML does not read")
    return str(first.name.lower())


class _Part(NamedTuple):
    """A file, whole or a part of a split one."""

    path: Path
    reader: Any

    def says(self, key: str) -> Any:
        """Return what the file says of its part, or None."""
        field = self.reader.fields.get(_SPLIT + key)
        return None if field is None else field.contents()

    @property
    def is_swapped(self) -> bool:
        """Return whether numbers are in another byte order than this machine's."""
        return self.reader.endianess.name.lower() != sys.byteorder


def _parts(path: Path) -> list[_Part]:
    """Return all parts of a file, in order; one if it isn't split.

    Raises:
        StoreError: a part is missing, or is not the one that its name says.
    """
    given = _Part(path, _reader(path))
    named, count = _PART_NAME.fullmatch(path.name), given.says("count")
    of = 1 if named is None else int(named[3])
    if count in (None, 0, 1) and of <= 1:
        return [given]
    if named is None or of != count:
        raise StoreError(
            f"{path} must be named as the part of a split file that it says it is, such as "
            f"model-00001-of-00003.gguf, got one that says split.no={given.says('no')} and "
            f"split.count={count}. Give the parts their names back, or join them by llama.cpp's "
            "llama-gguf-split --merge."
        )
    found = []
    for i in range(count):
        of_part = path.with_name(f"{named[1]}-{i + 1:05d}-of-{count:05d}.gguf")
        if not of_part.is_file():
            raise StoreError(
                f"{path} is one of {count} parts, which must all be in its folder, got no "
                f"{of_part.name}. Fetch it, too."
            )
        part = given if of_part == path else _Part(of_part, _reader(of_part))
        if (part.says("no"), part.says("count")) != (i, count):
            raise StoreError(
                f"{of_part} must say that it is part {i + 1} of {count}, got split.no="
                f"{part.says('no')} and split.count={part.says('count')}. Take another copy, under "
                "the name that it had."
            )
        found.append(part)
    names = [tensor.name for part in found for tensor in part.reader.tensors]
    total = given.says("tensors.count")
    if len(set(names)) < len(names) or total not in (None, len(names)):
        raise StoreError(
            f"the {count} parts of {path} must have {total} tensors of different names, got "
            f"{len(names)} ({len(set(names))} names). Take copies of one split file."
        )
    return found


def _reader(path: Path) -> Any:
    library = require_extra("gguf", "gguf")
    if not path.is_file():
        parts = sorted(path.parent.glob(f"{glob.escape(path.stem)}-00001-of-*.gguf"))
        hint = f" Give {parts[0].name}, the first part of a split file." if parts else ""
        raise StoreError(f"{path} must be a GGUF file, got none there.{hint}")
    try:
        # Offsets are numbers of 64 bits, which a spoiled one wraps around.
        with np.errstate(over="ignore"):
            reader = _checked(library.GGUFReader)(path)
        _check_places(reader)
        return reader
    except (ValueError, LookupError, TypeError, OverflowError, OSError, RecursionError) as error:
        raise StoreError(
            f"{path} must be a whole GGUF file, got one that can't be read ({error}). Take another "
            "copy."
        ) from error


@functools.cache
def _checked(base: Any) -> Any:
    """Return a class of the reader that raises where a file ends too early.

    The reader itself gets nothing there, and goes on: a spoiled length of a list would fill the
    memory with parts of no bytes.
    """

    class Checked(base):
        def _get(self, offset: Any, dtype: Any, count: Any = 1, *args: Any, **kwargs: Any) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data)}, in the middle of a value")
            return super()._get(offset, dtype, count, *args, **kwargs)

    return Checked


def _check_places(reader: Any) -> None:
    """Check that tensors are behind the header, and share no bytes.

    Raises:
        ValueError: one begins in the header, or in another tensor.
    """
    end, before = int(reader.data_offset), "the header"
    for tensor in sorted(reader.tensors, key=lambda one: int(one.data_offset)):
        start = int(tensor.data_offset)
        if start < end:
            raise ValueError(f"tensor {tensor.name} begins at byte {start}, inside {before}")
        end, before = start + int(tensor.n_bytes), tensor.name


def _shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, slowest axis first."""
    return tuple(int(n) for n in reversed(tensor.shape))


def _read(path: Path, tensor: Any, is_swapped: bool, dtype: Any) -> Any:
    """Return a tensor: a QArray, an AffineWeight or a NumPy array."""
    name, kind = tensor.name, tensor.tensor_type.name
    shape = _shape(tensor)
    data = np.asarray(tensor.data)
    # The reader knows the byte order of NumPy's types. Of others it returns bytes, which gguf and
    # llama.cpp write in different orders to a big-endian file.
    if is_swapped and data.dtype == np.uint8:
        raise StoreError(
            f"{name} of {path} must be float32, float16, float64 or integers to be read from a "
            f"big-endian file, got {kind}. Convert the file by the gguf package's "
            "gguf-convert-endian."
        )
    if kind in _PLAIN.values():
        data = data.astype(data.dtype.newbyteorder("="), copy=False)
        return data.view(jnp.bfloat16).reshape(shape) if kind == "BF16" else data.reshape(shape)
    if kind in blocks.DEQUANTIZED:
        library = require_extra("gguf", "gguf")
        return library.quants.dequantize(data, tensor.tensor_type).reshape(shape).astype(dtype)
    if kind not in blocks.TYPES:
        known = ", ".join([*blocks.TYPES, *blocks.DEQUANTIZED, *_PLAIN.values()])
        raise StoreError(
            f"{name} of {path} must be of a type that is read ({known}), got {kind}. Convert the "
            "file by llama.cpp's llama-quantize --allow-requantize."
        )
    form = blocks.TYPES[kind]
    try:
        groups = blocks.read(form, data, shape)
    except ValueError as error:
        raise StoreError(f"{name} of {path} must be whole {kind}: {error}.") from error
    about = qn.get_qtype(form.qtype)
    # What scales were multiplied with, if anything, is another tensor's.
    whole = jnp.ones((1,) * len(shape), jnp.float32) if about.two_level else None
    values = jnp.asarray(groups.values).astype(about.storage_dtype)
    q = qn.qarray(values, jnp.asarray(groups.scale), about.name, dtype, global_scale=whole)
    if groups.minimum is None:
        return q
    assert form.shift is not None
    return AffineWeight(q, jnp.asarray(groups.minimum), form.shift)


def _written(what: str, value: Any) -> tuple[str, np.ndarray]:
    """Return the type and the bytes of a tensor."""
    if np.ndim(value) == 0 or np.ndim(value) > _MOST_AXES:
        raise StoreError(
            f"{what} must have 1 to {_MOST_AXES} axes in GGUF, got {np.ndim(value)}. Reshape it by "
            "a Target with a transform."
        )
    if not isinstance(value, qn.QArray | AffineWeight):
        array = np.ascontiguousarray(value)
        if array.dtype.name not in _PLAIN:
            raise StoreError(
                f"{what} must be of {', '.join(_PLAIN)} in GGUF, got {array.dtype.name}. Convert "
                "it by a Target with a transform."
            )
        is_bfloat16 = array.dtype.name == "bfloat16"
        return _PLAIN[array.dtype.name], array.view(np.uint8) if is_bfloat16 else array
    shift = value.shift if isinstance(value, AffineWeight) else None
    q = value.inner if isinstance(value, AffineWeight) else value
    form = _type_of(what, q, shift)
    scale = _spread(what, q.scale, q.shape, form)
    minimum = None
    if isinstance(value, AffineWeight):
        minimum = _spread(what, value.minimum, q.shape, form)
    values = np.asarray(q.qvalue.astype(jnp.int8))
    return form.name, blocks.write(form, Groups(values, scale, minimum))


def _type_of(what: str, q: qn.QArray, shift: int | None) -> BlockType:
    if q.zero_point is not None:
        raise StoreError(
            f"{what} must have no zero points in GGUF, got some: its types have a float minimum, "
            "which need not be a multiple of the scale. Quantize it symmetrically."
        )
    for form in blocks.TYPES.values():
        if form.write is not None and (form.qtype, form.shift) == (q.qtype, shift):
            return form
    writable = [form for form in blocks.TYPES.values() if form.write is not None]
    known = ", ".join(f"{form.qtype} ({form.name})" for form in writable if form.shift is None)
    raise StoreError(
        f"{what} must be of {known} to be written to GGUF, got {q.qtype}"
        f"{'' if shift is None else ' with a minimum'}. Quantize it to one of these."
    )


def _spread(what: str, scale: Any, shape: tuple[int, ...], form: BlockType) -> np.ndarray:
    """Return scales in float16, one for each block of the last axis."""
    *lead, last = shape
    count = last // form.size
    if last % form.size or not scale.shape[-1] or count % scale.shape[-1]:
        raise StoreError(
            f"{what} must have tiles of {form.size} numbers along its last axis, or of a multiple, "
            f"to be {form.name} in GGUF, got {list(shape)} with scales of shape "
            f"{list(scale.shape)}. Quantize it with tile_size={form.size}, and transpose it by a "
            "Target if it is [in, out]."
        )
    if any(m not in (1, n) for m, n in zip(scale.shape[:-1], lead, strict=True)):
        raise StoreError(
            f"{what} must have scales for each index of its first axes, or one, got scales of "
            f"shape {list(scale.shape)} for {list(shape)}."
        )
    wide = np.asarray(scale).astype(np.float32)
    half = wide.astype(np.float16)
    if not np.array_equal(half.astype(np.float32), wide, equal_nan=True):
        raise StoreError(
            f"{what} must have scales that float16 has to be {form.name} in GGUF, got "
            f"{np.asarray(scale).dtype.name} ones that it would round. Quantize it by a rule with "
            "scale_dtype='float16'."
        )
    half = np.repeat(half, count // half.shape[-1], axis=-1)
    return np.broadcast_to(half, (*lead, count))


def _check_name(leaf: str, name: str) -> None:
    if not name or len(name.encode()) > _LONGEST_NAME:
        raise StoreError(
            f"{leaf} must be a tensor of a name of 1 to {_LONGEST_NAME} bytes in GGUF, got "
            f"{name!r}. Give it another by names=."
        )


def _add(library: Any, writer: Any, key: str, value: Any) -> None:
    """Add a key to a file, with its value's type."""
    types = library.GGUFValueType

    def kind(one: Any) -> Any:
        if isinstance(one, bool | np.bool_):
            return types.BOOL
        if isinstance(one, str):
            return types.STRING
        if isinstance(one, int):
            return types.UINT32 if 0 <= one < 2**32 else types.INT64
        if isinstance(one, float) and not isinstance(one, np.floating):
            return types.FLOAT32
        name = getattr(getattr(one, "dtype", None), "name", "").upper()
        if name not in types.__members__:
            raise StoreError(
                f"{key} must be text, a number, a bool or a list of one of these, got {one!r}."
            )
        return types[name]

    if isinstance(value, np.ndarray | list | tuple) and np.ndim(value):
        kinds = {kind(one) for one in value}
        if len(kinds) != 1:
            raise StoreError(f"{key} must be a list of one type that isn't empty, got {value!r}.")
        plain = value.tolist() if isinstance(value, np.ndarray) else list(value)
        writer.add_key_value(key, plain, types.ARRAY, sub_type=kinds.pop())
    else:
        found = kind(value)
        writer.add_key_value(key, value.item() if hasattr(value, "item") else value, found)
