"""Models whose layers differ: how they are stacked, read and given back, and what is refused."""

import functools
import json
import os
import re

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from interception_core import JaxtapError
from jaxtap_llm import checkpoint, floats, gguf_families, merged, model, quantized
from jaxtap_llm.config import LlmError
from jaxtap_llm.fields import parse_config, read_config
from jaxtap_llm.gguf import export as export_gguf
from jaxtap_llm.kinds import Kind, segments_of
from jaxtap_llm.training import Recipe, finetune
from jaxtap_testkit.llm_mixed_samples import REFERENCES
from jaxtap_testkit.llm_samples import FAMILIES, fields_of, run_llm, varied
from jaxtap_testkit.processes import run_python

MIXED = [family for family in FAMILIES if fields_of(family)["model_type"] in REFERENCES]


def drawn(family, **more):
    fields = fields_of(family) | more
    config = parse_config(fields)
    return fields, config, varied(checkpoint.init(config))


def test_patterns_of_layers_are_one_scan_each():
    a, b, c = (Kind(size, 1, 2) for size in (1, 2, 3))

    def named(kinds):
        return [[stack.layers for stack in one] for one in segments_of(tuple(kinds), len(kinds))]

    assert named([a] * 5) == [[(0, 1, 2, 3, 4)]]
    assert named([a, a, a, b] * 3) == [[(0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)]]
    # Two that repeat, and what is left over of the second.
    assert named([a, b] * 2 + [a, c] * 2 + [a]) == [[(0, 2), (1, 3)], [(4, 6), (5, 7)], [(8,)]]
    assert named([a, b, c]) == [[(0,)], [(1,)], [(2,)]]
    assert segments_of((), 3)[0][0].name == "layers"


@pytest.mark.parametrize("family", ["llama4_text", "qwen3_5_text"])
def test_documents_in_a_row_are_computed_as_alone(family):
    _, config, params = drawn(family)
    tokens = np.random.default_rng(0).integers(0, 256, (1, 20))
    documents = np.repeat([1, 2, 3], [7, 9, 4])[None]
    run = jax.jit(functools.partial(model.logits, config))
    found = run(params, tokens, documents)
    alone = [run(params, tokens[:, documents[0] == one]) for one in (1, 2, 3)]
    np.testing.assert_allclose(found, np.concatenate(alone, 1), atol=2e-3 * np.std(found))


def moved(path, prefix, outer):
    """Move a folder's tensors to where those of a model with an image encoder are."""
    tensors = load_file(path / "model.safetensors")
    # As transformers writes them: the head is the whole model's, or the decoder's.
    around = {"model.language_model.": "", "language_model.model.": "language_model."}[prefix]
    found = {
        name.replace("model.", prefix, 1): x for name, x in tensors.items() if "lm_head" not in name
    }
    found |= {f"{around}{name}": x for name, x in tensors.items() if "lm_head" in name}
    for name in ("model.visual.blocks.0.norm.weight", "vision_model.a.weight", "mtp.fc.weight"):
        found[name] = np.ones(3, np.float32)
    save_file(found, path / "model.safetensors")
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(outer | {"text_config": fields}))


@pytest.mark.parametrize(
    ("family", "prefix", "outer"),
    [
        ("qwen3_5_text", "model.language_model.", "qwen3_5"),
        ("llama4_text", "language_model.model.", "llama4"),
        ("gemma3_text", "language_model.model.", "gemma3"),
    ],
)
def test_the_decoder_beside_an_image_encoder_is_read(tmp_path, family, prefix, outer):
    fields, config, params = drawn(family)
    checkpoint.write(tmp_path / "in", fields, config, params)
    _, wanted = checkpoint.read(tmp_path / "in")
    moved(tmp_path / "in", prefix, {"model_type": outer, "eos_token_id": 7})
    found, read = checkpoint.read(tmp_path / "in")
    assert (found.prefix, found.kinds) == (prefix, config.kinds)
    jax.tree.map(np.testing.assert_array_equal, read, wanted)
    # Given back it is the decoder alone.
    merged.export(tmp_path / "in", tmp_path / "out")
    assert read_config(tmp_path / "out") == config
    again, back = checkpoint.read(tmp_path / "out")
    assert again.prefix == "model."
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), back, wanted)


