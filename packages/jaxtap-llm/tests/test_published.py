"""jaxtap_llm on folders that were quantized by others: as their float models."""

import functools
import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from jaxtap_llm import checkpoint, folders, model, published
from jaxtap_llm.config import LlmError
from jaxtap_llm.fields import parse_config
from jaxtap_llm.generate import Generator
from jaxtap_testkit import huggingface_samples as samples
from jaxtap_testkit.llm_samples import fields_of, run_llm, varied

WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
METHODS = {
    "gptq": samples.gptq,
    "gptq, zero points": functools.partial(samples.gptq, symmetric=False),
    "awq": samples.awq,
    "fp8": functools.partial(samples.float8, block=(48, 64)),
    "nf4": samples.bitsandbytes,
    "int8": samples.int8_rows,
    "fp8, one scale": functools.partial(samples.float8, block=(1024, 1024)),
}


def folder_of(path, family, make, changed=lambda name, written: written, **more):
    """Write a folder whose projections are quantized. Returns its fields and float tensors."""
    fields = fields_of(family) | WIDE | more
    config = parse_config(fields)
    tensors = checkpoint.tensors_of(config, varied(checkpoint.init(config)))
    written, about = {}, None
    for i, (name, array) in enumerate(tensors.items()):
        if not name.endswith("_proj.weight"):
            written[name] = array
            continue
        one = changed(name, make(*array.shape, seed=i))
        if one is None:
            written[name] = array
            continue
        tensors[name] = one.numbers.astype(np.float32) / 8
        module = name.removesuffix(".weight")
        # Weights of the size that a model has.
        for end in (".scales", ".weight_scale_inv", ".weight.absmax", ".SCB"):
            if end in one.tensors:
                one.tensors[end] = one.tensors[end] / one.tensors[end].dtype.type(8)
        written |= {f"{module}{end}": x for end, x in one.tensors.items()}
        about = one.config
    samples.write_folder(path, written, fields | {"quantization_config": about}, parts=2)
    return fields, tensors


def float_params(config, tensors):
    """The parameters of a float model."""

    def get(name, layer):
        names = checkpoint.tensor_names(config, layer)[name]
        return jnp.asarray(checkpoint.join(config, name, [tensors[n] for n in names]), jnp.float32)

    params = {name: get(name, None) for name in checkpoint.tensor_names(config)}
    params["layers"] = {
        name: jnp.stack([get(name, i) for i in range(config.layers)])
        for name in checkpoint.tensor_names(config, 0)
    }
    return params


def check(folder, fields, tensors):
    """Compare with the float model: logits and the tokens that are generated."""
    config, plan, params = folders.load(folder)
    wanted = float_params(parse_config(fields), tensors)
    tokens = np.random.default_rng(2).integers(0, 256, (1, 9))
    run = plan.apply(functools.partial(model.logits, config))
    exact = np.asarray(model.logits(config, wanted, tokens), np.float64)
    away = np.linalg.norm(np.asarray(run(params, tokens)) - exact) / np.linalg.norm(exact)
    assert away < 2e-3, away
    streams = Generator(config, params, plan).stream, Generator(config, wanted).stream
    ours, theirs = (np.concatenate(list(stream(tokens, 8)), 1) for stream in streams)
    np.testing.assert_array_equal(ours, theirs)
    return plan, params


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_it_generates_what_the_float_model_does(tmp_path, family, method):
    fields, tensors = folder_of(tmp_path / "in", family, METHODS[method])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan, params = check(tmp_path / "in", fields, tensors)
    assert str(plan).count("args[0]['layers']") >= 4
    assert all(hasattr(params["layers"][name], "dtype") for name in params["layers"])


@pytest.mark.parametrize("method", ["gptq", "nf4"])
def test_activations_in_bfloat16(tmp_path, method):
    fields, tensors = folder_of(tmp_path / "in", "llama", METHODS[method])
    config, plan, params = folders.load(tmp_path / "in", "bfloat16")
    tokens = np.random.default_rng(2).integers(0, 256, (1, 9))
    run = plan.apply(functools.partial(model.logits, config))
    wanted = float_params(parse_config(fields), tensors)
    exact = np.asarray(model.logits(config, wanted, tokens), np.float64)
    away = np.linalg.norm(np.asarray(run(params, tokens)) - exact) / np.linalg.norm(exact)
    assert away < 0.05, away


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), [("qwen3_moe", "gptq"), ("qwen3_moe", "fp8")])
def test_experts(tmp_path, family, method):
    more = {"moe_intermediate_size": 64, "head_dim": 32}
    fields, tensors = folder_of(tmp_path / "in", family, METHODS[method], **more)
    check(tmp_path / "in", fields, tensors)


