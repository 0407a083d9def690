"""Adapters: trained as NumPy's Adam trains them, continued, and exported for others."""

import functools
import json
import math
import re

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from interception_core import JaxtapError
from jaxtap_llm import (
    adapters,
    checkpoint,
    folders,
    merged,
    model,
    token_kinds,
    training,
    vocabulary,
)
from jaxtap_llm.config import LlmError
from jaxtap_llm.documents import pack, read_documents
from jaxtap_llm.fields import parse_config
from jaxtap_llm.gguf import stored
from jaxtap_llm.tokenizer import ByteTokenizer
from jaxtap_llm.training import Recipe, finetune
from jaxtap_testkit.llm_samples import fields_of, float64_logits, run_llm, varied

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "head_dim": 8}
RECIPE = Recipe(rank=2, alpha=6, rate=0.02, batch=2, accumulate=2, length=16, steps=3)
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
YARN |= {"truncate": False}
TEXTS = ["It was a dark", "and stormy night", "the rain fell", "in torrents", "except", "at"]
TEXTS += ["occasional intervals", "when it was checked", "by a gust", "of wind"]


def small(family="llama", **more):
    fields = fields_of(family) | SMALL | more
    config = parse_config(fields)
    return fields, config, varied(checkpoint.init(config))


def write_inputs(folder, family="llama", **more):
    fields, config, params = small(family, **more)
    checkpoint.write(folder / "float", fields, config, params)
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in TEXTS))
    return folder / "float", folder / "data.jsonl"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder with ``float``, ``data.jsonl``, and ``out``, fine-tuned beside nf4."""
    folder = tmp_path_factory.mktemp("tuned")
    finetune(*write_inputs(folder), folder / "out", recipe=RECIPE)
    return folder


def float_params(folder):
    """The float parameters of a folder's base, dequantized."""
    config, plan, params = folders.load(folder)
    return config, jax.tree.map(np.asarray, plan.dequantize(params))


def reference(config, base, texts, steps):
    """Train with plain floats, a document at a time, and Adam (arXiv:1412.6980) in NumPy.

    Returns:
        The adapters, and the loss of each step.
    """
    rows = pack(texts, RECIPE.length)
    _, plan, _ = folders.load_base(*base)
    now = jax.tree.map(np.float64, plan.init_adapters(jax.random.key(RECIPE.seed)))
    params = jax.tree.map(jnp.asarray, float_params(base[0])[1])

    def nats(trained, tokens):
        layers = dict(params["layers"])
        for key, pair in trained.items():
            name = key.split("'")[3]
            layers[name] = layers[name] + 3.0 * pair["a"] @ pair["b"]  # alpha / rank
        out = jax.nn.log_softmax(model.logits(config, params | {"layers": layers}, tokens[None]))
        return -jnp.take_along_axis(out[0, :-1], tokens[1:, None], axis=-1).sum()

    graded = jax.jit(jax.value_and_grad(nats))
    first, second = (jax.tree.map(np.zeros_like, now) for _ in range(2))
    curve = []
    for step in range(steps):
        chosen = training.order(len(rows), RECIPE.seed, step * 4, 4)
        total, count, grads = 0.0, 0, jax.tree.map(np.zeros_like, now)
        for row in chosen:
            for number in range(1, rows.documents[row].max() + 1):
                tokens = rows.tokens[row][rows.documents[row] == number]
                found, more = graded(jax.tree.map(np.float32, now), tokens)
                total, count = total + float(found), count + len(tokens) - 1
                grads = jax.tree.map(lambda x, y: x + np.float64(y), grads, more)
        grads = jax.tree.map(lambda g, n=count: g / n, grads)
        norm = math.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g, n=norm: g / max(n, 1.0), grads)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)
        # Rises from a half for one step, and falls by a cosine to 0 at the last.
        part = 0.5 if step == 0 else (1 + math.cos(math.pi * (step - 1) / (RECIPE.steps - 1))) / 2
        rate, n = RECIPE.rate * part, step + 1
        now = jax.tree.map(
            lambda p, m, v, rate=rate, n=n: (
                p - rate * (m / (1 - 0.9**n)) / (np.sqrt(v / (1 - 0.999**n)) + 1e-8)
            ),
            now, first, second,
        )  # fmt: skip
        curve.append(total / count)
    return now, curve