@pytest.mark.slow
def test_adapters_beside_an_encoder_have_the_names_of_its_modules(tmp_path):
    """Those of ``AutoModelForCausalLM``, and none of the encoder, which has the same ends."""
    fields, config, params = drawn("gemma3_text", num_hidden_layers=1)
    checkpoint.write(tmp_path / "in", fields, config, params)
    moved(tmp_path / "in", "language_model.model.", {"model_type": "gemma3"})
    (tmp_path / "text.txt").write_text("It was a dark and stormy night. " * 2)
    recipe = Recipe(rank=2, length=16, accumulate=1, steps=1)
    finetune(tmp_path / "in", tmp_path / "text.txt", tmp_path / "out", "float", recipe)
    run_llm("export", tmp_path / "out", tmp_path / "peft", "--adapter")
    at = "model.language_model.layers.0."
    parts = [f"self_attn.{one}_proj" for one in "kqov"]
    parts += [f"mlp.{one}_proj" for one in ("down", "gate", "up")]
    about = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert about["target_modules"] == sorted(f"{at}{part}" for part in parts)
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert found.keys() == {
        f"base_model.model.{at}{part}.lora_{one}.weight" for part in parts for one in "AB"
    }


def test_all_experts_in_one_tensor_are_read(tmp_path):
    fields, config, params = drawn("qwen3_5_moe_text")
    checkpoint.write(tmp_path, fields, config, params)
    tensors = load_file(tmp_path / "model.safetensors")
    for i in range(config.layers):
        at = f"model.layers.{i}.mlp.experts."
        each = {
            one: np.stack([tensors.pop(f"{at}{e}.{one}_proj.weight") for e in range(6)])
            for one in ("gate", "up", "down")
        }
        tensors[f"{at}gate_up_proj"] = np.concatenate([each["gate"], each["up"]], axis=1)
        tensors[f"{at}down_proj"] = each["down"]
    save_file(tensors, tmp_path / "model.safetensors")
    found, read = checkpoint.read(tmp_path)
    assert found.layout == "turned"
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), read, params)
    merged.export(tmp_path, tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, array in back.items():
        np.testing.assert_array_equal(array, tensors[name])


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", MIXED)
def test_parameters_are_read_one_by_one(tmp_path, family):
    """Floats of a quantized folder, a parameter at a time, are those of its whole."""
    fields, config, params = drawn(family)
    checkpoint.write(tmp_path / "in", fields, config, params)
    quantized.quantize(tmp_path / "in", tmp_path / "out", "int4")
    _, _, stored = quantized.read(tmp_path / "out")
    opened = floats.opened(tmp_path / "out")
    for layer in (None, *range(config.layers)):
        for name in checkpoint.tensor_names(config, layer):
            whole = checkpoint.parameter(config, stored, name, layer)[1]
            whole = whole.restore() if hasattr(whole, "restore") else whole
            np.testing.assert_array_equal(opened.get(name, layer), np.asarray(whole))


MEASURE = """
import resource, sys
from jaxtap_llm import merged
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
merged.export(sys.argv[1], sys.argv[2])
before = peak()
merged.export(sys.argv[3], sys.argv[4])
print(peak() - before)
"""


@pytest.mark.slow
def test_merging_holds_no_float_model(tmp_path):
    """24 layers of 3.4 MB: the peak above that of a tiny model is a few of them."""
    for name, more in (("small", {}), ("large", {"hidden_size": 256, "intermediate_size": 768})):
        fields = fields_of("llama") | more | {"num_hidden_layers": 24 if more else 2}
        config = parse_config(fields)
        checkpoint.write(tmp_path / name, fields, config, checkpoint.init(config))
        quantized.quantize(tmp_path / name, tmp_path / f"{name}-q", "int8")
    (tmp_path / "measure.py").write_text(MEASURE)
    given = [tmp_path / one for one in ("small-q", "a", "large-q", "b")]
    run = run_python(tmp_path / "measure.py", *map(str, given))
    size = (tmp_path / "b" / "model.safetensors").stat().st_size
    assert size > 75e6
    assert int(run.stdout.splitlines()[-1]) < 0.5 * size


def test_values_heads_of_a_key_are_apart_in_files_of_llama_cpp(tmp_path):
    """llama.cpp repeats keys as [k0, k1, k0, k1], and folders have [k0, k0, k1, k1]."""
    fields, config, params = drawn("qwen3_5_text", linear_key_head_dim=16)
    checkpoint.write(tmp_path / "in", fields, config, params)
    export_gguf(tmp_path / "in", tmp_path / "out.gguf", "f32")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    found = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    at = "model.layers.1.linear_attn."
    heads = [0, 2, 1, 3]  # of four, two for each key
    z = tensors[f"{at}in_proj_z.weight"].reshape(4, 16, -1)[heads].reshape(64, -1)
    np.testing.assert_allclose(found["blk.1.attn_gate.weight"], z, atol=1e-6)
    out = tensors[f"{at}out_proj.weight"].reshape(-1, 4, 16)[:, heads].reshape(-1, 64)
    np.testing.assert_allclose(found["blk.1.ssm_out.weight"], out, atol=1e-6)
    conv = tensors[f"{at}conv1d.weight"][:, 0]
    rest = conv[64:].reshape(4, 16, -1)[heads].reshape(64, -1)
    np.testing.assert_allclose(found["blk.1.ssm_conv1d.weight"][64:], rest, atol=1e-6)
    np.testing.assert_allclose(
        found["blk.1.ssm_a"], -np.exp(tensors[f"{at}A_log"][heads]), rtol=1e-5
    )
    np.testing.assert_allclose(
        found["blk.1.attn_norm.weight"],
        1 + tensors["model.layers.1.input_layernorm.weight"],
        rtol=1e-5,
    )
    assert not list(gguf_families.problems(config))


def test_what_llama_cpp_has_fixed_is_said(tmp_path):
    for family, more, message in (
        ("llama4_text", {}, "attention_chunk_size must be of all but each 4th layer"),
        ("llama4_text", {"no_rope_layer_interval": 4}, "attention_chunk_size must be 8192"),
        ("qwen3_5_text", {}, "linear_key_head_dim and linear_value_head_dim must be equal"),
        ("smollm3", {}, "no_rope_layers must be each fourth layer"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers must follow a layer"),
        ("gpt_oss", {}, "swiglu_limit must be 7"),
    ):
        fields, config, params = drawn(family, **more)
        folder = tmp_path / f"{family}{len(more)}"
        checkpoint.write(folder, fields, config, params)
        with pytest.raises(LlmError, match=message):
            export_gguf(folder, tmp_path / "out.gguf")
        assert not (tmp_path / "out.gguf").exists()
    config = parse_config(fields_of("llama4_text") | {"moe_layers": []})
    assert "moe_layers must have a layer for GGUF, got none" in gguf_families.problems(config)


def test_fields_that_can_not_be():
    """What the families' config.json may say, and what is not computed, each by its name."""
    for family, change, message in (
        ("llama4_text", {"moe_layers": [9]}, "moe_layers must be of the 4 layers, got [9]"),
        ("llama4_text", {"attention_bias": True}, "attention_bias and mlp_bias must be false"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 4}, "chunked_attention for each"),
        ("llama4_text", {"num_local_experts": 0}, "num_local_experts must be a whole number"),
        ("gemma4_text", {"num_kv_shared_layers": 7}, "must leave a layer of each kind that has"),
        ("gemma4_text", {"num_kv_shared_layers": 6}, "must leave a layer of each kind that has"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "must be false for gemma4_text"),
        ("gemma4_text", {"vocab_size_per_layer_input": 99}, "must be 256 or more, as the"),
        ("gemma4_text", {"per_layer_config": {"2": {"rank": 1}}}, "head_dim and num_key_value"),
        ("gemma4_text", {"rope_parameters": {"rope_type": "default"}}, "must have full_attention"),
        ("gemma4_text", {"global_head_dim": 31}, "head_dim must be even"),
        ("gemma4_experts", {"top_k_experts": 7}, "top_k_experts must be at most num_experts"),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, "a multiple of linear_num_key_heads"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate must be true for qwen3_5"),
        ("qwen3_5_text", {"mlp_only_layers": [1]}, "mlp_only_layers must be [] for qwen3_5_text"),
        ("qwen3_5_text", {"layer_types": ["full"] * 6}, "full_attention or linear_attention"),
        (
            "qwen3_5_text",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 2}},
            "partial_rotary_factor must be above 0, and at most 1, got 2",
        ),
    ):
        with pytest.raises(LlmError, match=re.escape(message)):
            parse_config(fields_of(family) | change)
    with pytest.raises(LlmError, match=r"model_type must be one of llama, .*, got 'llava'"):
        parse_config({"model_type": "llava", "text_config": fields_of("llama")})


