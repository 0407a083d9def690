"""compressed-tensors, the checkpoints of vLLM and llm-compressor, read and written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from provider_xla import AffineWeight
from provider_xla.file_formats import (
    INDEX,
    SINGLE,
    Names,
    StoreError,
    atomic_write,
    require_extra,
    safetensors_files,
)

from . import int32
from .names import Targets, load_tree, tensors_of
from .scheme import FLOAT, KEYS, PACKED, Scheme, config_of, find, read_schemes, scheme_of, shaped

_CONFIG = "config.json"
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "BOOL": "bool",
    **{f"{sign}{bits}": f"{name}{bits}" for sign, name in (("I", "int"), ("U", "uint"))
       for bits in (8, 16, 32, 64)},
}  # fmt: skip
_NAMES = {name: short for short, name in _DTYPES.items()}
_WEIGHT = "weight"
_PARTS = ("packed", "scale", "zero_point", "shape", "g_idx")
_OWN = {_WEIGHT, *_PARTS}
"""Parts of a quantized weight: tensors of its module, named ``weight`` and ``weight_<part>``."""


def load_compressed_tensors(
    folder: str | os.PathLike[str], *, like: Any = None, names: Names = None, dtype: Any = None
) -> Any:
    """Load a checkpoint that vLLM or llm-compressor wrote, quantized as it is.

    Formats int-quantized (8 bits), pack-quantized (2 to 8 bits in groups or by row) and
    float-quantized (8-bit floats) are read. A weight is [out, in] and has the name of its module,
    ``model.layers.0.mlp.up_proj.weight``, whatever tensors it is made of.

    Args:
        folder: a folder with config.json, and model.safetensors or its shards with an index.
        like: a tree of arrays or types, such as ``plan.params``; None for a dictionary by name.
        names: with ``like``, which tensors make each of its leaves, as for ``quantize_file``; a
            transform gets QArrays: ``Source("up_proj.weight", transform=lambda w: w.T)``.
        dtype: without ``like``, the float dtype that weights stand for; None for that of scales.

    Returns:
        The tree. ``rules_of`` makes the rules that it was quantized by, and ``plan.prepack`` packs
        it for kernels.

    Raises:
        StoreError: a file is missing or damaged; the config has a scheme that can't be read; or
            tensors do not fit it.
        MissingExtraError: safetensors is not installed: ``provider-xla[safetensors]``.
    """
    folder = Path(folder)
    groups = read_schemes(str(folder / _CONFIG), _quantization(_config(folder)))
    tensors = _Tensors(folder)
    owned: dict[str, dict[str, str]] = {}
    for name in tensors:
        module, part = _split(name)
        owned.setdefault(module, {})[part] = name
    known = []
    for module, parts in owned.items():
        is_quantized = "scale" in parts
        known += [f"{module}.{_WEIGHT}"] * is_quantized
        known += [n for part, n in parts.items() if not (is_quantized and part in _OWN)]

    def tensor(name: str) -> Any:
        module, part = _split(name)
        if part == _WEIGHT and "scale" in owned[module]:
            return _weight(str(folder), name, module, owned[module], groups, tensors, dtype)
        return tensors.read(name)

    return load_tree(str(folder), known, tensor, like, names)


def save_compressed_tensors(
    folder: str | os.PathLike[str],
    params: Any,
    *,
    names: Targets = None,
    config: Mapping[str, Any] | None = None,
    act_qtype: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write parameters as a checkpoint for vLLM and llm-compressor.

    Args:
        folder: the folder to make, with config.json and model.safetensors. It is whole or doesn't
            exist.
        params: any tree of arrays and of what ``plan.quantize`` returned.
        names: which tensors the parameters become, by the name of the leaf: a name, a ``Target`` or
            several. Weights are [out, in] and their names end in ".weight":
            ``Target("up_proj.weight", lambda w: w.T)``.
        config: the other keys of config.json, such as "architectures".
        act_qtype: what activations are quantized to when it runs, row by row: "int8" or
            "float8_e4m3fn"; None for floats. With "int8", weights in int8 are int-quantized;
            without, they are pack-quantized, as vLLM has both.
        overwrite: whether to replace what is there.

    Raises:
        StoreError: ``folder`` exists; or the leaf that the message names has no scheme.
    """
    if act_qtype not in (None, "int8", "float8_e4m3fn"):
        raise StoreError(f"act_qtype must be None, 'int8' or 'float8_e4m3fn', got {act_qtype!r}.")
    written: dict[str, np.ndarray] = {}
    schemes: dict[str, Scheme] = {}
    ignored = []
    for leaf, name, make in tensors_of(params, names):
        value = make()
        if isinstance(value, AffineWeight):
            raise StoreError(
                f"{leaf} as {name} must have whole zero points in compressed-tensors, got a float "
                "minimum for each group. Quantize the float parameters again."
            )
        module, _, last = name.rpartition(".")
        if isinstance(value, qn.QArray):
            if last != _WEIGHT or not module:
                raise StoreError(
                    f"{leaf} must be a tensor whose name ends in .weight, got {name}. Give it such "
                    "a name by names=."
                )
            schemes[module] = scheme_of(f"{leaf} as {name}", value, act_qtype)
            parts = _parts(value, schemes[module])
            written |= {f"{module}.{part}": array for part, array in parts.items()}
        else:
            if np.asarray(value).dtype.name not in _NAMES:
                raise StoreError(
                    f"{leaf} as {name} must be of {', '.join(_NAMES)}, got {value.dtype.name}."
                )
            if last == _WEIGHT and np.ndim(value) > 1:
                ignored.append(module)
            written[name] = np.asarray(value)
    found = {**(config or {}), KEYS[0]: config_of(schemes, ignored, act_qtype)}
    with atomic_write(Path(folder), overwrite) as new:
        try:
            new.mkdir()
            (new / _CONFIG).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            _write(new / SINGLE, written)
        except (OSError, TypeError, ValueError) as error:
            raise StoreError(f"{folder} can't be written: {error}") from error


