"""The language models of jaxtap_llm. peers/test_llm.py compares them with others' code."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from interception_core import JaxtapError
from interception_core.cli import main
from jaxtap_llm import checkpoint, demo, folders, model, quantized
from jaxtap_llm.cache import applying
from jaxtap_llm.config import LlmError
from jaxtap_llm.fields import parse_config, read_config
from jaxtap_llm.generate import Generator, Sampling, sample
from jaxtap_llm.losses import perplexity
from jaxtap_llm.rules import FORMATS, rules_for
from jaxtap_llm.tokenizer import ByteTokenizer, read_tokenizer, stream_text
from jaxtap_testkit.llm_samples import FAMILIES, fields_of, float64_logits, run_llm, varied
from jaxtap_testkit.processes import run_python


def drawn(config, seed=0):
    return varied(checkpoint.init(config, seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_prefill_and_decode(family):
    fields = fields_of(family)
    config = parse_config(fields)
    params = drawn(config)
    tokens = np.random.default_rng(1).integers(0, 256, (2, 12))
    tensors = checkpoint.tensors_of(config, params)
    wanted = np.stack([float64_logits(fields, tensors, row) for row in tokens])
    # What a state returns, which may be near 0, is divided by its size.
    away = (5e-4 if config.delta else 2e-4) * wanted.std()
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=away)
    near(jax.jit(functools.partial(model.logits, config))(params, tokens), wanted)
    cache = model.make_cache(config, 2, 16)
    padded = np.pad(tokens[:, :7], ((0, 0), (0, 2)))  # what follows the prompt is not looked at
    found, cache = jax.jit(functools.partial(model.prefill, config))(params, padded, cache, 6)
    near(found, wanted[:, 6])
    decode = jax.jit(functools.partial(model.decode, config))
    for i in range(7, 12):
        found, cache = decode(params, tokens[:, i], cache, i)
        near(found, wanted[:, i])


def small(family="llama", **more):
    config = parse_config(fields_of(family) | more)
    return config, drawn(config)


def planned(config, params, name):
    fn = functools.partial(model.logits, config)
    plan = xla.PtqProvider(rules_for(config, FORMATS[name])).plan(
        fn, params, jnp.zeros((1, 8), "int32")
    )
    return plan, plan.quantize(params)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", ["float", "int4", "w8a8"])
def test_a_step_copies_no_cache_and_no_weight(name):
    config, params = small()
    plan, stored = planned(config, params, name)
    made = Generator(config, stored, plan)
    cache, key = model.make_cache(config, 2, 48), jax.random.key(0)
    token = jnp.zeros(2, jnp.int32)
    lowered = made._decode.lower(stored, token, cache, 3, key, sampling=Sampling(), steps=4)
    text = lowered.compile().as_text()
    shape = ",".join(map(str, cache["k"].shape))
    made_whole = re.findall(rf"= f32\[{shape}\]\S* ([\w-]+)\(", text)
    assert made_whole  # the cache is in the text
    assert "copy" not in made_whole
    assert "transpose" not in made_whole
    aliased = text.partition("input_output_alias=")[2].partition("\n")[0]
    assert aliased.count("-alias)") == 2
    if name != "float":
        assert "custom-call" in text
        assert not re.findall(r"= u8\[[\d,]*\]\S* (?:copy|dynamic-slice|transpose)\(", text)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_step_makes_no_float_of_an_int8_cache(family):
    """Attention reads int8 in its kernel; with soft caps, a matmul converts a layer at a time."""
    config, params = small(family)
    plan, stored = planned(config, params, "int8")
    made = Generator(config, stored, plan, cache="int8")
    cache, token = made.make_cache(2, 48), jnp.zeros(2, jnp.int32)
    key = jax.random.key(0)
    lowered = made._decode.lower(stored, token, cache, 3, key, sampling=Sampling(), steps=4)
    text = lowered.compile().as_text()
    layers, *one = cache["k"].shape
    whole, layer = (",".join(map(str, shape)) for shape in ((layers, *one), (1, *one)))
    assert re.findall(rf"= s8\[{whole}\]\S* dynamic-update-slice\(", text)
    assert not re.findall(rf"= (?:f32|bf16)\[{whole}\]", text)
    assert not re.findall(rf"= s8\[{whole}\]\S* (?:copy|transpose|convert)\(", text)
    assert text.partition("input_output_alias=")[2].partition("\n")[0].count("-alias)") == 4
    in_kernel = "te_ffi_kernels.decode_attention" in text
    assert in_kernel == (family == "llama")
    assert in_kernel == (not re.findall(rf"= f32\[{layer}\]\S* convert\(", text))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_int8_cache_has_rounded_rows(family):
    fields = fields_of(family)
    config, params = small(family)
    tokens = np.random.default_rng(5).integers(0, 256, (1, 12))
    tensors = checkpoint.tensors_of(config, params)
    exact, wanted = (float64_logits(fields, tensors, tokens[0], at)[7:] for at in (None, 7))
    made = Generator(config, params, cache="int8")
    _, cache = made._prefill(params, tokens[:, :7], made.make_cache(1, 16), 6)
    step = jax.jit(applying(config, None, "int8")(functools.partial(model.decode, config)))
    found = []
    for i in range(7, 12):
        logits, cache = step(params, tokens[:, i], cache, i)
        found.append(logits[0])
    # Those of float32 that lie between two integers may be rounded the other way.
    error = np.linalg.norm(np.array(found) - wanted)
    assert error < 0.1 * np.linalg.norm(exact - wanted)
    assert cache["k"].qvalue.dtype == jnp.int8


def test_all_weights_run_in_kernels():
    for family in ("llama", "qwen2", "qwen3_moe"):
        config, params = small(family)
        for name in ("int8", "w8a8", "int4"):
            plan, _ = planned(config, params, name)
            weights = [op for op in plan.ops if op.quantized]
            # A scanned layer has four; a head, and a table of tokens.
            assert len(weights) == 6
            assert all(op.kernel for op in weights if op.op_name != "take"), plan
            assert [op.kernel for op in plan.ops if op.op_name == "attention"] == [
                "te_ffi_kernels.fused_attn_forward"
            ]


def weight(x):
    return hasattr(x, "restore")


# Each format with and without experts, and every family.
QUANTIZED = {
    "llama": ["int8", "w8a8", "int4"],
    "qwen2": ["int4"],
    "qwen3": ["int8"],
    "qwen3_moe": ["int8", "w8a8", "int4"],
    "gemma2": ["int4"],
    "gemma3_text": ["w8a8"],
}


@pytest.mark.slow
@pytest.mark.parametrize("family", QUANTIZED)
def test_quantized_is_near_and_decodes_as_it_prefills(family):
    config, params = small(family)
    tokens = np.random.default_rng(2).integers(0, 256, (1, 9))
    for name in QUANTIZED[family]:
        plan, stored = planned(config, params, name)
        found = jax.jit(plan.apply(functools.partial(model.logits, config)))(stored, tokens)
        floats = jax.tree.map(lambda x: x.restore() if weight(x) else x, stored, is_leaf=weight)
        tensors = checkpoint.tensors_of(config, floats)
        exact = float64_logits(fields_of(family), tensors, tokens[0])
        error = np.linalg.norm(found[0] - exact) / np.linalg.norm(exact)
        # Where experts are chosen the error of an activation may choose another one.
        # Kernels multiply more than four rows in two planes of int8: 3e-5 for each matmul.
        assert error < (1e-3 if name != "w8a8" else 0.5 if config.experts else 0.1)
        made = Generator(config, stored, plan)
        cache = model.make_cache(config, 1, 16)
        _, cache = made._prefill(stored, tokens[:, :8], cache, 7)
        step = jax.jit(plan.apply(functools.partial(model.decode, config)))
        last, _ = step(stored, tokens[:, 8], cache, 8)
        np.testing.assert_allclose(last, found[:, 8], atol=0.05 * float(found.std()))


def greedy(config, params, prompt, count):
    tokens = list(prompt)
    run = jax.jit(functools.partial(model.logits, config))
    for _ in range(count):
        padded = np.pad(tokens, (0, 32 - len(tokens)))[None]
        tokens.append(int(run(params, padded)[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_generation():
    config, params = small()
    made = Generator(config, params)
    prompts = np.random.default_rng(3).integers(0, 256, (2, 5))
    blocks = list(made.stream(prompts, 12))
    assert [block.shape[1] for block in blocks] == [1, 8, 3]
    found = np.concatenate(blocks, axis=1)
    for row, prompt in zip(found, prompts, strict=True):
        assert row.tolist() == greedy(config, params, prompt, 12)
    stop = (int(found[0, 2]),)
    ended = np.concatenate(list(made.stream(prompts[:1], 12, stop=stop)), axis=1)[0]
    assert stop[0] in ended
    assert len(ended) < 12
    warm = Sampling(1.5, top_k=20, top_p=0.9)
    one, same, other = (
        np.concatenate(list(made.stream(prompts, 12, warm, seed)), axis=1) for seed in (1, 1, 2)
    )
    assert (one == same).all()
    assert (one != other).any()


@pytest.mark.slow
def test_sampling_draws_from_the_distribution():
    logits = jnp.log(jnp.array([0.05, 0.4, 0.25, 0.2, 0.1]))
    many = jnp.broadcast_to(logits, (20000, 5))
    key = jax.random.key(0)

    def shares(**options):
        drawn = jax.jit(sample, static_argnums=0)(Sampling(**options), key, many)
        return np.bincount(drawn, minlength=5) / len(many)

    near = functools.partial(np.testing.assert_allclose, atol=0.015)
    near(shares(temperature=1.0), [0.05, 0.4, 0.25, 0.2, 0.1])
    squared = np.array([0.05, 0.4, 0.25, 0.2, 0.1]) ** 2
    near(shares(temperature=0.5), squared / squared.sum())
    near(shares(temperature=1.0, top_k=2), [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0])
    near(shares(temperature=1.0, top_p=0.7), [0, 0.4 / 0.85, 0.25 / 0.85, 0.2 / 0.85, 0])
    near(shares(temperature=1.0, top_k=3, top_p=0.4), [0, 1, 0, 0, 0])
    assert shares().tolist() == [0, 1, 0, 0, 0]


@pytest.mark.slow
def test_perplexity():
    config, params = small()
    tokens = np.random.default_rng(4).integers(0, 256, 29)
    tensors, total = checkpoint.tensors_of(config, params), 0.0
    for start in (0, 8, 16):
        window = tokens[start : start + 9]
        found = float64_logits(fields_of("llama"), tensors, window[:-1])
        chances = np.exp(found) / np.exp(found).sum(-1, keepdims=True)
        total -= np.log(chances[np.arange(8), window[1:]]).sum()
    found = perplexity(config, params, tokens, window=8, batch=2)
    assert found == pytest.approx(math.exp(total / 24), rel=1e-4)
    with pytest.raises(LlmError, match="two tokens or more, got 1"):
        perplexity(config, params, tokens[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "int8"])
def test_perplexity_of_an_int8_cache(name):
    config, params = small()
    plan, stored = planned(config, params, name) if name else (None, params)
    tokens = np.random.default_rng(6).integers(0, 256, 65)
    at_once, floats, int8 = (
        perplexity(config, stored, tokens, plan, window=32, batch=2, cache=cache)
        for cache in (None, "float", "int8")
    )
    assert floats == pytest.approx(at_once, rel=1e-3)
    assert int8 != floats
    assert int8 == pytest.approx(floats, rel=0.005)


@pytest.fixture
def folder(tmp_path):
    config, params = small()
    checkpoint.write(tmp_path / "float", fields_of("llama"), config, params, shards=3)
    return tmp_path / "float"


def test_a_folder_is_read_as_it_was_written(folder):
    config, params = checkpoint.read(folder)
    assert config == small()[0]
    jax.tree.map(np.testing.assert_array_equal, params, small()[1])


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantizing_a_folder_is_quantizing_the_model(family, tmp_path):
    config, params = small(family)
    checkpoint.write(tmp_path / "float", fields_of(family), config, params, shards=2)
    quantized.quantize(tmp_path / "float", tmp_path / "out", "int4")
    loaded, _, stored = folders.load(tmp_path / "out")
    assert loaded == config
    # Gemma's norms lose a bit: the file has what is added to 1.
    _, read = checkpoint.read(tmp_path / "float")
    _, expected = planned(config, read, "int4")
    assert jax.tree.structure(stored) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
def test_an_interrupted_run_goes_on(folder, tmp_path, monkeypatch):
    out, real, calls = tmp_path / "out", xla.quantize_file, []

    def interrupted(*args, **options):
        calls.append(args[2].name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*args, **options)

    monkeypatch.setattr(xla, "quantize_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantized.quantize(folder, out, "int8")
    with pytest.raises(LlmError, match=r"lacks layer-00001.safetensors: quantize was interrupted"):
        folders.load(out)
    with pytest.raises(LlmError, match=r"begun with the same .* rules, got other rules. Remove"):
        quantized.quantize(folder, out, "int4")
    quantized.quantize(folder, out, "int8")
    assert calls[3:] == ["layer-00001.safetensors", "layer-00002.safetensors"]
    folders.load(out)


def spoiled(folder, what):
    """Spoil a folder, and return what the error says."""
    config = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / checkpoint.INDEX).read_text())
    if what == "shard":
        (folder / "model-00002-of-00003.safetensors").unlink()
        return "lacks model-00002-of-00003.safetensors"
    if what == "cut":
        file = folder / "model-00002-of-00003.safetensors"
        file.write_bytes(file.read_bytes()[:100])
        return "must be a safetensors file"
    if what == "index":
        (folder / checkpoint.INDEX).write_text(json.dumps({"weights": index}))
        return "must have a weight_map"
    if what == "none":
        (folder / checkpoint.INDEX).unlink()
        return f"must have {checkpoint.SINGLE}"
    config |= {
        "family": {"model_type": "gpt2"},
        "more layers": {"num_hidden_layers": 4},
        "fewer layers": {"num_hidden_layers": 2},
        "vocabulary": {"vocab_size": 300},
        "rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        "activation": {"hidden_act": "relu"},
        "width": {"hidden_size": 32},
    }.get(what, {})
    if what == "field":
        del config["num_attention_heads"]
    (folder / "config.json").write_text("{" if what == "json" else json.dumps(config))
    return {
        "family": "model_type must be one of llama, .*, got 'gpt2'",
        "more layers": "lack model.layers.3.input_layernorm.weight, .* and 5 more",
        "fewer layers": "have unknown tensors: model.layers.2",
        "vocabulary": r"model.embed_tokens.weight must be \[300, 64\], got \[256, 64\]",
        "rope": "rope_type must be default, linear, llama3, yarn .*, got dynamic",
        "activation": "hidden_act must be silu for llama, got relu",
        "field": "must have num_attention_heads",
        "json": "must be an object in JSON",
        "width": r"lm_head.weight must be|model.embed_tokens.weight must be \[256, 32\]",
    }[what]


@pytest.mark.parametrize(
    "what",
    [
        "shard",
        "cut",
        "index",
        "none",
        "family",
        "more layers",
        "fewer layers",
        "vocabulary",
        "rope",
        "activation",
        "field",
        "json",
        "width",
    ],
)
def test_bad_folders_leave_nothing(folder, tmp_path, what, capsys):
    message = spoiled(folder, what)
    with pytest.raises(JaxtapError) as raised:
        run_llm("quantize", str(folder), str(tmp_path / "out"))
    assert re.search(message, str(raised.value)), raised.value
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_configs_that_can_not_be():
    """Fields of the wrong type or size are said before anything is computed with them."""
    for change, message in (
        ({"hidden_size": "big"}, "hidden_size must be a whole number, above 0, got 'big'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number, above 0, got 0"),
        (
            {"num_hidden_layers": True},
            "num_hidden_layers must be a whole number, above 0, got True",
        ),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number, above 0, got '1e-5'"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads, got 4 and 3"),
        ({"head_dim": 15}, "head_dim must be even, for rotary positions, got 15"),
        ({"hidden_size": None}, "must have hidden_size, as llama's files do"),
        ({"rope_scaling": ["linear"]}, "must be as llama's files are"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor of linear must be a number"),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "factor of llama3 must be a number above 0"),
        (
            {"rope_scaling": None, "rope_parameters": {"rope_theta": -1.0}},
            "rope_theta must be a number above 0, got -1",
        ),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "must be below high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 for llama, got 0.5"),
        (
            {"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters or rope_scaling, got both",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "the tensors are quantized"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
        ({"layer_types": ["full_attention"]}, "for each of 3 layers, got 1"),
        ({"layer_types": ["chunked_attention"] * 3}, "got 3, chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "must have sliding_window"),
        ({"sliding_window": 3.5}, "sliding_window must be a whole number, 0 or more, got 3.5"),
    ):
        with pytest.raises(LlmError, match=re.escape(message)):
            parse_config(fields_of("llama") | change)
    with pytest.raises(LlmError, match="must be an object of fields, got a list"):
        parse_config([1])
    with pytest.raises(LlmError, match="num_experts_per_tok must be at most num_experts"):
        parse_config(fields_of("qwen3_moe") | {"num_experts": 1})
    config = parse_config(fields_of("llama") | {"rms_norm_eps": None, "head_dim": None})
    assert (config.epsilon, config.head_size) == (1e-6, 16)


def test_rules_of_a_file(folder, tmp_path):
    config = read_config(folder)
    path = tmp_path / "rules.json"
    path.write_text(json.dumps([{"module_path": "head", "weight_qtype": "int8"}]))
    run_llm("quantize", str(folder), str(tmp_path / "out"), "--rules", str(path))
    _, plan, stored = folders.load(tmp_path / "out")
    assert [op.op_id for op in plan.ops if op.quantized] == ["head/matmul:0"]
    assert isinstance(stored["layers"]["qkv"], jax.Array)
    for text in ('[{"weight_type": "int8"}]', '{"weight_qtype": "int8"}', "[1]"):
        path.write_text(text)
        with pytest.raises(LlmError, match="must be a list of fields"):
            quantized.read_rules(config, str(path))
    with pytest.raises(LlmError, match="one of float, int8"):
        quantized.read_rules(config, "int5")
    path.write_text('[{"module_path": "heda", "weight_qtype": "int8"}]')
    with pytest.raises(LlmError, match="can't be followed: rule 0 has no effect"):
        quantized.quantize(folder, tmp_path / "other", str(path))
    assert not (tmp_path / "other").exists()
    with pytest.raises(LlmError, match="must be a folder, got a file"):
        quantized.quantize(folder, path, "int8")


def test_bad_prompts():
    made = Generator(*small())
    for prompt, count, message in (
        ([[1] * 60], 10, r"fit into the cache of 64 positions, got 60 \+ 10"),
        ([[]], 4, "must have a token or more"),
        ([[1, 256]], 4, "below the model's vocabulary of 256, got 256"),
        ([[1, 2], [3]], 4, r"of one length, got lengths of \[1, 2\]"),
    ):
        with pytest.raises(LlmError, match=message):
            next(made.stream(prompt, count, positions=64))
    with pytest.raises(LlmError, match="temperature must be 0 or more"):
        Sampling(-1)


def test_tokenizers(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {one: i for i, one in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    config, _ = small()
    tokenizer = read_tokenizer(tmp_path, config)
    text = "naïve 東京 🐙\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    for one, encoded in ((tokenizer, ids), (ByteTokenizer(), list(text.encode()))):
        pieces = list(stream_text(one, encoded))
        assert "".join(pieces) == text
        assert "東" in pieces  # whole characters, as they are complete
    with pytest.raises(LlmError, match="at most the 200 tokens of the model, got 256"):
        read_tokenizer(tmp_path, dataclasses.replace(config, vocabulary=200))
    with pytest.raises(LlmError, match=r"must have a tokenizer\.json, for a model of 300 tokens"):
        read_tokenizer(tmp_path / "none", dataclasses.replace(config, vocabulary=300))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LlmError, match=r"must be a tokenizer\.json"):
        read_tokenizer(tmp_path, config)


def test_errors_and_ctrl_c_are_one_line(folder, tmp_path, capsys, monkeypatch):
    words = ["llm", "quantize", str(folder), str(tmp_path / "out")]
    assert main([*words, "--rules", "int5"]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("jaxtap: error: Rules must be one of float, int8, ")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(quantized, "quantize", interrupted)
    assert main(words) == 130
    assert capsys.readouterr().err.endswith("\njaxtap: interrupted\n")


def test_completion_knows_the_commands_of_llm(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "_shtab_jaxtap_llm_subparsers=(demo quantize generate" in script
    assert "_shtab_jaxtap_llm_perplexity___cache_choices=(float int8)" in script


def test_commands(folder, tmp_path, capsys):
    out = str(tmp_path / "out")
    run_llm("quantize", str(folder), out, "--preset", "w8a8", "--plan")
    text, told = capsys.readouterr()
    assert told.startswith(f"Quantizing {folder} into {out}: w8a8\n")
    assert "peak memory" in text
    assert "mlp/down/scan(layer)/matmul:0" in text
    run_llm("generate", out, "--prompt", "abc", "--count", "9")
    config, plan, stored = folders.load(out)
    ids = np.concatenate(list(Generator(config, stored, plan).stream([list(b"abc")], 9)), axis=1)
    assert capsys.readouterr().out == f"abc{ByteTokenizer().decode(ids[0].tolist())}\n"
    (tmp_path / "text").write_text("It was a dark night. " * 4)
    run_llm("perplexity", out, str(tmp_path / "text"), "--window", "16")
    assert re.fullmatch(
        r"perplexity \d+\.\d{4} of 84 tokens in windows of 16\n", capsys.readouterr().out
    )
    run_llm("perplexity", out, str(tmp_path / "text"), "--window", "16", "--cache", "int8")
    assert capsys.readouterr().out.startswith("perplexity ")
    run_llm("generate", out, "--prompt", "abc", "--count", "9", "--cache", "int8")
    made = Generator(config, stored, plan, cache="int8")
    ids = np.concatenate(list(made.stream([list(b"abc")], 9)), axis=1)
    assert capsys.readouterr().out == f"abc{ByteTokenizer().decode(ids[0].tolist())}\n"
    options = ["--prompts", "8", "--contexts", "8", "--steps", "2", "--rounds", "2"]
    run_llm("bench", out, "--cache", "int8", "--batch", "2", *options)
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "tokens a second: median, best"
    assert [row[:16].rstrip() for row in rows] == ["prefill 8", "decode at 8"]
    speeds = [list(map(float, row[16:].split())) for row in rows]
    assert all(best >= middle > 0 for middle, best in speeds)
    with pytest.raises(LlmError, match="Prompt and completion must fit"):
        run_llm("generate", out, "--prompt", "abc", "--context", "64", "--count", "99")
    options = ["--prompt", "abc", "--compilation-cache", str(tmp_path / "text")]
    with pytest.raises(LlmError, match="--compilation-cache must be a folder, got the"):
        run_llm("generate", out, *options)
    for wrong in ("0", "-5", "many"):
        with pytest.raises(SystemExit, match="2"):
            run_llm("generate", out, "--prompt", "abc", "--count", wrong)
        assert f"--count: must be a whole number, 1 or more, got {wrong}" in capsys.readouterr().err
    with pytest.raises(LlmError, match=r"must have a config.json"):
        run_llm("generate", tmp_path, "--prompt", "abc")
    run_llm("generate", folder, "--prompt", "abc", "--count", "9")  # float
    assert capsys.readouterr().out.startswith("abc")
    with pytest.raises(LlmError, match=r"must be a file of text"):
        run_llm("perplexity", out, str(tmp_path / "nothing"))


COUNT = """
import sys
from collections import Counter
import jax
counted = Counter()
jax.monitoring.register_event_listener(lambda event, **_: counted.update([event.split("/")[-1]]))
from jaxtap_testkit.llm_samples import run_llm as main
main("generate", sys.argv[1], "--prompt", "abc", "--count", "9", *sys.argv[2:])
print()
print(counted["compile_requests_use_cache"], counted["cache_hits"])
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(folder, tmp_path):
    quantized.quantize(folder, tmp_path / "out", "int8")
    (tmp_path / "count.py").write_text(COUNT)
    text, needed, found = [], [], []
    for _ in range(2):
        options = ["--compilation-cache", tmp_path / "programs", "--cache", "int8"]
        run = run_python(tmp_path / "count.py", tmp_path / "out", *options)
        *printed, counts = run.stdout.splitlines()
        text.append(printed)
        needed.append(int(counts.split()[0]))
        found.append(int(counts.split()[1]))
    assert needed[0] == needed[1] > 2  # prefill, decoding, and those that load parameters
    assert found[0] < needed[0] / 2
    assert found[1] == needed[1]
    assert text[0] == text[1]


