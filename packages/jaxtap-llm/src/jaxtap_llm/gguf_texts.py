"""The files that a folder would have beside its tensors, of what a file of llama.cpp says."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

import provider_xla as xla

from . import gguf_fields, gguf_tokens
from .config import LlmError


@dataclasses.dataclass(frozen=True)
class Said:
    """What a file says.

    Attributes:
        file: with its tensors.
        keys: of its architecture.
        tokens: of its tokenizer.
        fields: of the config.json that says the same.
        texts: of the files that a folder would have, by name.
    """

    file: xla.GgufFile
    keys: gguf_fields.Keys
    tokens: gguf_tokens.Tokens
    fields: dict[str, Any]
    texts: dict[str, str]


def said(path: Any) -> Said:
    """Return what a file says; whether its tensors fit is checked by ``gguf_source``.

    Raises:
        LlmError, provider_xla.StoreError: the file is damaged, or of an architecture or with a
            tokenizer that can't be read.
    """
    about = os.stat(path)
    return _said(Path(path).absolute(), about.st_mtime_ns, about.st_size)


@functools.lru_cache(maxsize=2)  # each command asks for several of its texts
def _said(path: Path, changed: int, size: int) -> Said:
    file = xla.GgufFile(path)
    metadata = file.metadata()
    keys = gguf_fields.Keys(metadata, str(path), file.shapes, functools.partial(_floats, file))
    fields = gguf_fields.fields_of(keys)  # first: a file of something else may have no tokens
    tokens = gguf_tokens.Tokens(metadata, str(path))
    fields |= tokens.ends()
    texts = {"config.json": json.dumps(fields, indent=1), "tokenizer.json": tokens.written()}
    if tokens.template() is not None:
        template = {"chat_template": tokens.template()}
        texts["tokenizer_config.json"] = json.dumps(template, indent=1)
    known = {name: text for name, text in texts.items() if text is not None}
    return Said(file, keys, tokens, fields, known)


def _floats(file: xla.GgufFile, name: str) -> np.ndarray:
    """Return a tensor of floats that the config is made of.

    Raises:
        LlmError: it is missing, or is none.
    """
    found = file.read(name) if name in file.shapes else None
    if not isinstance(found, np.ndarray) or found.ndim != 1 or not found.size:
        raise LlmError(f"{file.path} must have {name}, a vector of floats.")
    found = found.astype(np.float32)
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise LlmError(f"{name} of {file.path} must be of numbers above 0.")
    return found