class _Tensors(Mapping[str, Path]):
    """The tensors of a checkpoint, by name, each with its file."""

    def __init__(self, folder: Path):
        library = require_extra("safetensors", "safetensors")
        self._files: dict[str, Path] = {}
        self._headers: dict[Path, tuple[Mapping[str, Any], int]] = {}
        if not folder.is_dir() or not any((folder / name).is_file() for name in (INDEX, SINGLE)):
            raise StoreError(f"{folder} must be a folder with {INDEX} or {SINGLE}, got neither.")
        for path in safetensors_files(folder):
            try:
                # Checks the header; its arrays of NumPy lack dtypes that JAX has.
                with library.safe_open(path, framework="np", backend="pread") as file:
                    self._files |= dict.fromkeys(file.keys(), path)
                with path.open("rb") as file:
                    length = int.from_bytes(file.read(8), "little")
                    self._headers[path] = json.loads(file.read(length)), 8 + length
            except (library.SafetensorError, OSError) as error:
                raise StoreError(f"{path} must be a whole safetensors file: {error}.") from error

    def __getitem__(self, name: str) -> Path:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, name: str) -> np.ndarray:
        """Read a tensor."""
        path = self._files[name]
        header, start = self._headers[path]
        kind, shape, (begin, end) = (header[name][k] for k in ("dtype", "shape", "data_offsets"))
        if kind not in _DTYPES:
            raise StoreError(f"{name} of {path} must be of {', '.join(_DTYPES)}, got {kind}.")
        with path.open("rb") as file:
            file.seek(start + begin)
            data = file.read(end - begin)
        if len(data) != end - begin:
            raise StoreError(f"{path} must be a whole safetensors file: {name} was cut short.")
        return np.frombuffer(data, jnp.dtype(_DTYPES[kind])).reshape(shape)


def _write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file: NumPy's library lacks some of JAX's dtypes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what transformers asks for
    # The largest elements first, so that all are aligned.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    end = 0
    for name in order:
        array = tensors[name]
        header[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / _CONFIG
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} must be the config of a checkpoint: {error}.") from error
    if not isinstance(found, dict):
        raise StoreError(f"{path} must be a JSON object, got a {type(found).__name__}.")
    return found


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((config[key] for key in KEYS if key in config), {})