def test_rope_parameters_of_null_are_none():
    fields = {k: v for k, v in fields_of("gpt_oss").items() if not k.startswith("rope_")}
    (rope,) = parse_config(fields | {"rope_parameters": None}).ropes
    assert rope == parse_config(fields).ropes[0]
    assert rope.yarn is not None


WRONG = (None, -1, 0, 1, 7, 2.5, 1e400, "8", "", [], [1], {}, {"a": 1}, True, [None] * 7, 10**30)


def said(fields):
    """Return what is wrong with a config, or None; anything but an LlmError is raised."""
    try:
        config = parse_config(fields)
    except LlmError as error:
        return str(error)
    assert config.segments
    return None


def test_spoiled_configs_are_one_clear_error_each():
    """Whatever a field has instead: it is read, or it is an LlmError of one line."""
    found = []
    for family in MIXED:
        fields = fields_of(family)
        for name in fields:
            found.append(said({key: x for key, x in fields.items() if key != name}))
            found += [said(fields | {name: value}) for value in WRONG]
    errors = [one for one in found if one is not None]
    assert all("\n" not in one for one in errors)
    assert len(errors) > 300


@pytest.mark.parametrize("family", ["gemma4_text", "qwen3_5_moe_text"])
def test_spoiled_folders_leave_nothing(tmp_path, family):
    fields, config, params = drawn(family)
    checkpoint.write(tmp_path / "in", fields, config, params)
    whole = (tmp_path / "in" / "model.safetensors").read_bytes()
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    rng, names = np.random.default_rng(1), sorted(tensors)

    def check():
        for command in (
            lambda out: quantized.quantize(tmp_path / "in", out, "int4"),
            lambda out: merged.export(tmp_path / "in", out),
        ):
            with pytest.raises(JaxtapError) as raised:
                command(tmp_path / "out")
            assert "\n" not in str(raised.value)
            assert not (tmp_path / "out").exists()
            assert [one for one in os.listdir(tmp_path) if one != "in"] == []

    for end in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "in" / "model.safetensors").write_bytes(whole[:end])
        check()
    for _ in range(4):
        name = names[rng.integers(len(names))]
        less = {key: x for key, x in tensors.items() if key != name}
        for changed in (
            less,
            less | {name: np.zeros(3, np.float32)},
            tensors | {f"{name}.x": tensors[name]},
        ):
            save_file(changed, tmp_path / "in" / "model.safetensors")
            check()


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONGROPE |= {"attention_factor": 1.0}


