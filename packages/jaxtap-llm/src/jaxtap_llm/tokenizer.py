"""From text to tokens and back."""

import os
from pathlib import Path
from typing import Any

from . import beside
from .config import Config, LlmError
from .fields import text_fields
from .token_kinds import BYTES


class ByteTokenizer:
    """Takes the bytes of UTF-8 as tokens."""

    def encode(self, text, is_begin=True):
        """Return the ids of a text; nothing begins one."""
        return list(text.encode())

    def decode(self, ids):
        """Return the text of ids; bytes that are not UTF-8 as replacement characters."""
        return bytes(ids).decode(errors="replace")


def byte_level():
    """Return a ``tokenizers.Tokenizer`` that takes bytes as tokens, as ``ByteTokenizer`` does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The library writes a byte as a character that can be seen: those that can't are counted on
    # from 256.
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(BYTES) if byte not in seen]
    characters = {chr(byte): byte for byte in seen}
    characters |= {chr(BYTES + i): byte for i, byte in enumerate(hidden)}
    found = Tokenizer(models.BPE(characters, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return found


class FileTokenizer:
    """A ``tokenizer.json``.

    Args:
        text: of the file.
        path: of the file, for errors.
        vocabulary: tokens of the model.

    Raises:
        LlmError: it can't be read, or has more tokens than the model.
    """

    def __init__(self, text: str, path: Path, vocabulary: int):
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises Exception itself
            raise LlmError(f"{path} must be a tokenizer.json: {error}.") from error
        size = self._tokenizer.get_vocab_size()
        if size > vocabulary:
            raise LlmError(
                f"{path} must have at most the {vocabulary} tokens of the model, got {size}. It "
                "belongs to another model."
            )

    def encode(self, text, is_begin=True):
        """Return the ids of a text, with the tokens that begin one unless it goes on."""
        return self._tokenizer.encode(text, add_special_tokens=is_begin).ids

    def decode(self, ids):
        """Return the text of ids."""
        return self._tokenizer.decode(ids)


def read_tokenizer(folder: str | os.PathLike[str], config: Config) -> ByteTokenizer | FileTokenizer:
    """Return the tokenizer of a folder: its tokenizer.json, or bytes for a model of 256 tokens.

    Raises:
        LlmError: there is none, or it does not fit.
    """
    text = beside.text_of(folder, beside.TOKENIZER)
    if text is not None:
        path = beside.path_of(folder, beside.TOKENIZER)
        return FileTokenizer(text, path, config.vocabulary)
    if config.vocabulary == BYTES:
        return ByteTokenizer()
    raise LlmError(
        f"{folder} must have a tokenizer.json, for a model of {config.vocabulary} tokens."
    )


def read_stops(folder: Any) -> tuple[int, ...]:
    """Return the tokens that end a text, by the folder's files: a tuple, empty for none.

    Raises:
        LlmError: a file is damaged.
    """
    for name in ("generation_config.json", "config.json"):
        found = text_fields(beside.json_of(folder, name)).get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()


def stream_text(tokenizer, ids):
    """Yield the text of tokens as they come, in whole characters."""
    seen, shown = [], ""
    for one in ids:
        seen.append(one)
        text = tokenizer.decode(seen)
        if not text.endswith("�"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(seen)[len(shown) :]
