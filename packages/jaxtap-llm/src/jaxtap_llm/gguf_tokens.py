"""The tokenizer of a file of llama.cpp as a ``tokenizer.json``: the other way of ``vocabulary``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from .config import LlmError
from .gguf_fields import shown
from .token_kinds import BYTES, CONTROL, NORMAL, SPACE, SPLITS, UNKNOWN, UNUSED, USER

_PATTERNS = {name: pattern for pattern, name in SPLITS.items()}
_OTHER_NAMES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "llama4": "gpt-4o"}
"""Names of patterns that have a second one."""
_WHOLE_FIRST = ("llama-bpe", "tekken")
"""Patterns with which a word that is a token is that token, whatever merges make of it."""
_BEGUN = ("llama-bpe", "tekken")
"""Patterns with which llama.cpp puts the first token before a text unless a file says otherwise."""
_KNOWN = {
    *("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id"),
    *("eot_token_id", "eom_token_id", "unknown_token_id", "padding_token_id", "add_bos_token"),
    *("add_eos_token", "add_space_prefix", "mask_token_id", "seperator_token_id"),
    *("cls_token_id", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
    *("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id"),
}
"""Keys that are read, or that name tokens of other uses than the beginning and end of texts."""


class Tokens:
    """What a file says of tokens.

    Args:
        metadata: all keys of the file.
        where: the file, for errors.

    Raises:
        LlmError: names a key that can't be honoured.
    """

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        start = "tokenizer.ggml."
        self._where, self._metadata = where, metadata
        self._own = {key.removeprefix(start): value for key, value in metadata.items()
                     if key.startswith(start)}  # fmt: skip
        for key in self._own.keys() - _KNOWN:
            raise LlmError(f"{where}: {start}{key} is unknown: what it says can't be honoured.")
        self.model = self._own.get("model")
        if not isinstance(self.model, str) or self.model not in ("gpt2", "llama"):
            raise self._error("model", "gpt2 (BPE of bytes) or llama (SentencePiece's)", self.model)
        texts = self._own.get("tokens")
        if not isinstance(texts, list) or not texts or not isinstance(texts[0], str):
            raise self._error("tokens", "a list of text", texts)
        self.texts: list[str] = texts
        if len(set(self.texts)) < len(self.texts):
            again, _ = Counter(self.texts).most_common(1)[0]
            raise self._error("tokens", "different from each other", again)
        self.kinds = self._numbers("token_type", [NORMAL] * len(self.texts), "iu").tolist()

    def _error(self, key: str, wanted: str, found: Any) -> LlmError:
        start = f"{self._where}: tokenizer.ggml.{key}"
        return LlmError(f"{start} must be {wanted}, got {shown(found)}.")

    def _numbers(self, key: str, default: Any, kinds: str) -> np.ndarray:
        """Return a number for each token, of a NumPy type that is of some kinds."""
        found = self._own.get(key, default)
        numbers = np.asarray(found)
        if numbers.shape != (len(self.texts),) or numbers.dtype.kind not in kinds:
            got = f"{numbers.dtype} {list(numbers.shape)}"
            raise self._error(key, f"a number for each of {len(self.texts)} tokens", got)
        if not np.isfinite(numbers).all():
            raise self._error(key, "numbers", "NaN or infinity")
        return numbers

    def _flag(self, key: str, default: bool) -> bool:
        found = self._own.get(key, default)
        if not isinstance(found, bool | np.bool_):
            raise self._error(key, "a bool", found)
        return bool(found)

    def _id(self, name: str) -> int | None:
        """Return the place of a token with a use, or None."""
        found = self._own.get(f"{name}_token_id")
        if found is None:
            return None
        if not isinstance(found, int | np.integer) or not 0 <= found < len(self.texts):
            raise self._error(f"{name}_token_id", f"below {len(self.texts)}", found)
        return int(found)

    def ends(self) -> dict[str, Any]:
        """Return the fields of a config.json that name tokens: those that begin and end texts."""
        # llama.cpp stops at the end of a turn and of a message, too.
        stops = [one for name in ("eos", "eot", "eom") if (one := self._id(name)) is not None]
        stops = list(dict.fromkeys(stops))
        found = {
            "bos_token_id": self._id("bos"),
            "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
            "pad_token_id": self._id("padding"),
        }
        return {name: value for name, value in found.items() if value is not None}

    def template(self) -> str | None:
        """Return the chat template, or None."""
        found = self._metadata.get("tokenizer.chat_template")
        return found if isinstance(found, str) else None

    def is_bytes(self) -> bool:
        """Return whether the tokens are the bytes of text."""
        wanted = {f"<0x{i:02X}>": i for i in range(BYTES)} | {SPACE: ord(" ")}
        return len(self.texts) == BYTES and all(
            wanted.get(text) == i for i, text in enumerate(self.texts)
        )

    def written(self) -> str | None:
        """Return the text of a tokenizer.json; None for bytes.

        Raises:
            LlmError: names a key that can't be honoured.
        """
        if self.is_bytes():
            return None
        made = self._of_bytes() if self.model == "gpt2" else self._of_pieces()
        added = [
            {
                **{"id": i, "content": text, "single_word": False, "lstrip": False},
                **{"rstrip": False, "normalized": False, "special": kind != USER},
            }
            for i, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True))
            if kind in (CONTROL, USER, UNKNOWN)
        ]
        fields = {
            **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": added},
            **made,
            "post_processor": self._around(made["pre_tokenizer"]),
        }
        return json.dumps(fields, ensure_ascii=False)

    def _around(self, pre: Any) -> dict[str, Any] | None:
        """Return what puts the first and the last token around a text."""
        begun = self.model == "llama" or self._pre() in _BEGUN
        sides: dict[str, list[Any]] = {"bos": [], "eos": []}
        used = {}
        for name, default in (("bos", begun), ("eos", False)):
            key = f"add_{name}_token"
            is_added, at = self._flag(key, default), self._id(name)
            if not is_added or (at is None and key not in self._own):
                continue
            if at is None:
                raise self._error(f"{name}_token_id", f"there, as {key} is true", None)
            text = self.texts[at]
            sides[name] = [{"SpecialToken": {"id": text, "type_id": 0}}]
            used[text] = {"id": text, "ids": [at], "tokens": [text]}
        if not used:
            return None
        single = [*sides["bos"], {"Sequence": {"id": "A", "type_id": 0}}, *sides["eos"]]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
        both = {"single": single, "pair": pair, "special_tokens": used}
        return {"type": "TemplateProcessing"} | both

    def _pre(self) -> str | None:
        found = self._own.get("pre")
        return _OTHER_NAMES.get(found, found) if isinstance(found, str) else None

    def _model(self, merges: list[str], **more: Any) -> dict[str, Any]:
        """Return a model of merges of all tokens that a text may be made of."""
        vocab = {text: i for i, text in enumerate(self.texts) if self.kinds[i] != UNUSED}
        for one in merges:
            parts = one.split(" ")
            if len(parts) != 2 or any(text not in vocab for text in (*parts, "".join(parts))):
                raise self._error("merges", "pairs of tokens that are a token together", one)
        plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None}
        plain |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False}
        rest = {"vocab": vocab, "merges": [one.split(" ") for one in merges]}
        return {"type": "BPE"} | plain | {"ignore_merges": False} | more | rest

    def _of_bytes(self) -> dict[str, Any]:
        """Return what differs for a BPE of bytes."""
        pre, merges = self._pre(), self._own.get("merges")
        if not isinstance(merges, list) or not all(isinstance(one, str) for one in merges):
            raise self._error("merges", "a list of text", merges)
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        split: list[dict[str, Any]] = []
        if pre in _PATTERNS:
            pattern = {"Regex": _PATTERNS[pre]}
            split = [{"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}]
        elif pre == "smollm":
            split = [{"type": "Digits", "individual_digits": True}]
        elif pre != "gpt-2":
            known = ", ".join(sorted({*_PATTERNS, *_OTHER_NAMES, "smollm", "gpt-2"}))
            raise self._error("pre", f"one of {known}", self._own.get("pre"))
        steps = [*split, level | {"use_regex": pre not in _PATTERNS}]
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": level | {"use_regex": True},
            "model": self._model(merges, ignore_merges=pre in _WHOLE_FIRST),
        }

    def _of_pieces(self) -> dict[str, Any]:
        """Return what differs for pieces with scores, of which bytes are what no piece has."""
        scores = self._numbers("scores", [], "f").astype(np.float32)
        missing = [i for i in range(BYTES) if f"<0x{i:02X}>" not in self.texts]
        if missing:
            wanted = f"with the byte <0x{missing[0]:02X}> to fall back on"
            raise self._error("tokens", wanted, None)
        unknown = next(
            (t for t, k in zip(self.texts, self.kinds, strict=True) if k == UNKNOWN), None
        )
        prefix = self._flag("add_space_prefix", True)
        before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        more = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": steps},
            "model": self._model(self._merges(scores), **more),
        }

    def _merges(self, scores: np.ndarray) -> list[str]:
        """Return the merges that pieces with scores stand for: those of the best pieces first.

        SentencePiece merges whatever two neighbours are a piece together, the best piece first. So
        does llama.cpp. transformers makes a tokenizer.json of such pieces in the same way.
        """
        normal = {text: i for i, text in enumerate(self.texts) if self.kinds[i] == NORMAL}
        found = []
        for text, i in normal.items():
            splits = [(text[:at], text[at:]) for at in range(1, len(text))]
            pairs = [(a, b) for a, b in splits if a in normal and b in normal]
            pairs.sort(key=lambda pair: (normal[pair[0]], normal[pair[1]]))
            found += [(-float(scores[i]), a, b) for a, b in pairs]
        found.sort(key=lambda one: one[0])
        return [f"{a} {b}" for _, a, b in found]
