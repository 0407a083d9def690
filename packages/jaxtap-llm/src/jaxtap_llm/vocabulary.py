"""A tokenizer as the files of llama.cpp have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from . import beside
from .config import Config, LlmError
from .fields import text_fields
from .token_kinds import (
    BYTE,
    BYTES,
    CONTROL,
    NORMAL,
    SPACE,
    SPLITS,
    UNKNOWN,
    UNUSED,
    USER,
)
from .tokenizer import read_tokenizer


def metadata(folder: Any, config: Config) -> dict[str, Any]:
    """Return the keys of a file that say what the tokens are.

    Args:
        folder: of the model, with its tokenizer; or a file of llama.cpp.
        config: of the model.

    Raises:
        LlmError: llama.cpp does not have such a tokenizer, or there is none.
    """
    from tokenizers import Tokenizer

    read_tokenizer(folder, config)
    path, text = beside.path_of(folder, beside.TOKENIZER), beside.text_of(folder, beside.TOKENIZER)
    if text is None:
        return of_bytes() | _ends(folder, [])
    fields = json.loads(text)
    model = fields["model"]
    if model.get("type", "BPE") != "BPE":
        raise LlmError(f"{path} must be a BPE tokenizer for GGUF, got {model.get('type')}.")
    tokens, kinds = _tokens(fields, config.vocabulary)
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    about = {"tokens": tokens, "token_type": np.array(kinds, np.int32)}
    if model.get("byte_fallback"):
        about |= _of_pieces(fields, tokens, merges)
    else:
        about |= {"model": "gpt2", "pre": _split(fields, path), "merges": merges}
    return {f"tokenizer.ggml.{key}": value for key, value in about.items()} | _ends(
        folder, Tokenizer.from_str(text).encode("").ids
    )


def of_bytes() -> dict[str, Any]:
    """Return the keys for tokens that are the bytes of text."""
    tokens, kinds = [f"<0x{i:02X}>" for i in range(BYTES)], [BYTE] * BYTES
    tokens[ord(" ")], kinds[ord(" ")] = SPACE, NORMAL  # what llama.cpp makes of a space
    found = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.zeros(BYTES, np.float32),
        "token_type": np.array(kinds, np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
        "add_eos_token": False,
        "add_space_prefix": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def _tokens(fields: dict[str, Any], count: int) -> tuple[list[str], list[int]]:
    """Return the text of each token of a model, and its type."""
    tokens = [f"[PAD{i}]" for i in range(count)]
    kinds = [UNUSED] * count
    unknown = fields["model"].get("unk_token")
    for text, i in fields["model"]["vocab"].items():
        is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        is_byte = is_byte and bool(fields["model"].get("byte_fallback"))
        tokens[i] = text
        kinds[i] = UNKNOWN if text == unknown else BYTE if is_byte else NORMAL
    for one in fields.get("added_tokens") or []:
        tokens[one["id"]] = one["content"]
        if kinds[one["id"]] != UNKNOWN:
            kinds[one["id"]] = CONTROL if one.get("special") else USER
    return tokens, kinds


def _of_pieces(fields: dict[str, Any], tokens: list[str], merges: list[str]) -> dict[str, Any]:
    """Return the keys of a tokenizer made of SentencePiece's: the first merges score best."""
    scores = np.full(len(tokens), -1e6, np.float32)
    places = {text: i for i, text in enumerate(tokens)}
    for rank, merge in reversed(list(enumerate(merges))):
        scores[places[merge.replace(" ", "")]] = -rank
    return {"model": "llama", "scores": scores, "add_space_prefix": _has_prefix(fields)}


def _has_prefix(fields: dict[str, Any]) -> bool:
    """Return whether a space is put before a text."""
    steps = [one for name in ("normalizer", "pre_tokenizer") for one in _flat(fields.get(name))]
    return any(
        (step["type"] == "Prepend" and step.get("prepend") == SPACE)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


def _flat(step: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer, of which one may be a sequence."""
    if not step:
        return []
    if step["type"] != "Sequence":
        return [step]
    inner = step.get("normalizers") or step.get("pretokenizers") or []
    return [one for each in inner for one in _flat(each)]


def _split(fields: dict[str, Any], path: Path) -> str:
    """Return what llama.cpp calls the way that a text is cut before its bytes are merged."""
    steps = _flat(fields.get("pre_tokenizer"))
    kinds = [step["type"] for step in steps]
    if kinds == ["Split", "ByteLevel"]:
        found = SPLITS.get(steps[0].get("pattern", {}).get("Regex"))
        if found is not None:
            return found
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    raise LlmError(
        f"The pre_tokenizer of {path} must be that of Llama 3, Qwen 2 or 3.5, GPT-2, GPT-4o, "
        f"Tekken or SmolLM for GGUF, got {', '.join(kinds) or 'none'} of another pattern. "
        "Export without --gguf, and convert that by llama.cpp's convert_hf_to_gguf.py."
    )


_USES = {"bos_token_id": "bos", "pad_token_id": "padding"}
"""What llama.cpp calls uses of tokens."""


def _ends(folder: Any, around: list[int]) -> dict[str, Any]:
    """Return the keys of what begins and ends texts, and of the chat template.

    Args:
        folder: of the model.
        around: the tokens that the tokenizer puts around a text.
    """
    found: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        given = text_fields(beside.json_of(folder, name)).items()
        config |= {key: value for key, value in given if value is not None}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        values = value if isinstance(value, list) else [value]
        # Several ends: llama.cpp stops at the end of a turn and of a message, too.
        names = ("eos", "eot", "eom") if key == "eos_token_id" else (_USES[key],)
        for name, one in zip(names, values, strict=False):
            if one is not None:
                found[f"tokenizer.ggml.{name}_token_id"] = int(one)
    for key, at in (("bos", 0), ("eos", -1)):
        end = found.get(f"tokenizer.ggml.{key}_token_id")
        is_added = end is not None and bool(around) and around[at] == end
        found[f"tokenizer.ggml.add_{key}_token"] = is_added
    template = beside.template_of(folder)
    if template is not None:
        found["tokenizer.chat_template"] = template
    return found