def _split(name: str) -> tuple[str, str]:
    """Return a tensor's module and part; its own name if neither."""
    module, _, last = name.rpartition(".")
    if last == _WEIGHT:
        return module, _WEIGHT
    part = last.removeprefix(f"{_WEIGHT}_")
    return module, part if last != part and part in _PARTS else f".{last}"


def _weight(
    where: str,
    name: str,
    module: str,
    parts: Mapping[str, str],
    groups: Mapping[str, tuple[list[str], Scheme]],
    tensors: _Tensors,
    dtype: Any,
) -> qn.QArray:
    """Return the weight of a module."""
    scheme = find(module, groups)
    if scheme is None:
        raise StoreError(f"{name} of {where} has scales, and must be among the targets of a group.")
    try:
        read = {part: tensors.read(parts[part]) for part in parts if part in _OWN}
        kind = qn.get_qtype(scheme.qtype)
        zero_point = None
        if scheme.format == PACKED:
            shape = tuple(map(int, read["shape"]))
            values = int32.unpack(read["packed"], scheme.bits, shape[-1]).reshape(shape)
        else:
            values, shape = read[_WEIGHT], read[_WEIGHT].shape
        if scheme.format == FLOAT and values.dtype.name != scheme.qtype:
            raise ValueError(f"its values must be {scheme.qtype}, got {values.dtype.name}")
        if scheme.group is not None and shape[-1] % scheme.group:
            raise ValueError(f"groups of {scheme.group} must divide its {shape[-1]} columns")
        columns = np.arange(shape[-1]) // (scheme.group or shape[-1])
        if "g_idx" in read and not np.array_equal(read["g_idx"], columns):
            raise ValueError("its groups must be of columns side by side, got others (g_idx)")
        scale = shaped(read["scale"], scheme, shape)
        if not scheme.symmetric:
            zero_point = read["zero_point"]
            if scheme.format == PACKED and scheme.strategy != "tensor":
                turned = int32.unpack(zero_point.swapaxes(-1, -2), scheme.bits, shape[-2])
                zero_point = turned.swapaxes(-1, -2)
            zero_point = shaped(zero_point, scheme, shape).astype(kind.storage_dtype)
        return qn.qarray(
            jnp.asarray(values).astype(kind.storage_dtype),
            jnp.asarray(scale),
            kind.name,
            scale.dtype if dtype is None else dtype,
            zero_point=zero_point,
            tile_axes=_tiles(scheme, shape),
        )
    except (KeyError, ValueError, TypeError) as error:
        if isinstance(error, StoreError):
            raise
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise StoreError(
            f"{name} of {where} must be {scheme.format} as its config says: {what}."
        ) from error


def _tiles(scheme: Scheme, shape: tuple[int, ...]) -> dict[int, int]:
    """Return the tiles of a weight whose last tiles are shorter, by axis."""
    if scheme.block is None:
        return {}
    sizes = zip((len(shape) - 2, len(shape) - 1), scheme.block, strict=True)
    return {axis: size for axis, size in sizes if shape[axis] > size and shape[axis] % size}


def _parts(q: qn.QArray, scheme: Scheme) -> dict[str, np.ndarray]:
    """Return the tensors of a weight, by their names in its module."""
    scale = np.asarray(q.scale)
    parts = {"weight_scale": scale.reshape(-1) if scheme.strategy == "tensor" else scale}
    points = None if q.zero_point is None else np.asarray(q.zero_point.astype(jnp.int8))
    if scheme.format != PACKED:
        parts[_WEIGHT] = np.asarray(q.qvalue if scheme.kind == "float" else q.qvalue.astype("int8"))
    else:
        parts["weight_packed"] = int32.pack(np.asarray(q.qvalue.astype(jnp.int8)), scheme.bits)
        parts["weight_shape"] = np.asarray(q.shape, np.int64)
        if points is not None and scheme.strategy != "tensor":
            turned = int32.pack(points.swapaxes(-1, -2), scheme.bits)
            points = np.ascontiguousarray(turned.swapaxes(-1, -2))
    if points is not None:
        parts["weight_zero_point"] = points
    return parts