@pytest.mark.slow
def test_steps_are_those_of_adam_on_documents_one_by_one(tuned):
    found = adapters.read(tuned / "out")
    config = parse_config(small()[0])
    base = tuned / "out" / "base", "float32", RECIPE.lora
    texts = read_documents(tuned / "data.jsonl", ByteTokenizer())
    wanted, curve = reference(config, base, texts, RECIPE.steps)
    written = (tuned / "out" / "loss.csv").read_text().splitlines()
    assert written[0] == "step,loss,rate"
    np.testing.assert_allclose([float(row.split(",")[1]) for row in written[1:]], curve, rtol=1e-4)
    assert curve[-1] < curve[0]
    assert found.arrays.keys() == wanted.keys()
    for key, pair in wanted.items():
        for part, array in pair.items():
            # Adam divides small gradients by small moments: some elements are near none.
            far = np.abs(found.arrays[key][part] - array) > 0.1 * RECIPE.rate
            assert far.mean() < 0.02


def test_accumulated_batches_are_one_batch(tuned, tmp_path):
    found = []
    for batch, accumulate in ((4, 1), (1, 4)):
        recipe = Recipe(rank=2, length=16, steps=2, batch=batch, accumulate=accumulate)
        found.append(
            finetune(
                tuned / "out" / "base", tuned / "data.jsonl", tmp_path / f"{batch}", None, recipe
            )
        )
    np.testing.assert_allclose(*found, rtol=1e-5)


def arrays_of(folder):
    return load_file(folder / adapters.STATE)