MEASURE = """
import resource, sys
from jaxtap_llm import quantized
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
quantized.quantize(sys.argv[1], sys.argv[2], "int4")
before = peak()
quantized.quantize(sys.argv[3], sys.argv[4], "int4")
print(peak() - before)
"""


@pytest.mark.slow
def test_the_float_model_is_never_held(folder, tmp_path):
    """24 layers of 3.4 MB: the peak above that of a tiny model is a few copies of one."""
    fields = fields_of("llama") | {"hidden_size": 256, "intermediate_size": 768}
    fields["num_hidden_layers"] = 24
    config = parse_config(fields)
    checkpoint.write(tmp_path / "large", fields, config, checkpoint.init(config), shards=4)
    size = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    (tmp_path / "measure.py").write_text(MEASURE)
    folders = [str(x) for x in (folder, tmp_path / "a", tmp_path / "large", tmp_path / "b")]
    run = run_python(tmp_path / "measure.py", *folders)
    assert size > 75e6
    assert int(run.stdout) < size / 2


@pytest.mark.slow
def test_demo(capsys, tmp_path, monkeypatch):
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "num_hidden_layers": 1}
    monkeypatch.setattr(demo, "FIELDS", demo.FIELDS | small)
    monkeypatch.setattr(demo, "WINDOW", 16)
    # Other tests have these formats.
    others = ("int8, activations too", "int4")
    variants = {name: one for name, one in demo.VARIANTS.items() if name not in others}
    monkeypatch.setattr(demo, "VARIANTS", variants)
    demo.run(seconds=0.5, seed=0, save=tmp_path / "saved")
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:26].strip(): line[26:].split() for line in reversed(lines)}
    found = {name: float(rows[name][0]) for name in demo.VARIANTS}
    assert all(1 < one < 256 for one in found.values())
    config, params = checkpoint.read(tmp_path / "saved")
    assert config.layers == 1
    for name, (_, _, cache) in demo.VARIANTS.items():
        # Keys and values of 2 heads of 16: floats, or int8 with a scale for each head.
        assert rows[name][2] == {"float": "256", "int8": "80"}[cache]
    assert found["float, int8 cache"] == pytest.approx(found["float"], rel=0.005)
    assert found["int8, int8 cache"] == pytest.approx(found["int8"], rel=0.005)
    corpus, held_out = demo.read_corpus()
    assert len(corpus) > 5 * len(held_out) > 1e6
    assert params["embed"].shape == (256, 64)
