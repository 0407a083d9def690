"""Files of llama.cpp as models: what we wrote, what others quantized, and damaged ones."""

import functools
import json
import os
import warnings

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import provider_xla as xla
from interception_core import JaxtapError
from jaxtap_llm import (
    beside,
    checkpoint,
    floats,
    folders,
    gguf_source,
    gguf_texts,
    model,
    token_kinds,
)
from jaxtap_llm.config import LlmError
from jaxtap_llm.fields import parse_config, read_config
from jaxtap_llm.generate import Generator
from jaxtap_llm.gguf import export
from jaxtap_llm.tokenizer import read_stops, read_tokenizer
from jaxtap_testkit.gguf_samples import blocks
from jaxtap_testkit.llm_samples import LLAMA3, YARN, fields_of, run_llm, varied

KINDS = ["sliding_attention", "full_attention"]
WRITABLE = {
    "llama": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}},
    "mistral": {"sliding_window": None, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mixtral": {},
    "phi3": {
        "sliding_window": None,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
        },
    },
    "smollm3": {"no_rope_layers": None},
    "gpt_oss": {"swiglu_limit": 7.0, "layer_types": None}
    | {"rope_scaling": YARN | {"truncate": False}},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6}
    | {"rope_local_base_freq": 1e4},
    "llama4_text": {"no_rope_layer_interval": 4, "attention_chunk_size": 8192}
    | {"floor_scale": 8192, "attn_scale": 0.1},
    "gemma4_text": {"num_hidden_layers": 8, "num_kv_shared_layers": 2}
    | {"layer_types": (KINDS[:1] * 2 + KINDS[1:]) * 2 + KINDS},
    "gemma4_experts": {"layer_types": (KINDS[:1] * 2 + KINDS[1:]) * 2},
    "qwen3_5_text": {"linear_key_head_dim": 16},
    "qwen3_5_moe_text": {"linear_key_head_dim": 16},
}
"""Models of each family that llama.cpp has."""


def written(tmp_path, family, form="f32", **more):
    """Write a model as a folder and as a file. Returns its fields, config, parameters and file."""
    common = {"num_hidden_layers": 6, "max_position_embeddings": 4096, "eos_token_id": [7, 9]}
    fields = fields_of(family) | common | WRITABLE[family] | more
    config = parse_config(fields)
    params = varied(checkpoint.init(config))
    checkpoint.write(tmp_path / "in", fields, config, params)
    export(tmp_path / "in", tmp_path / "model.gguf", form)
    return fields, config, params, tmp_path / "model.gguf"


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", WRITABLE)
def test_what_is_written_is_read(tmp_path, family):
    _, config, params, path = written(tmp_path, family)
    found, get = gguf_source.opened(path)
    assert found.windows == config.windows
    assert found.kinds == config.kinds
    assert found.rope_of == config.rope_of
    for ours, theirs in zip(found.ropes, config.ropes, strict=True):
        for is_long in (False, True):
            np.testing.assert_allclose(
                ours.frequencies(16, is_long), theirs.frequencies(16, is_long), rtol=1e-6
            )
        assert ours.length == theirs.length
        np.testing.assert_allclose(ours.scale, theirs.scale, rtol=1e-6)
    same = "family", "prefix", "ropes", "kinds"
    if family != "mistral":  # an architecture with Llama
        assert found.family == config.family
    for name in vars(found).keys() - {*same, "segments", "cached"}:
        assert getattr(found, name) == getattr(config, name), name
    for layer in (None, *range(config.layers)):
        for name in checkpoint.tensor_names(config, layer):
            wanted = np.asarray(checkpoint.parameter(config, params, name, layer)[1])
            # The decay is written as its exponential.
            np.testing.assert_allclose(get(name, layer), wanted, atol=2e-7, err_msg=name)
    assert read_stops(path) == (7, 9)