def test_longrope_has_other_factors_beyond_the_trained_length():
    """Equal factors are plain positions, or stretched ones, whose programs are others."""
    lengths = {"original_max_position_embeddings": 12, "max_position_embeddings": 64}
    fields = fields_of("phi3") | {"sliding_window": None, "num_hidden_layers": 2} | lengths
    config = parse_config(fields | {"rope_scaling": LONGROPE})
    plain = parse_config(fields)
    stretched = parse_config(fields | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    params = varied(checkpoint.init(config))
    tokens = np.random.default_rng(0).integers(0, 256, (1, 13))
    run = jax.jit(model.logits, static_argnums=0)
    near = functools.partial(np.testing.assert_allclose, atol=1e-4)
    assert np.abs(run(plain, params, tokens) - run(stretched, params, tokens)).max() > 0.1
    near(run(config, params, tokens[:, :12]), run(plain, params, tokens[:, :12]))
    near(run(config, params, tokens), run(stretched, params, tokens))
    # A cache says how long a text may get, before it is.
    prefill = jax.jit(model.prefill, static_argnums=0)
    for positions, other in ((12, plain), (16, stretched)):
        found, wanted = (
            prefill(one, params, tokens[:, :12], model.make_cache(one, 1, positions), 9)[0]
            for one in (config, other)
        )
        near(found, wanted)
    # Each document of a row is as long as it is.
    documents = np.repeat([1, 2], [13, 5])[None]
    row = np.concatenate([tokens, tokens[:, :5]], axis=1)
    found = run(config, params, row, documents)
    near(found[:, :13], run(stretched, params, tokens))
    near(found[:, 13:], run(plain, params, tokens[:, :5]))


def test_what_longrope_says():
    fields = fields_of("phi3") | {"max_position_embeddings": 131072}
    given = {key: x for key, x in LONGROPE.items() if key != "attention_factor"}
    (rope,) = parse_config(fields | {"rope_scaling": given}).ropes
    # As the paper has it, for 32 times the trained length of 4096.
    np.testing.assert_allclose(rope.scale, np.sqrt(1 + np.log(32) / np.log(4096)))
    np.testing.assert_allclose(
        rope.frequencies(16, True), 1e4 ** (-np.arange(8) / 8) / 4, rtol=1e-6
    )
    (part,) = parse_config(
        fields
        | {"partial_rotary_factor": 0.75, "sliding_window": 262144}
        | {"rope_scaling": given | {"short_factor": [1] * 6, "long_factor": [2] * 6}}
    ).ropes
    assert len(part.frequencies(16)) == 6
    assert parse_config(fields | {"sliding_window": 262144}).windows == (0, 0, 0)
    for change, message in (
        ({"short_factor": [1.0] * 7}, "short_factor of longrope must be a list of 8 numbers"),
        ({"long_factor": [0.0] * 8}, "long_factor of longrope must be a list of 8 numbers above 0"),
        ({"factor": -1}, "factor of longrope must be a number above 0, got -1"),
        ({"short_mscale": 1.2}, "longrope must have no short_mscale: phi3 has attention_factor"),
        ({"original_max_position_embeddings": 1}, "must be a number above 1, got 1"),
        ({"attention_factor": "x"}, "attention_factor must be a number above 0, got 'x'"),
    ):
        with pytest.raises(LlmError, match=message):
            parse_config(fields | {"rope_scaling": given | change})