def test_an_interrupted_run_goes_on(tuned, tmp_path, monkeypatch, capsys):
    out, real, calls = tmp_path / "out", training.order, []
    given = tuned / "float", tuned / "data.jsonl", out

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(training, "order", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finetune(*given, recipe=RECIPE)
    assert "stopped after step 2 of 3: run it again to go on" in capsys.readouterr().err
    assert adapters.read(out).step == 2
    monkeypatch.setattr(training, "order", real)
    for recipe, data, what in (
        (Recipe(rank=3, length=16), given[1], "adapters and training"),
        (RECIPE, tuned / "float" / "config.json", "data"),
    ):
        with pytest.raises(LlmError, match=rf"begun with the same .*, got other {what}. Remove"):
            finetune(given[0], data, out, recipe=recipe)
    finetune(*given, recipe=RECIPE)
    once, twice = arrays_of(tuned / "out"), arrays_of(out)
    assert once.keys() == twice.keys()
    for name, array in once.items():
        assert array.tobytes() == twice[name].tobytes(), name
    assert (out / "loss.csv").read_text() == (tuned / "out" / "loss.csv").read_text()
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []


def test_checkpoints_that_can_not_be_gone_on_with(tuned, tmp_path):
    out = tmp_path / "out"
    given = tuned / "out" / "base", tuned / "data.jsonl", out, None, RECIPE
    finetune(*given)
    arrays = arrays_of(out)
    name = next(name for name in arrays if name.endswith(".a"))
    arrays[name] = arrays[name][:, :16]
    adapters.write_state(out / adapters.STATE, arrays, RECIPE.steps)
    with pytest.raises(
        LlmError, match=r"must be a checkpoint of this model, got another's. Remove"
    ):
        finetune(*given)
    with pytest.raises(LlmError, match=r"has a checkpoint of another model"):
        folders.load(out)
    (out / adapters.STATE).write_bytes(b"x" * 40)
    with pytest.raises(LlmError, match=r"is corrupted: .* Remove it to train from the start"):
        finetune(*given)
    (out / adapters.FACTS).write_text("{}")
    with pytest.raises(LlmError, match=r"must be what finetune wrote"):
        folders.load(out)


def write_spoiled(folder):
    fields, config, params = small()
    params["norm"] = params["norm"] * np.float32(np.nan)
    checkpoint.write(folder, fields, config, params)
    return folder


def test_what_can_not_be_trained(tuned, tmp_path):
    """Said before anything is written."""
    folder, data, out = tuned / "float", tuned / "data.jsonl", tmp_path / "out"
    fields, config, params = small(max_position_embeddings=64)
    checkpoint.write(tmp_path / "short", fields, config, params)
    fields, config, params = small(vocab_size=300)
    checkpoint.write(tmp_path / "wide", fields, config, params)
    (tmp_path / "empty.txt").write_text("")
    for given, message in (
        ((tmp_path / "short", data), r"--length must be at most the 64 positions of the model"),
        ((tmp_path / "wide", data), r"must have a tokenizer\.json, for a model of 300 tokens"),
        ((folder, tmp_path / "empty.txt"), "must have text to learn from, got none"),
        ((folder, tmp_path / "none.txt"), "must be a file of text"),
        ((tmp_path, data), "must have a config.json"),
        ((tuned / "out", data), "must not be fine-tuned already. Merge it first"),
        ((tuned / "out" / "base", data, "int8"), "--preset must be left out, as .* is quantized"),
        ((folder, data, "int5"), "Rules must be one of float, int8"),
    ):
        first, second, *preset = given
        with pytest.raises(LlmError, match=message):
            finetune(first, second, out, *preset)
    assert not out.exists()
    with pytest.raises(LlmError, match=r"must be a folder, got a file"):
        finetune(folder, data, data)
    for change in ({"rank": 0}, {"rate": -1}, {"dropout": 1}, {"length": 1}, {"dtype": "int8"}):
        with pytest.raises(LlmError, match=rf"{next(iter(change))} must be"):
            Recipe(**change)


def with_peft(tensors, folder):
    """Add a folder of PEFT to float tensors, as PEFT's documentation says."""
    about = json.loads((folder / "adapter_config.json").read_text())
    added = load_file(folder / "adapter_model.safetensors")
    found, used = dict(tensors), 0
    for name in tensors:
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in about["target_modules"]:
            continue
        a, b = (added[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        assert a.shape[0] == b.shape[1] == about["r"]
        scale = about["lora_alpha"] / about["r"]
        found[name] = tensors[name] + scale * np.float64(b) @ np.float64(a)
        used += 2
    assert used == len(added) > 0
    return found


def logits_of(folder, tokens):
    config, plan, params = folders.load(folder)
    return np.asarray(
        jax.jit(plan.apply(functools.partial(model.logits, config)))(params, tokens[None])[0]
    )


TOKENS = np.random.default_rng(1).integers(0, 256, 9)


@pytest.mark.parametrize("family", [
    "llama",
    pytest.param("phi3", marks=pytest.mark.slow),
    pytest.param("gemma3_text", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", marks=pytest.mark.slow),
])  # fmt: skip
def test_an_adapter_for_peft_and_a_merged_folder_have_our_logits(tuned, tmp_path, family):
    folder, fields = tuned, small(family)[0]
    if family != "llama":
        folder = tmp_path
        finetune(*write_inputs(folder, family), folder / "out", recipe=RECIPE)
    run_llm("export", folder / "out", tmp_path / "peft", "--adapter")
    run_llm("export", folder / "out", tmp_path / "merged", "--merged")
    config, params = float_params(folder / "out" / "base")
    base = checkpoint.tensors_of(config, params)
    wanted = float64_logits(fields, with_peft(base, tmp_path / "peft"), TOKENS)
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=3e-4 * wanted.std())
    found = logits_of(folder / "out", TOKENS)
    # The base is nf4, whose kernel rounds activations to 15 bits.
    near(found, wanted, atol=2e-3 * wanted.std())
    assert np.linalg.norm(found - float64_logits(fields, base, TOKENS)) > 0.02 * np.linalg.norm(
        found
    )
    near(
        float64_logits(fields, load_file(tmp_path / "merged" / "model.safetensors"), TOKENS), wanted
    )
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == (family, "float32")
    assert "quantization_config" not in config


@pytest.mark.slow
def test_a_merged_folder_in_other_formats(tuned, tmp_path):
    exact = logits_of(tuned / "out", TOKENS)
    for form, most in (("bfloat16", 0.03), ("int8", 0.03), ("w8a8", 0.1), ("int4", 1)):
        out = tmp_path / form
        run_llm("export", tuned / "out", out, "--merged", "--format", form)
        error = np.linalg.norm(logits_of(out, TOKENS) - exact) / np.linalg.norm(exact)
        assert 1e-4 < error < most, form
        about = json.loads((out / "config.json").read_text()).get("quantization_config")
        assert (about is None) == (form == "bfloat16")
        if about is not None:
            assert "lm_head" in about["ignore"]
    run_llm("export", tuned / "out", tmp_path / "floats", "--merged")
    name = "model.layers.1.mlp.down_proj.weight"
    wanted = load_file(tmp_path / "floats" / "model.safetensors")[name]
    found = load_file(tmp_path / "int4" / "model.safetensors")
    values = found[f"{name}_packed"][..., None] >> np.arange(0, 32, 4) & 15
    scale = np.repeat(found[f"{name}_scale"].astype(np.float32), 32, axis=-1)
    error = np.abs((values.reshape(wanted.shape) - 8) * scale - wanted)
    assert (error <= 0.51 * scale).all()
    with pytest.raises(LlmError, match=r"must be one of float32, .*, got nf4. For another"):
        run_llm("export", tuned / "out", tmp_path / "nf4", "--merged", "--format", "nf4")


def in_llama_cpp(rows, heads):
    """Rows of queries or keys, as llama.cpp's converter of Llama orders them."""
    out, *more = rows.shape
    return rows.reshape(heads, 2, out // heads // 2, *more).swapaxes(1, 2).reshape(rows.shape)


def fields_in(path):
    reader = gguf.GGUFReader(path)
    about = {name: field.contents() for name, field in reader.fields.items()}
    return about, {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}


NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
NAMES |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}


def test_files_of_llama_cpp(tuned, tmp_path):
    out = tuned / "out"
    run_llm("export", out, tmp_path / "merged", "--merged")
    run_llm("export", out, tmp_path / "peft", "--adapter")
    run_llm("export", out, tmp_path / "model.gguf", "--merged", "--gguf", "--format", "f32")
    run_llm("export", out, tmp_path / "adapter.gguf", "--adapter", "--gguf")
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    about, found = fields_in(tmp_path / "model.gguf")
    assert about["general.architecture"] == "llama"
    assert about["llama.attention.head_count_kv"] == 2
    assert about["tokenizer.ggml.tokens"][ord("a")] == "<0x61>"
    np.testing.assert_array_equal(found["token_embd.weight"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(found["output.weight"], tensors["lm_head.weight"])
    added = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    about, factors = fields_in(tmp_path / "adapter.gguf")
    assert about["general.type"] == "adapter"
    assert about["adapter.type"] == "lora"
    assert about["adapter.lora.alpha"] == 6
    assert len(factors) == len(added)
    for i in range(2):
        for module, name in NAMES.items():
            part = "self_attn" if module[0] in "qkvo" else "mlp"
            at = f"model.layers.{i}.{part}.{module}"
            heads = {"q_proj": 4, "k_proj": 2}.get(module)
            turned = (lambda x, n=heads: in_llama_cpp(x, n)) if heads else (lambda x: x)
            ours = f"blk.{i}.{name}.weight"
            np.testing.assert_array_equal(found[ours], turned(tensors[f"{at}.weight"]))
            a, b = (added[f"base_model.model.{at}.lora_{part}.weight"] for part in "AB")
            np.testing.assert_array_equal(factors[f"{ours}.lora_a"], a)
            np.testing.assert_array_equal(factors[f"{ours}.lora_b"], turned(b))


def test_tensors_of_llama_cpp_are_quantized_as_there(tmp_path):
    array = np.random.default_rng(0).standard_normal((6, 64), np.float32)
    array[2, :32] = 0
    kinds = gguf.GGMLQuantizationType
    for form, kind, most in (("q4_0", kinds.Q4_0, 0), ("q8_0", kinds.Q8_0, 1e-2)):
        wanted = gguf.dequantize(gguf.quantize(array, kind), kind)
        found = np.asarray(stored("blk.0.ffn_up.weight", array, form).restore())
        np.testing.assert_allclose(found, wanted, rtol=0, atol=most * np.abs(array).max())
    with pytest.raises(LlmError, match=r"multiple of 32 columns for q4_0, got 40. Take"):
        stored("blk.0.ffn_up.weight", np.zeros((2, 40)), "q4_0")


def test_what_llama_cpp_does_not_have(tuned, tmp_path):
    out = tmp_path / "model.gguf"
    for family, change, message in (
        (
            "gpt_oss",
            {},
            "swiglu_limit must be 7, and no head tied, for GGUF, got 0.5",
        ),
        (
            "mistral",
            {"rope_scaling": YARN, "sliding_window": None},
            "truncate of yarn must be true for GGUF, got false",
        ),
        ("mistral", {}, "sliding_window must be of no layer for GGUF"),
        ("gemma2", {}, "query_pre_attn_scalar must be 32 for GGUF, got 16: llama.cpp computes"),
        ("gemma3_text", {}, "sliding_window must be of all but each 6th layer for GGUF"),
    ):
        fields = fields_of(family) | change
        config = parse_config(fields)
        checkpoint.write(tmp_path / "float", fields, config, checkpoint.init(config))
        with pytest.raises(LlmError, match=message):
            run_llm("export", tmp_path / "float", out, "--merged", "--gguf")
    for options, message in (
        (["--merged", "--gguf", "--format", "q3_k"], "--format must be one of f32, .*, got q3_k"),
        (["--adapter", "--format", "f16"], "--format is for --merged"),
        (["--gguf"], "--gguf and --format need --adapter or --merged"),
        (["--merged", "--prompt", "9"], "are of programs. Leave them out, or --merged"),
    ):
        with pytest.raises(LlmError, match=message):
            run_llm("export", tuned / "out", out, *options)
    assert not out.exists()
    with pytest.raises(JaxtapError, match=r"already exists"):
        run_llm("export", tuned / "out", tuned, "--adapter")
    for base in (tuned / "float", tuned / "float" / "config.json"):  # a folder, a file
        with pytest.raises(LlmError, match=r"must have adapters: give a folder that finetune wr"):
            run_llm("export", base, out, "--adapter")


def byte_level(path, pre, **more):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {one: i for i, one in enumerate([*alphabet, "th", "the"])}
    made = Tokenizer(models.BPE(words, [("t", "h"), ("th", "e")]))
    made.pre_tokenizer, made.decoder = pre, decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"eos_token_id": len(words)} | more))


def test_a_tokenizer_of_bytes_and_merges(tmp_path):
    from tokenizers import Regex, pre_tokenizers

    config = parse_config(fields_of("llama") | {"vocab_size": 260})
    level = functools.partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
    patterns = {name: pattern for pattern, name in token_kinds.SPLITS.items()}
    for pre, name in (
        (level(), "gpt-2"),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), level()]), "smollm"),
        *(
            (
                pre_tokenizers.Sequence(
                    [pre_tokenizers.Split(Regex(patterns[one]), "isolated"), level(use_regex=False)]
                ),
                one,
            )
            for one in ("llama-bpe", "qwen2")
        ),
    ):
        byte_level(tmp_path, pre)
        found = vocabulary.metadata(tmp_path, config)
        found = {key.removeprefix("tokenizer.ggml."): value for key, value in found.items()}
        assert (found["model"], found["pre"]) == ("gpt2", name)
        assert found["merges"] == ["t h", "th e"]
        assert found["tokens"][256:] == ["th", "the", "<|end|>", "[PAD259]"]
        assert found["token_type"][256:].tolist() == [1, 1, 3, 5]
        assert found["eos_token_id"] == 258
        assert not found["add_bos_token"]
    byte_level(tmp_path, pre_tokenizers.Whitespace())
    with pytest.raises(LlmError, match=r"must be that of Llama 3, .* got Whitespace of another"):
        vocabulary.metadata(tmp_path, config)


