"""Float parameters in safetensors files, read tensor by tensor."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from ..extras import require
from .errors import StoreError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WIDER = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}
"""By dtype, those that hold every number of it."""

_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "BOOL": "bool"}
_DTYPES |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
_DTYPES |= {f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)}


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


class FloatFiles:
    """The tensors of one safetensors file or of several. A context manager.

    Args:
        source: a file; the index of several, ``*.index.json``; a folder with one of these under
            its usual name; or a sequence of files.

    Raises:
        StoreError: no such file, one that is cut short, or a tensor in two of them.
    """

    def __init__(self, source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]):
        self._library = require("safetensors", "safetensors")
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        for path in files_of(source):
            file = self._open(path)
            for name in list(file.keys()):
                if name in self._files:
                    raise StoreError(f"{name} is in {self._paths[name]} and in {path}.")
                self._files[name] = file
                self._paths[name] = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of each tensor that JAX has the dtype of, by name."""
        found = {}
        for name, file in self._files.items():
            entry = file.get_slice(name)
            dtype = _DTYPES.get(entry.get_dtype())
            if dtype is not None:
                found[name] = jax.ShapeDtypeStruct(tuple(entry.get_shape()), dtype)
        return found

    def parameter(self, name: str, source: Source, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Return a parameter, in C order.

        Args:
            name: its name, for errors.
            source: the tensors that make it.
            shape: the shape that it must have.
            dtype: the dtype that it gets, which must hold every number of the tensors'.

        Raises:
            StoreError: a tensor is missing, or the result has another shape or dtype.
        """
        arrays = [self._tensor(name, tensor) for tensor in source.names]
        about = f"{name}, of {', '.join(source.names)}"
        if source.transform is not None:
            try:
                array = np.asarray(source.transform(*arrays))
            except Exception as error:
                raise StoreError(f"{about}: its transform raised {error!r}.") from error
        else:
            (array,) = arrays
        if array.shape != tuple(shape):
            hint = ""
            if source.transform is None and array.shape[::-1] == tuple(shape):
                hint = f" It is the transpose: Source({source.names[0]!r}, transform=np.transpose)."
            raise StoreError(
                f"{about}, is {array.dtype.name}{list(array.shape)}, and the plan has "
                f"{jnp.dtype(dtype).name}{list(shape)}.{hint}"
            )
        wanted = jnp.dtype(dtype)
        if array.dtype != wanted and wanted.name not in WIDER.get(array.dtype.name, ()):
            raise StoreError(
                f"{about}, is {array.dtype.name}, and the plan has {wanted.name}, which has not "
                "all of its numbers. Make the plan for the dtype of the file, or convert by a "
                "Source with a transform."
            )
        return np.ascontiguousarray(array.astype(wanted, copy=False)).reshape(shape)

    def _tensor(self, name: str, tensor: str) -> np.ndarray:
        if tensor not in self._files:
            near = difflib.get_close_matches(tensor, self._files, n=3, cutoff=0.0)
            raise StoreError(
                f"{name} is to be made of {tensor}, and there is no such tensor among "
                f"{len(self._files)}: the nearest are {', '.join(near) or 'none'}. Say by names= "
                "which tensors make it."
            )
        file, path = self._files[tensor], self._paths[tensor]
        found = file.get_slice(tensor).get_dtype()
        if found not in _DTYPES:
            raise StoreError(
                f"{tensor} in {path} is {found}, which is not a float to quantize. Take the "
                "parameters before they were quantized, or load what provider_xla.save wrote."
            )
        return file.get_tensor(tensor)

    def _open(self, path: Path) -> Any:
        if not path.is_file():
            raise StoreError(f"{path} does not exist, or is not a file.")
        try:
            return self._library.safe_open(path, framework="np", backend="pread")
        except self._library.SafetensorError as error:
            raise StoreError(
                f"{path} is not a safetensors file, or was cut short or altered: {error}."
            ) from error


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
