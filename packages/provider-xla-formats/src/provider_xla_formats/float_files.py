"""Tensors in safetensors files of any writer, one by one, and which make a parameter."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from provider_xla.file_formats import DTYPES, StoreError, is_stored, require_extra

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WIDER = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}
"""By dtype, those that hold every number of it."""

_DTYPES = {short: name for name, short in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Source:
    """Which tensors of a file make a parameter.

    Attributes:
        names: names of the tensors.
        transform: a function of as many NumPy arrays, which returns the parameter. None takes a
            single tensor as it is.

    Raises:
        ValueError: no tensor, or several without a transform.
    """

    names: tuple[str, ...]
    transform: Callable[..., Any] | None = None

    def __init__(self, *names: str, transform: Callable[..., Any] | None = None):
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"Source takes names of tensors. Got {names!r}.")
        if len(names) > 1 and transform is None:
            raise ValueError(
                f"Source({', '.join(map(repr, names))}) needs a transform that makes one array of "
                "several, such as lambda *arrays: np.concatenate(arrays)."
            )
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "transform", transform)


Names = Mapping[str, str | Source] | Callable[[str], str | Source | None] | None
"""Which tensors make each parameter: see ``quantize_file``."""


def source_of(names: Names, name: str) -> Source:
    """Return the source of a parameter.

    Raises:
        StoreError: ``names`` gives something else than a name, a Source or None.
    """
    found = names(name) if callable(names) else (names or {}).get(name)
    found = name if found is None else found
    found = Source(found) if isinstance(found, str) else found
    if not isinstance(found, Source):
        raise StoreError(f"names has {found!r} for {name}. It must be a name, a Source, or None.")
    return found


def leaf_of(
    where: Any, known: Collection[str], read: Callable[[str], Any], leaf: Any, source: Source
) -> Any:
    """Return a leaf of a tree, of the tensors that make it.

    Args:
        where: the file, for errors.
        known: the names of its tensors.
        read: returns one: a NumPy array, or what is stored for a weight.
        leaf: the leaf's name, and as its value the shape and dtype that it must have. The dtype
            must hold every number of the tensors'.
        source: the tensors.

    Raises:
        StoreError: a tensor is missing, or the result has another shape or dtype.
    """
    for one in source.names:
        if one not in known:
            near = difflib.get_close_matches(one, known, n=3, cutoff=0.0)
            raise StoreError(
                f"{leaf.name} must be made of tensors of {where}, got {one}: the nearest of "
                f"{len(known)} are {', '.join(near) or 'none'}. Say by names= which make it."
            )
    arrays = [read(one) for one in source.names]
    about = f"{leaf.name}, of {', '.join(source.names)},"
    try:
        value = source.transform(*arrays) if source.transform else arrays[0]
        value = value if is_stored(value) else np.asarray(value)
    except Exception as error:
        raise StoreError(f"{about} has a transform that raised {error!r}.") from error
    shape, dtype = tuple(leaf.value.shape), jnp.dtype(leaf.value.dtype)
    if value.shape != shape:
        hint = ""
        if source.transform is None and value.shape[::-1] == shape:
            hint = f" It is the transpose: Source({source.names[0]!r}, transform=lambda w: w.T)."
        raise StoreError(f"{about} must be {list(shape)}, got {list(value.shape)}.{hint}")
    if is_stored(value):
        return value.astype(dtype)
    if value.dtype != dtype and dtype.name not in WIDER.get(value.dtype.name, ()):
        raise StoreError(
            f"{about} must be {dtype.name} or narrower, got {value.dtype.name}. Ask for the dtype "
            "of the file, or convert it by a Source with a transform."
        )
    return value.astype(dtype, copy=False)


class TensorFiles(Mapping[str, Path]):
    """The tensors of one safetensors file or of several, by name, each with its file.

    Args:
        source: a file; the index of several, ``*.index.json``; a folder with one of these under
            its usual name; or a sequence of files.

    Raises:
        StoreError: no such file, one that is cut short, or a tensor in two of them.
    """

    def __init__(self, source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]):
        library = require_extra("safetensors", "safetensors")
        self._files: dict[str, Path] = {}
        self._headers: dict[Path, tuple[Mapping[str, Any], int]] = {}
        for path in files_of(source):
            if not path.is_file():
                raise StoreError(f"{path} does not exist, or is not a file.")
            try:
                # Checks the header; its arrays of NumPy lack dtypes that JAX has.
                with library.safe_open(path, framework="np", backend="pread") as file:
                    names = list(file.keys())
                with path.open("rb") as file:
                    length = int.from_bytes(file.read(8), "little")
                    self._headers[path] = json.loads(file.read(length)), 8 + length
            except (library.SafetensorError, OSError) as error:
                raise StoreError(
                    f"{path} is not a safetensors file, or was cut short or altered: {error}."
                ) from error
            for name in names:
                if name in self._files:
                    raise StoreError(f"{name} is in {self._files[name]} and in {path}.")
                self._files[name] = path

    def __getitem__(self, name: str) -> Path:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape, and the dtype in JAX, of each tensor that is not quantized."""
        found = {}
        for name in self:
            kind, shape, _ = self._entry(name)
            if kind in _DTYPES and not kind.startswith("F8"):
                # Where x64 is off, JAX has no 64 bits, and its types of them warn.
                dtype = jax.dtypes.canonicalize_dtype(_DTYPES[kind])
                found[name] = jax.ShapeDtypeStruct(shape, dtype)
        return found

    def read_float(self, name: str) -> np.ndarray:
        """Read a tensor that is to be quantized."""
        kind = self._entry(name)[0]
        if kind not in _DTYPES or kind.startswith("F8"):
            raise StoreError(
                f"{name} in {self[name]} is {kind}, which is not a float to quantize. Take the "
                "parameters before they were quantized, or load what provider_xla.save wrote."
            )
        return self.read(name)

    def read(self, name: str) -> np.ndarray:
        """Read a tensor."""
        path = self[name]
        kind, shape, (begin, end) = self._entry(name)
        if kind not in _DTYPES:
            raise StoreError(f"{name} of {path} must be of {', '.join(_DTYPES)}, got {kind}.")
        data = bytearray(end - begin)
        with path.open("rb") as file:
            file.seek(self._headers[path][1] + begin)
            if file.readinto(data) != len(data):
                raise StoreError(f"{path} was cut short: {name} is not whole.")
        return np.frombuffer(data, jnp.dtype(_DTYPES[kind])).reshape(shape)

    def _entry(self, name: str) -> tuple[str, Sequence[int], tuple[int, int]]:
        entry = self._headers[self[name]][0][name]
        return entry["dtype"], entry["shape"], entry["data_offsets"]


def files_of(source: Any) -> list[Path]:
    """Return the files that a source stands for."""
    if not isinstance(source, str | os.PathLike):
        return [Path(one) for one in source]
    path = Path(source)
    if path.is_dir():
        found = [path / name for name in (INDEX, SINGLE) if (path / name).is_file()]
        if not found:
            raise StoreError(f"{path} has neither {INDEX} nor {SINGLE}.")
        path = found[0]
    if path.suffix != ".json":
        return [path]
    try:
        names = set(json.loads(path.read_text())["weight_map"].values())
        files = sorted(path.parent / name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path} is not an index of safetensors files: it needs a 'weight_map' from tensors to "
            f"files ({error!r})."
        ) from error
    for name in names:
        if Path(name).name != name:
            raise StoreError(f"{path} names a file outside of its folder: {name}.")
    return files
