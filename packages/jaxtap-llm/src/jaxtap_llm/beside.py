"""What a model has beside its tensors: files of a folder, or what a file of llama.cpp says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .config import LlmError

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
AROUND = (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, "generation_config.json")
"""What is copied with a model, if it is there."""


def is_gguf(model: Any) -> bool:
    """Return whether a model is a file, as llama.cpp's are, and not a folder."""
    return Path(model).is_file()


def path_of(model: Any, name: str) -> Path:
    """Return where a text is, for errors."""
    return Path(model) if is_gguf(model) else Path(model) / name


def text_of(model: Any, name: str) -> str | None:
    """Return the text of a file beside the tensors; None for none.

    Args:
        model: a folder, or a file of llama.cpp.
        name: of the file.

    Raises:
        LlmError: it is not text, or the file of llama.cpp says what can't be honoured.
        provider_xla.StoreError: the file of llama.cpp is damaged.
    """
    if is_gguf(model):
        from .gguf_texts import said  # which imports JAX

        return said(model).texts.get(name)
    path = Path(model) / name
    try:
        return path.read_text("utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise LlmError(f"{path} must be text: {error}.") from error


def json_of(model: Any, name: str) -> dict[str, Any]:
    """Return the object in a JSON file beside the tensors; an empty one for none.

    Raises:
        LlmError: it is not an object in JSON.
    """
    text = text_of(model, name)
    try:
        found = {} if text is None else json.loads(text)
        if not isinstance(found, dict):
            raise TypeError(f"a {type(found).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        raise LlmError(
            f"{path_of(model, name)} must be an object in JSON, got: {error}."
        ) from error
    return found


def template_of(model: Any) -> str | None:
    """Return the chat template, or None: transformers 5 has it in a separate file.

    Raises:
        LlmError: a file is damaged.
    """
    alone = text_of(model, TEMPLATE)
    if alone is not None:
        return alone
    found = json_of(model, TOKENIZER_CONFIG).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def copy(model: Any, out: Path, names: Iterable[str] = AROUND) -> None:
    """Write what a model has beside its tensors into a folder."""
    for name in names:
        if is_gguf(model):
            text = text_of(model, name)
            if text is not None:
                (out / name).write_text(text, "utf-8")
        elif (Path(model) / name).is_file():
            shutil.copy(Path(model) / name, out / name)