def test_a_tokenizer_of_pieces(tmp_path):
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b"]
    words += ["ab", "▁ab"]
    made = Tokenizer(
        models.BPE(
            {one: i for i, one in enumerate(words)}, [("a", "b"), ("▁", "ab")],
            byte_fallback=True, unk_token="<unk>", fuse_unk=True,
        )
    )  # fmt: skip
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 1]}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    config = parse_config(fields_of("llama") | {"vocab_size": len(words)})
    found = vocabulary.metadata(tmp_path, config)
    assert found.pop("tokenizer.chat_template") == "{{ messages }}"
    found = {key.removeprefix("tokenizer.ggml."): value for key, value in found.items()}
    assert found["model"] == "llama"
    assert found["token_type"][[0, 1, 2, 3, 258, 259]].tolist() == [2, 3, 3, 6, 6, 1]
    scores = dict(zip(found["tokens"], found["scores"], strict=True))
    assert scores["ab"] > scores["▁ab"] > scores["a"]
    assert found["add_space_prefix"]
    assert (found["add_bos_token"], found["add_eos_token"]) == (True, False)
    assert (found["bos_token_id"], found["eos_token_id"], found["eot_token_id"]) == (1, 2, 1)


def test_the_command(tuned, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--rank", 2, "--length", 16, "--steps", 2, "--accumulate", 1, "--dropout", 0.1]
    run_llm("finetune", tuned / "float", tuned / "data.jsonl", "--preset", "float", *options)
    text, told = capsys.readouterr()
    assert told.startswith(
        f"Fine-tuning {tuned / 'float'} on {tuned / 'data.jsonl'}: float-tuned\n"
    )
    assert text.startswith("2 steps; loss in nats a token:\n  to step     1  ")
    assert sorted(path.name for path in (tmp_path / "float-tuned").iterdir()) == [
        *("config.json", "finetune.json", "loss.csv", "loss.html", "state.safetensors")
    ]
    page = (tmp_path / "float-tuned" / "loss.html").read_text()
    assert re.search(r"Mean loss in nats a token, from \d\.\d{3} at the first step", page)
    assert page.count("<rect ") == 4  # wide and narrow
    run_llm("generate", "float-tuned", "--prompt", "It", "--count", 9)
    assert capsys.readouterr().out.startswith("It")


def test_what_is_exported_of_a_folder_without_adapters(tuned, tmp_path):
    """Any quantized folder can be given back as floats."""
    config, params = float_params(tuned / "out" / "base")
    wanted = checkpoint.tensors_of(config, params)
    merged.export(tuned / "out" / "base", tmp_path / "floats")
    found = load_file(tmp_path / "floats" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)