def rewritten(path, out, change=lambda metadata: metadata, tensors=lambda found: found):
    """Write a file again by the gguf package, with other keys and tensors.

    Args:
        path: of the file.
        out: of the new one.
        change: returns the keys that the new one has.
        tensors: returns its tensors: by name an array, or bytes of a matrix and their type.

    Returns:
        The tensors, dequantized by the gguf package.
    """
    metadata = change(dict(xla.read_gguf_metadata(path)))
    reader = gguf.GGUFReader(path)
    found = tensors({one.name: np.array(one.data) for one in reader.tensors})
    writer = gguf.GGUFWriter(out, metadata.pop("general.architecture"))
    numbers = {}
    for name, value in found.items():
        data, kind = value if isinstance(value, tuple) else (value, None)
        kind = None if kind is None else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, data, raw_dtype=kind)
        numbers[name] = np.asarray(data if kind is None else gguf.dequantize(data, kind))
    types = gguf.GGUFValueType
    for key, value in metadata.items():
        if isinstance(value, list | np.ndarray):
            writer.add_array(key, np.asarray(value).tolist())
        elif isinstance(value, bool | np.bool_):
            writer.add_bool(key, bool(value))
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            kind = types[np.asarray(value).dtype.name.upper()]
            writer.add_key_value(key, np.asarray(value).item(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
MIXED = {"attn_v": "Q6_K", "blk.1.ffn_down": "Q6_K", "token_embd": "Q6_K", "output": "Q6_K"}
TYPES = {
    "Q4_K": (MIXED, {"layers.qkv", "layers.down"}),
    "Q8_0": ({}, set()),
    "Q4_0": ({"output.": "Q6_K", "token_embd": "Q4_1"}, set()),
    "Q5_K": ({"attn_k": "Q5_1"}, {"layers.qkv"}),
    "Q3_K": ({"attn_v": "Q5_0", "token_embd": "Q2_K"}, {"layers.qkv"}),
    "IQ4_XS": ({"blk.0.ffn_down": "Q5_K", "output.": "IQ4_NL"}, {"layers.down"}),
    "TQ2_0": ({"token_embd": "Q4_K", "output": "Q6_K"}, set()),
    "Q4_1": ({"attn_output": "F32"}, set()),
    "Q2_K": ({"blk.0.attn_q": "F32"}, {"layers.qkv"}),
}
"""Types of matrices, by the type of most: those of others, and the parameters that a warning names.
"""


def quantized(path, out, most, others, seed=0):
    """Write a file again with random quantized matrices. Returns its dequantized tensors."""

    def change(found):
        new = {}
        for i, (name, array) in enumerate(found.items()):
            kind = next((kind for part, kind in others.items() if part in name), most)
            if array.ndim < 2 or "rope" in name or kind == "F32":
                new[name] = array
                continue
            kind_of = gguf.GGMLQuantizationType[kind]
            count = array.shape[1] // gguf.GGML_QUANT_SIZES[kind_of][0]
            made = functools.partial(blocks, kind, len(array), seed + i, count)
            # Of the size that a model's weights have.
            size = array.shape[1] ** -0.5 / gguf.dequantize(made(1e-3), kind_of).std()
            new[name] = made(1e-3 * size), kind
        return new

    return rewritten(path, out, tensors=change)


def float_params(config, tensors):
    """The parameters of a float model, of tensors as the gguf package dequantizes them.

    For Llama alone, whose queries and keys have rotary pairs as neighbours.
    """

    def rows(name, heads):
        x = tensors[name]
        pairs = x.reshape(heads, len(x) // heads // 2, 2, -1)
        return pairs.swapaxes(1, 2).reshape(x.shape)

    layers = []
    for i in range(config.layers):
        at = f"blk.{i}."
        q, k = rows(f"{at}attn_q.weight", config.heads), rows(f"{at}attn_k.weight", config.kv_heads)
        gates = [tensors[f"{at}ffn_{one}.weight"] for one in ("gate", "up")]
        layers.append(
            {
                "attention_norm": tensors[f"{at}attn_norm.weight"],
                "mlp_norm": tensors[f"{at}ffn_norm.weight"],
                "qkv": np.concatenate([q, k, tensors[f"{at}attn_v.weight"]]).T,
                "out": tensors[f"{at}attn_output.weight"].T,
                "gate_up": np.concatenate(gates).T,
                "down": tensors[f"{at}ffn_down.weight"].T,
            }
        )
    return {
        "embed": tensors["token_embd.weight"],
        "norm": tensors["output_norm.weight"],
        "head": tensors["output.weight"].T,
        "layers": {name: np.stack([one[name] for one in layers]) for name in layers[0]},
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("most", TYPES)
def test_quantized_numbers_are_those_of_the_file(tmp_path, most):
    """What is stored stands for the numbers of the gguf package, and is not float."""
    _, config, _, path = written(tmp_path, "llama", **WIDE)
    others, mixed = TYPES[most]
    wanted = float_params(config, quantized(path, tmp_path / "q.gguf", most, others))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found, rules, params = gguf_source.read(tmp_path / "q.gguf")
    assert found == config
    text = " ".join(str(one.message) for one in told)
    assert all(name in text for name in mixed)
    assert bool(text) == bool(mixed)
    flat = {**{k: v for k, v in params.items() if k != "layers"}, **params["layers"]}
    exact = {**{k: v for k, v in wanted.items() if k != "layers"}, **wanted["layers"]}
    for name, x in flat.items():
        numbers = np.asarray(x.restore() if hasattr(x, "restore") else x)
        # Of widened tensors (value * scale + minimum) may be rounded in another place.
        size = np.abs(exact[name]).max()
        np.testing.assert_allclose(numbers, exact[name], rtol=0, atol=2e-7 * size, err_msg=name)
        is_float = "F32" in others.values() and any(f"layers.{name}" in one for one in mixed)
        is_float |= most == "Q4_1" and name == "out"
        assert hasattr(x, "qtype") == (x.ndim > 1 and "norm" not in name and not is_float), name
    assert rules


@pytest.mark.slow
@pytest.mark.parametrize("most", ["Q4_K", "IQ4_XS", "TQ2_0"])
def test_it_generates_what_the_float_model_does(tmp_path, most):
    _, config, _, path = written(tmp_path, "llama", **WIDE)
    tensors = quantized(path, tmp_path / "q.gguf", most, TYPES[most][0])
    wanted = jax.tree.map(jnp.asarray, float_params(config, tensors))
    with warnings.catch_warnings():
        # Of parameters of several types; that a rule has no effect is an error.
        warnings.filterwarnings("ignore", ".*several types", xla.QuantizationWarning)
        found, plan, params = folders.load(tmp_path / "q.gguf")
    tokens = np.random.default_rng(2).integers(0, 256, (1, 9))
    run = plan.apply(functools.partial(model.logits, found))
    exact = np.asarray(model.logits(config, wanted, tokens), np.float64)
    away = np.linalg.norm(np.asarray(run(params, tokens)) - exact) / np.linalg.norm(exact)
    assert away < 2e-3, away
    streams = Generator(found, params, plan).stream, Generator(config, wanted).stream
    ours, theirs = (np.concatenate(list(stream(tokens, 8)), 1) for stream in streams)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "gpt_oss"])
def test_heads_and_experts_move_with_their_scales(tmp_path, family):
    """Quantized numbers of the file are in the order of the float ones."""
    more = {"qwen3_5_moe_text": {"linear_value_head_dim": 32, "linear_key_head_dim": 32}}.get(
        family, {}
    )
    _, config, _, path = written(tmp_path, family, "f32", **more)
    export(tmp_path / "in", tmp_path / "q.gguf", "q8_0")
    _, exact = gguf_source.opened(path)
    _, stored = gguf_source.opened(tmp_path / "q.gguf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xla.QuantizationWarning)
        found, _, params = gguf_source.read(tmp_path / "q.gguf")
    count = 0
    for layer in range(config.layers):
        for name in checkpoint.tensor_names(config, layer):
            float_one, one = exact(name, layer), stored(name, layer)
            np.testing.assert_allclose(one, float_one, atol=0.02 * np.abs(float_one).max())
            whole = checkpoint.parameter(found, params, name, layer)[1]
            is_stored = hasattr(whole, "restore")
            count += is_stored
            whole = np.asarray(whole.restore() if is_stored else whole)
            np.testing.assert_allclose(whole, one, atol=1e-6)
    assert count >= 3 * config.layers


TEXTS = [
    "Hello world",
    "naïve 東京 🐙 12345 it's",
    "def f(x):\n    return  x+1\n\n",
    "  two  spaces",
]
TEXTS += ["DON'T 3.14", "tabs\tand\nlines", "<|end|>then", "HTTPServer isn't iOS/x"]


def trained_on_bytes(pre, **more):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(**more))
    made.pre_tokenizer, made.decoder = pre, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(
        TEXTS * 3 + ["There is the rain in the plain, again and again"], trainer
    )
    return made


def tokenizers_of():
    """Tokenizers by the name that llama.cpp has for them."""
    from tokenizers import Regex, pre_tokenizers, processors

    level = functools.partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
    both = pre_tokenizers.Sequence
    made = {
        "gpt-2": trained_on_bytes(level()),
        "smollm": trained_on_bytes(both([pre_tokenizers.Digits(True), level()])),
    }
    for pattern, name in token_kinds.SPLITS.items():
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        whole = name in ("llama-bpe", "tekken")
        made[name] = trained_on_bytes(both([split, level(use_regex=False)]), ignore_merges=whole)
    made["llama-bpe"].post_processor = processors.TemplateProcessing(
        "<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    return made


def of_pieces():
    """A tokenizer as those of SentencePiece are converted, with bytes to fall back on."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    octets = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *octets], show_progress=False
    )
    made.train_from_iterator(TEXTS[:3] * 3, trainer)
    fields = json.loads(made.to_str())
    fields["added_tokens"] = [x for x in fields["added_tokens"] if x["content"] not in octets]
    made = Tokenizer.from_str(json.dumps(fields))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


@pytest.mark.parametrize("name", ["gpt-2", "smollm", *token_kinds.SPLITS.values(), "pieces"])
def test_tokens_are_those_of_the_tokenizer_that_was_written(tmp_path, name):
    made = of_pieces() if name == "pieces" else tokenizers_of()[name]
    size = made.get_vocab_size()
    fields = fields_of("llama") | {"vocab_size": size + 3, "num_hidden_layers": 1}
    fields |= {"hidden_size": 32, "bos_token_id": 1 if name == "pieces" else 0, "eos_token_id": 2}
    config = parse_config(fields | {"rope_scaling": None})
    (tmp_path / "in").mkdir()
    made.save(str(tmp_path / "in" / "tokenizer.json"))
    template = {"chat_template": "{{ messages }}"}
    (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps(template))
    checkpoint.write(tmp_path / "in", fields | {"rope_scaling": None}, config,
                     checkpoint.init(config))  # fmt: skip
    export(tmp_path / "in", tmp_path / "model.gguf", "f32")
    found = read_tokenizer(tmp_path / "model.gguf", config)
    for text in TEXTS:
        ids = made.encode(text).ids
        assert found.encode(text) == ids, text
        assert found.encode(text, is_begin=False) == made.encode(text, add_special_tokens=False).ids
        assert found.decode(ids) == made.decode(ids)
    assert beside.json_of(tmp_path / "model.gguf", "tokenizer_config.json") == template


def test_what_can_not_be_honoured_is_refused_by_its_name(tmp_path, monkeypatch):
    *_, path = written(tmp_path, "llama", num_hidden_layers=1)
    out, known = tmp_path / "out.gguf", xla.read_gguf_metadata(path)
    for key, value, message in (
        ("general.architecture", "mamba", "general.architecture must be one of llama, .*'mamba'"),
        ("llama.rope.scaling.type", "dynamic", "llama.rope.scaling.type must be none, linear"),
        ("llama.attention.max_alibi_bias", np.float32(8), "max_alibi_bias is unknown, got"),
        ("llama.attention.value_length", np.uint32(8), "value_length must be 16 for llama, got"),
        ("llama.attention.sliding_window", np.uint32(64), "sliding_window is unknown, got"),
        ("llama.expert_weights_scale", np.float32(2.5), "expert_weights_scale is unknown, got"),
        ("llama.block_count", np.uint32(2), "lacks tensors: blk.1.attn_k.weight, .* 5 more"),
        ("llama.block_count", np.uint32(0), "block_count must be a whole number from 1 to 4096"),
        ("llama.attention.key_length", np.uint32(2**31), "whole number from 1 to 65536, got 2147"),
        ("llama.attention.value_length", ["a"], "value_length must be 16 for llama, got .'a'."),
        ("llama.attention.value_length", np.zeros(0, np.int32), r"must be 16 for llama, got \[\]"),
        ("llama.expert_count", np.zeros(0, np.int32), r"expert_count must be a whole number.*\[\]"),
        ("llama.rope.freq_base", np.float32(0), "freq_base must be a number above 0, got 0"),
        ("llama.rope.scaling.type", np.zeros(0, np.int32), "scaling.type must be text, got"),
        ("general.architecture", None, "general.architecture must be one of .* got nothing"),
        ("general.type", "adapter", "must have a model, got an adapter"),
        ("llama.embedding_length", np.uint32(32), r"must be \[.*32.*as its metadata says, got"),
        ("llama.attention.head_count", "four", "head_count must be a whole number .* got 'four'"),
        ("llama.attention.layer_norm_rms_epsilon", np.float32(np.nan), "must be a number, got nan"),
        ("tokenizer.ggml.model", "bert", "tokenizer.ggml.model must be gpt2 .* got 'bert'"),
        ("tokenizer.ggml.precompiled_charsmap", [1], "precompiled_charsmap is unknown"),
        ("tokenizer.ggml.tokens", ["a"] * 256, "tokens must be different from each other"),
        ("tokenizer.ggml.tokens", ["a", "b"], "token_type must be a number for each of 2 tokens"),
        ("tokenizer.ggml.token_type", [1.5] * 256, "token_type must be a number .* got 'float64"),
        ("tokenizer.ggml.model", None, "tokenizer.ggml.model must be gpt2 .* got nothing"),
        ("tokenizer.ggml.eos_token_id", np.uint32(999), "eos_token_id must be below 256, got"),
    ):
        found = {key: value for key, value in (known | {key: value}).items() if value is not None}
        monkeypatch.setattr(xla.GgufFile, "metadata", lambda _, found=found: found)
        gguf_texts._said.cache_clear()
        with pytest.raises(LlmError, match=message) as raised:
            folders.load(path)
        assert "\n" not in str(raised.value)
    monkeypatch.undo()
    spoiled = {"rope_freqs.weight": np.zeros(8, np.float32)}
    for change, message in (
        ({"blk.0.attn_q.bias": np.zeros(64, np.float32)}, "has unknown tensors: blk.0.attn_q.bias"),
        ({"blk.0.ffn_norm.weight": np.zeros(9, np.float32)}, r"must be \[64\], as its metadata"),
        (spoiled, "rope_freqs.weight of .* must be of numbers above 0"),
    ):
        out.unlink(missing_ok=True)
        rewritten(path, out, tensors=lambda found, change=change: found | change)
        with pytest.raises(LlmError, match=message):
            folders.load(out)


def test_damaged_files_are_one_clear_error_each(tmp_path):
    *_, path = written(tmp_path, "qwen3", num_hidden_layers=1)
    whole = path.read_bytes()
    spoiled, rng = tmp_path / "spoiled.gguf", np.random.default_rng(0)
    header = whole.index(b"blk.0")
    read = 0
    for i in range(60):
        data = bytearray(whole)
        if i % 3 == 0:
            data = data[: rng.integers(len(whole))]
        else:
            for at in rng.integers(0, header + 400, 1 + i % 4):
                data[at] = rng.integers(256)
        spoiled.write_bytes(data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run_llm("quantize", spoiled, tmp_path / "out", "--preset", "int8")
        except JaxtapError as error:
            assert "\n" not in str(error)  # noqa: PT017
            assert not (tmp_path / "out").exists()
        else:  # a byte that says nothing, such as one of a name
            read += 1
            for file in (tmp_path / "out").iterdir():
                file.unlink()
            os.rmdir(tmp_path / "out")
    assert read < 20


def test_commands_take_a_file(tmp_path, capsys):
    """Float or quantized, it is taken wherever a folder is."""
    *_, path = written(tmp_path, "llama", "q8_0", num_hidden_layers=1, max_position_embeddings=64)
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night; the rain fell in torrents. " * 4)
    run_llm("generate", path, "--prompt", "It", "--count", 4)
    assert capsys.readouterr().out.startswith("It")
    with pytest.raises(LlmError, match="must have float tensors to be quantized"):
        run_llm("quantize", path, tmp_path / "none")
    options = ["--rank", 2, "--length", 16, "--steps", 1, "--accumulate", 1]
    run_llm("finetune", path, text, "--out", tmp_path / "tuned", *options)
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["hidden_size"] == 64
    run_llm("export", tmp_path / "tuned", tmp_path / "merged", "--merged")
    run_llm("export", tmp_path / "tuned", tmp_path / "again.gguf", "--merged", "--gguf")
    config, get = gguf_source.opened(tmp_path / "again.gguf")
    wanted = floats.opened(tmp_path / "merged").get("down", 0)
    np.testing.assert_allclose(get("down", 0), wanted, atol=1e-3 * np.abs(wanted).max())
    # A float file is quantized as a float folder is.
    export(tmp_path / "in", tmp_path / "float.gguf", "f32")
    run_llm("quantize", tmp_path / "float.gguf", tmp_path / "a", "--preset", "int4")
    run_llm("quantize", tmp_path / "in", tmp_path / "b", "--preset", "int4")
    assert read_config(tmp_path / "a").width == config.width
    for one in ("ends", "layer-00000"):
        ours, theirs = (load_file(tmp_path / x / f"{one}.safetensors") for x in "ab")
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