@pytest.mark.slow
def test_experts_in_mxfp4(tmp_path):
    """gpt-oss as it is published: experts are [experts, out, in], and all else is float."""
    fields = fields_of("gpt_oss") | WIDE | {"layer_types": None}
    config = parse_config(fields)
    tensors = checkpoint.tensors_of(config, varied(checkpoint.init(config)))
    written = {}
    for i, (name, array) in enumerate(tensors.items()):
        if array.ndim < 3:
            written[name] = array
            continue
        experts, k, n = array.shape
        one = samples.mxfp4(experts, n, k, seed=i)
        one.tensors["_scales"] -= 5
        tensors[name] = (one.numbers / 32).swapaxes(1, 2).astype(np.float32)
        written |= {f"{name}{end}": x for end, x in one.tensors.items()}
    about = {"quantization_config": {"quant_method": "mxfp4"}}
    samples.write_folder(tmp_path / "in", written, fields | about)
    _, params = check(tmp_path / "in", fields, tensors)
    assert {params["layers"][name].qtype for name in ("gate_up", "down")} == {"mxfp4"}


@pytest.mark.slow
def test_parameters_of_several_formats_are_float_and_named(tmp_path):
    """A method may leave modules or whole layers as they are."""

    def first_mlp_is_float(name, written):
        return None if "layers.0.mlp.down" in name or "layers.1.self_attn.q" in name else written

    fields, tensors = folder_of(tmp_path / "in", "llama", samples.gptq, first_mlp_is_float)
    with pytest.warns(xla.QuantizationWarning, match=r"down, qkv of .* several formats"):
        check(tmp_path / "in", fields, tensors)


@pytest.mark.slow
def test_columns_in_any_order(tmp_path):
    make = functools.partial(samples.gptq, desc_act=True)
    fields, tensors = folder_of(tmp_path / "in", "llama", make)
    with pytest.warns(xla.QuantizationWarning, match="14 weights of .* not side by side"):
        check(tmp_path / "in", fields, tensors)


def test_zeros_for_biases_are_nothing_and_other_tensors_are_named(tmp_path):
    folder_of(tmp_path / "in", "llama", samples.gptq)
    bias = "model.layers.1.mlp.down_proj.bias"
    for name, value, message in (
        (bias, 0, None),
        (bias, 1, rf"{bias} of .* must be zeros, or not there: llama has no such bias"),
        ("model.layers.9.mlp.down_proj.qweight", 0, "layers.9.*is unknown.*llama with 2 layers"),
    ):
        folder = tmp_path / "in"
        index = json.loads((folder / checkpoint.INDEX).read_text())
        index["weight_map"][name] = "extra.safetensors"
        more = tmp_path / "more"
        samples.write_folder(more, {name: np.full(4, value, np.float16)}, {})
        (more / "model.safetensors").replace(folder / "extra.safetensors")
        (folder / checkpoint.INDEX).write_text(json.dumps(index))
        (more / "config.json").unlink()
        more.rmdir()
        if message is None:
            folders.load(folder)
        else:
            with pytest.raises(LlmError, match=message):
                folders.load(folder)
        del index["weight_map"][name]
        (folder / checkpoint.INDEX).write_text(json.dumps(index))


def test_int8_activations_are_those_of_the_folder():
    one = {"input_activations": {"num_bits": 8, "type": "int"}}
    for groups, wanted in (
        ({}, None),
        ({"a": one}, "int8"),
        ({"a": one, "b": {"input_activations": None}}, None),
        ({"a": {"input_activations": {"num_bits": 8, "type": "float"}}}, None),
    ):
        assert published._act_qtype({"config_groups": groups}) == wanted


def test_it_is_not_quantized_again(tmp_path):
    folder_of(tmp_path / "in", "llama", samples.gptq)
    with pytest.raises(LlmError, match="Run generate on this folder as it is"):
        run_llm("quantize", str(tmp_path / "in"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
