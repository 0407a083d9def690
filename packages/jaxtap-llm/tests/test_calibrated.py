"""Quantizing by bits and by data: what is written is what was optimized; what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
import quant_numerics as qn
from jaxtap_llm import calibrated, checkpoint, folders, model, quantized
from jaxtap_llm.config import LlmError
from jaxtap_llm.fields import parse_config
from jaxtap_llm.losses import perplexity
from jaxtap_llm.rules import FORMATS, rules_for
from jaxtap_testkit.llm_samples import fields_of, run_llm, varied

TEXT = "It is a truth universally acknowledged, that a quantized model is in want of data. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm") / "float"
    fields = fields_of("llama") | {"hidden_size": 32, "intermediate_size": 64}
    config = parse_config(fields)
    checkpoint.write(folder, fields, config, varied(checkpoint.init(config), 0))
    return folder


@pytest.fixture
def few_formats(monkeypatch):
    """Two formats: each is a program for each parameter."""
    monkeypatch.setattr(calibrated, "QTYPES", ("int3", "int8"))
    monkeypatch.setattr(calibrated, "TILES", (32,))


@pytest.mark.slow
def test_bits_and_data(folder, few_formats, tmp_path, capsys):
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text(TEXT)
    words = ["quantize", str(folder), str(out), "--calibrate", str(text), "--window", "64"]
    run_llm(*words, "--bits", "5")
    said = capsys.readouterr()
    assert "5 bits a weight" in said.err
    assert "peak memory" in said.out
    config, plan, stored = folders.load(out)
    assert {weight.qtype for weight in plan.weights.values()} == {"int3", "int8"}
    _, _, saved = quantized.read(out)  # as in the files: kernels hold 3 bits in 4
    leaves = jax.tree.leaves(saved, is_leaf=lambda x: hasattr(x, "qtype"))
    held = [x for x in leaves if hasattr(x, "qtype")]
    assert len(held) == len(plan.weights)
    assert 4.5 < 8 * sum(x.nbytes for x in held) / sum(x.size for x in held) <= 5
    # What was optimized in memory, with the same data, has the same perplexity.
    _, params = checkpoint.read(folder)
    params = jax.tree.map(jnp.asarray, params)
    tokens = np.frombuffer(TEXT.encode(), np.uint8)
    batches = calibrated.batches_of(tokens, 64)
    again, optimized = calibrated.optimized(
        config, params, batches, rules_for(config, FORMATS["int4"]), 5
    )
    found = [
        perplexity(config, one, tokens, how, window=64)
        for how, one in ((plan, stored), (again, again.prepack(optimized)))
    ]
    np.testing.assert_allclose(*found, rtol=1e-5)
    with pytest.raises(LlmError, match=r"begun with the same .*got other rules"):
        run_llm(*words, "--bits", "4")
    text.write_text(TEXT[:200])
    with pytest.raises(LlmError, match=r"begun with the same .*got other text"):
        run_llm(*words, "--bits", "5")


@pytest.mark.slow
def test_a_preset_is_rounded_for_a_text(folder, tmp_path):
    plain, text, out = tmp_path / "plain", tmp_path / "text", tmp_path / "out"
    text.write_text(TEXT)
    run_llm("quantize", str(folder), str(plain), "--preset", "int4")
    run_llm("quantize", str(folder), str(out), "--calibrate", str(text), "--window", "64")
    tokens = np.frombuffer(TEXT.encode(), np.uint8)
    logits = []
    for one in (folder, plain, out):
        config, plan, params = folders.load(one)
        logits.append(perplexity(config, params, tokens, plan, window=64))
    assert quantized.size_of(plain) == quantized.size_of(out)
    # Layers of one are not filled up with those of the other, whose rules are the same.
    (out / "layer-00001.safetensors").rename(tmp_path / "apart")
    with pytest.raises(LlmError, match=r"begun with the same .*got other text"):
        run_llm("quantize", str(folder), str(out), "--preset", "int4")
    with pytest.raises(LlmError, match=r"begun with the same .*got other text"):
        run_llm("quantize", str(folder), str(plain), "--calibrate", str(text), "--window", "64")
    (tmp_path / "apart").rename(out / "layer-00001.safetensors")
    exact, rounded, better = np.log(logits)
    assert abs(better - exact) < abs(rounded - exact)


def test_windows_are_spread_over_the_text():
    tokens = np.arange(100_000)
    batches = calibrated.batches_of(tokens, 128)
    assert {one.shape for one in batches} == {(4, 128)}
    assert sum(one.size for one in batches) == calibrated.SEEN
    assert batches[0][0, 0] == 0
    assert batches[-1][-1, -1] == 99_999
    (short,) = calibrated.batches_of(tokens[:40], 512)
    np.testing.assert_array_equal(short, tokens[None, :40])


def test_the_divergence_of_distributions():
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.5, 0.25]])
    found = calibrated.divergence(jnp.log(jnp.asarray(p)), jnp.log(jnp.asarray(q)))
    np.testing.assert_allclose(found, (p * np.log(p / q)).sum(), rtol=1e-6)


def test_scales_are_fitted_to_the_predictions(folder):
    config, params = checkpoint.read(folder)
    params = jax.tree.map(jnp.asarray, params)
    fn = functools.partial(model.logits, config)
    batches = calibrated.batches_of(np.frombuffer(TEXT.encode(), np.uint8), 64) * 8
    rule = xla.QuantizationRule(weight_qtype="int3", tile_size=32, scale_dtype="float16")
    plan = xla.PtqProvider([rule]).plan(fn, params, batches[0])
    stored = plan.quantize(params, prepack=False)
    found = calibrated.fitted(config, params, stored, batches)

    def error(stored):
        values = jax.tree.map(dequantized, stored, is_leaf=has_scales)
        logits = [np.asarray(fn(one, batches[0]), np.float64) for one in (params, values)]
        p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in logits)
        return (np.exp(p) * (p - q)).sum(-1).mean()

    def has_scales(x):
        return hasattr(x, "scale")

    def dequantized(x):
        return qn.dequantize(x) if has_scales(x) else x

    assert error(found) < 0.9 * error(stored)
    for before, after in zip(*map(jax.tree.leaves, (stored, found)), strict=True):
        assert before.dtype == after.dtype
        if jnp.issubdtype(before.dtype, jnp.integer):  # quantized values, packed
            np.testing.assert_array_equal(before, after)


@pytest.mark.slow
def test_a_width_that_no_tile_divides_has_scales_of_outputs(few_formats):
    config = parse_config(fields_of("llama") | {"hidden_size": 32, "intermediate_size": 44})
    params = jax.tree.map(jnp.asarray, varied(checkpoint.init(config), 0))
    batches = calibrated.batches_of(np.frombuffer(TEXT.encode(), np.uint8), 64)
    rules = rules_for(config, FORMATS["int4"])
    plan, _ = calibrated.optimized(config, params, batches, rules, 6)
    tiles = {one.path.split("'")[-2]: one.tile_size for one in plan.allocation.weights}
    assert tiles["down"] is None  # of 44: scales of tiles of 4 would take 4 bits a number
    assert plan.allocation.bits <= 6


def test_what_is_refused(folder, tmp_path):
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("short")
    words = ["quantize", str(folder), str(out)]
    with pytest.raises(LlmError, match="--bits needs --calibrate"):
        run_llm(*words, "--bits", "4")
    with pytest.raises(LlmError, match="must have 32 tokens or more, got 5"):
        run_llm(*words, "--calibrate", str(text))
    with pytest.raises(LlmError, match=r"--bits must be from 2\.2 to 8\.5"):
        run_llm(*words, "--bits", "1", "--calibrate", str(text))
    with pytest.raises(LlmError, match="--calibrate needs a format of weights, got float"):
        run_llm(*words, "--preset", "float", "--calibrate", str(text))
    with pytest.raises(LlmError, match="must be a file of text"):
        run_llm(*words, "--calibrate", str(tmp_path / "nothing"))
    text.write_text("long enough " * 9)
    with pytest.raises(
        xla.QuantizationError, match=r"budget_bits=2\.2 is too few: .* it takes 2\.\d+ bits"
    ):
        run_llm(*words, "--bits", "2.2", "--calibrate", str(text))
    assert not out.exists()
