"""What is in a folder: its config, and its tensors, one at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from provider_xla.file_formats import INDEX, SINGLE, StoreError, TensorFiles

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
