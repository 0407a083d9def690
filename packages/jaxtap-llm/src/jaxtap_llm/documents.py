"""From a file of text to rows of tokens, of which each holds as many documents as fit."""

from __future__ import annotations

import bisect
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from .config import LlmError

LINES = ".jsonl"
"""The suffix of files with an object in each line."""


@dataclasses.dataclass(frozen=True)
class Document:
    """The tokens of a text.

    Attributes:
        tokens: int ``[n]``.
        given: how many of them are a prompt, which is not learnt.
        where: file and line, for errors.
    """

    tokens: list[int]
    given: int
    where: str


@dataclasses.dataclass(frozen=True)
class Rows:
    """Documents side by side in rows of one length.

    Attributes:
        tokens: int32 ``[rows, length]``; 0 where a row is not full.
        documents: int32, as tokens: the number of each token's document in its row, from 1 on; 0
            where a row is not full.
        counted: bool, as tokens: whether the token behind is to be expected from this one.
    """

    tokens: np.ndarray
    documents: np.ndarray
    counted: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ``tokens``, ``documents`` and ``counted`` of some rows, in their shape."""
        return self.tokens[rows], self.documents[rows], self.counted[rows]


def read_documents(path: Any, tokenizer: Any, stops: tuple[int, ...] = ()) -> list[Document]:
    """Return the documents of a file.

    Args:
        path: a text, which is one document; or a ``.jsonl`` file with an object in each line:
            ``{"text": ...}``, or ``{"prompt": ..., "completion": ...}``, of which the completion
            is learnt.
        tokenizer: has ``encode``.
        stops: tokens that end a text; the first is put behind each document.

    Raises:
        LlmError: the file can't be read, has no text, or a line is not such an object.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LlmError(f"{path} must be a file of text: {error}.") from error
    if path.suffix != LINES:
        parts = [("", text, str(path))]
    else:
        lines = enumerate(text.splitlines(), start=1)
        parts = [(*_fields(line, f"{path} line {i}"), f"{path} line {i}") for i, line in lines
                 if line.strip()]  # fmt: skip
    found = []
    for prompt, learnt, where in parts:
        first = tokenizer.encode(prompt) if prompt else []
        # What begins a text is the prompt's, where there is one.
        tokens = [*first, *tokenizer.encode(learnt, is_begin=not prompt)]
        if stops and tokens[-1:] != [stops[0]]:
            tokens.append(stops[0])
        found.append(Document(tokens, len(first), where))
    if not any(learnt for _, learnt, _ in parts):
        raise LlmError(f"{path} must have text to learn from, got none.")
    return found


def _fields(line: str, where: str) -> tuple[str, str]:
    """Return the prompt, or "", and the text to learn of a line."""
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise LlmError(f"{where} must be JSON, got: {error}.") from error
    for names in (("text",), ("prompt", "completion")):
        if isinstance(fields, dict) and all(isinstance(fields.get(name), str) for name in names):
            return ("", fields["text"]) if names == ("text",) else tuple(fields[n] for n in names)
    got = ", ".join(map(str, fields)) if isinstance(fields, dict) else type(fields).__name__
    raise LlmError(
        f"{where} must be an object with a text, or with a prompt and a completion, got {got}. "
        "Write messages out as the model's chat template does."
    )


def pack(documents: list[Document], length: int) -> Rows:
    """Put documents side by side, those that leave the least room first.

    A text without a prompt that is longer is cut into pieces, which have a token in common: so
    every token but the first is expected once.

    Args:
        documents: of one token or more.
        length: of a row.

    Raises:
        LlmError: a prompt and its completion don't fit into a row, or nothing can be learnt.
    """
    pieces = [piece for document in documents for piece in _pieces(document, length)]
    pieces = [piece for piece in pieces if len(piece.tokens) > max(piece.given, 1)]
    if not pieces:
        raise LlmError(
            f"{documents[0].where} must have two tokens or more, or a completion, to learn from."
        )
    rows: list[list[Document]] = []
    room: list[tuple[int, int]] = []  # what is left of rows, in order, and which row it is
    for piece in sorted(pieces, key=lambda one: -len(one.tokens)):
        size = len(piece.tokens)
        at = bisect.bisect_left(room, (size, 0))
        if at == len(room):
            rows.append([])
            left, row = length, len(rows) - 1
        else:
            left, row = room.pop(at)
        rows[row].append(piece)
        if left > size:
            bisect.insort(room, (left - size, row))
    shape = len(rows), length
    found = Rows(np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool))
    for i, row in enumerate(rows):
        start = 0
        for number, piece in enumerate(row, start=1):
            end = start + len(piece.tokens)
            found.tokens[i, start:end] = piece.tokens
            found.documents[i, start:end] = number
            found.counted[i, start + max(piece.given - 1, 0) : end - 1] = True
            start = end
    return found


def _pieces(document: Document, length: int) -> list[Document]:
    count = len(document.tokens)
    if count <= length:
        return [document]
    if document.given:
        raise LlmError(
            f"{document.where}: prompt and completion must have at most {length} tokens together, "
            f"got {count}. Raise --length, or shorten them."
        )
    starts = range(0, count - 1, length - 1)
    return [Document(document.tokens[i : i + length], 0, document.where) for i in starts]


def order(count: int, seed: int, start: int, size: int) -> np.ndarray:
    """Return which rows are at places ``start`` to ``start + size``, of rounds in random order.

    Args:
        count: rows.
        seed: of the orders; each round has another one.
        start: the first place.
        size: how many.
    """
    places = range(start, start + size)
    rounds = {place // count for place in places}
    orders = {i: np.random.default_rng((seed, i)).permutation(count) for i in rounds}
    return np.array([orders[place // count][place % count] for place in places])
