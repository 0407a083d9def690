"""Rows of documents: what is in them, and what a model computes of them."""

import functools
import itertools
import json
import re
from collections import Counter

import jax
import numpy as np
import pytest

from jaxtap_llm import checkpoint, model
from jaxtap_llm.config import LlmError
from jaxtap_llm.documents import Document, order, pack, read_documents
from jaxtap_llm.fields import parse_config
from jaxtap_llm.tokenizer import ByteTokenizer
from jaxtap_testkit.llm_samples import FAMILIES, fields_of, float64_logits, varied


@pytest.mark.parametrize("seed", range(5))
def test_each_token_is_expected_once_from_its_document(seed):
    rng = np.random.default_rng(seed)
    texts, documents = [], []
    for i in range(40):
        given = int(rng.integers(0, 4)) * int(rng.random() < 0.5)
        tokens = (rng.integers(1, 50, given + int(rng.integers(1, 12 if given else 40)))).tolist()
        texts.append((tokens, given))
        documents.append(Document(tokens, given, f"line {i}"))
    rows = pack(documents, 16)
    # What is learnt, token by token: all pairs of neighbours but those of a prompt.
    wanted = Counter(
        pair
        for tokens, given in texts
        for i, pair in enumerate(itertools.pairwise(tokens), start=1)
        if i >= given
    )
    found = Counter()
    for tokens, numbers, counted in zip(rows.tokens, rows.documents, rows.counted, strict=True):
        assert (tokens[numbers == 0] == 0).all()
        assert not counted[-1]
        assert (np.diff(numbers[numbers > 0]) >= 0).all()
        for i in np.flatnonzero(counted):
            assert numbers[i] == numbers[i + 1] > 0
            found[tokens[i], tokens[i + 1]] += 1
    assert found == wanted
    used = (rows.documents > 0).sum()
    assert used > 0.85 * rows.tokens.size  # few rows have room left


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_of_a_row_are_computed_as_alone(family):
    fields = fields_of(family)
    config = parse_config(fields)
    params = varied(checkpoint.init(config))
    tensors = checkpoint.tensors_of(config, params)
    tokens = np.random.default_rng(1).integers(0, 256, (2, 14))
    documents = np.array([[1] * 6 + [2] * 5 + [0] * 3, [1] + [2] * 13])
    run = jax.jit(functools.partial(model.logits, config))
    found = np.asarray(run(params, tokens, documents))
    for row, start, end in ((0, 0, 6), (0, 6, 11), (1, 0, 1), (1, 1, 14)):
        wanted = float64_logits(fields, tensors, tokens[row, start:end])
        atol = 2e-4 * found.std()
        np.testing.assert_allclose(found[row, start:end], wanted, rtol=0, atol=atol)


def test_rounds_have_each_row_once():
    found = np.concatenate([order(7, 3, start, 5) for start in range(0, 35, 5)])
    for start in range(0, 35, 7):
        assert sorted(found[start : start + 7]) == list(range(7))
    assert len({tuple(found[i : i + 7]) for i in range(0, 35, 7)}) > 1
    assert found[:5].tolist() != order(7, 4, 0, 5).tolist()


def test_files_of_text_and_of_lines(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("naïve")
    (found,) = read_documents(text, ByteTokenizer(), (2,))
    assert found.tokens == [*"naïve".encode(), 2]
    lines = tmp_path / "chat.jsonl"
    rows = [{"text": "ab"}, {"prompt": "cd", "completion": "e", "id": 3}]
    lines.write_text("\n\n".join(map(json.dumps, rows)))
    first, second = read_documents(lines, ByteTokenizer(), (2,))
    assert (first.tokens, first.given) == ([*b"ab", 2], 0)
    assert (second.tokens, second.given, second.where) == ([*b"cde", 2], 2, f"{lines} line 3")
    (row,) = pack([second], 8).counted
    assert row.tolist() == [False, True, True, False, False, False, False, False]


def test_what_can_not_be_learnt(tmp_path):
    path = tmp_path / "data.jsonl"
    for content, message in (
        ("{", "line 1 must be JSON"),
        (
            "[1]",
            "line 1 must be an object with a text, or with a .*, got list",
        ),
        ('{"text": "a"}\n{"messages": []}', "line 2 must be an object .*, got messages. Write"),
        ('{"text": 3}', "line 1 must be an object .*, got text"),
        ("", "must have text to learn from, got none"),
        ('{"text": ""}', "must have text to learn from, got none"),
    ):
        path.write_text(content)
        with pytest.raises(LlmError, match=re.escape(str(path)) + ".*" + message):
            read_documents(path, ByteTokenizer())
    path.write_bytes(b"\xff")
    with pytest.raises(LlmError, match="must be a file of text"):
        read_documents(path, ByteTokenizer())
    with pytest.raises(LlmError, match=r"x line 4: .* at most 4 tokens together, got 5. Raise --l"):
        pack([Document([1] * 5, 2, "x line 4")], 4)
    with pytest.raises(LlmError, match="book must have two tokens or more, or a completion"):
        pack([Document([1], 0, "book")], 4)
