"""What is in a folder: its config, and its tensors, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from provider_xla.file_formats import (
    INDEX,
    SINGLE,
    StoreError,
    require_extra,
    safetensors_files,
)

CONFIG = "config.json"
KEYS = ("quantization_config", "compression_config")
"""The keys that a config may say under what is quantized, the second in older files."""
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "BOOL": "bool",
    **{f"{sign}{bits}": f"{name}{bits}" for sign, name in (("I", "int"), ("U", "uint"))
       for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""Of safetensors, those that are read and written."""


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


class Tensors(Mapping[str, Path]):
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
        if kind not in DTYPES:
            raise StoreError(f"{name} of {path} must be of {', '.join(DTYPES)}, got {kind}.")
        with path.open("rb") as file:
            file.seek(start + begin)
            data = file.read(end - begin)
        if len(data) != end - begin:
            raise StoreError(f"{path} must be a whole safetensors file: {name} was cut short.")
        return np.frombuffer(data, jnp.dtype(DTYPES[kind])).reshape(shape)
