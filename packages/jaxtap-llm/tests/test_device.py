"""The decoder of jaxtap_llm in LiteRT, beside float64."""

import functools
import tomllib
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from jaxtap_llm import checkpoint, model
from jaxtap_llm.config import LlmError
from jaxtap_llm.fields import parse_config
from jaxtap_llm.rules import DEVICE
from jaxtap_llm.tokenizer import byte_level
from jaxtap_testkit.llm_samples import fields_of, float64_logits, run_llm, varied

# All of these come with the extra `device`, which the package works without.
device = pytest.importorskip("jaxtap_llm.device", exc_type=LlmError)
litert_lm_builder = pytest.importorskip("litert_lm_builder")
text_format = pytest.importorskip("google.protobuf.text_format")
llm_metadata_pb2 = pytest.importorskip("litert_lm_builder.runtime.proto.llm_metadata_pb2")

from jaxtap_testkit.odml_samples import fake_quant_blocks  # noqa: E402

PROMPT, POSITIONS = 8, 16
# Of logits, in their standard deviations: float32 differs from float64, and rounds a few values of
# rows to the integer beside.
NEAR = {"float": 1e-3, "dynamic": 0.05, "weights": 1e-3, "int4": 0.05}
BITS = {"float": 32, "dynamic": 8, "weights": 8, "int4": 4}


def fields(family="llama"):
    return fields_of(family) | {"num_hidden_layers": 2}


def small(family="llama"):
    config = parse_config(fields(family))
    return config, varied(checkpoint.init(config))


@functools.cache
def exported(name, family="llama"):
    return device.export(*small(family), name, PROMPT, POSITIONS).model


def rounded(params, name):
    """Parameters with a scale for each column of a kernel, and for each row of the table.

    In int4 for each block of 32 of those.
    """
    if name == "float":
        return params
    most = 2 ** (BITS[name] - 1) - 1

    def round_one(path, x):
        if path[-1].key.endswith(("norm", "bias")):
            return x
        axis = -1 if path[-1].key == "embed" else -2
        if name == "int4":
            flat = np.moveaxis(np.asarray(x), axis, 0)
            found = fake_quant_blocks(flat.reshape(len(flat), -1), 32, most).reshape(flat.shape)
            return np.moveaxis(found, 0, axis)
        scale = np.abs(np.asarray(x, np.float64)).max(axis, keepdims=True) / most
        return np.round(x / scale) * scale

    return jax.tree_util.tree_map_with_path(round_one, params)


def int8_rows(x):
    """Rows in 256 steps from their least to their greatest value, or zero."""
    lower, upper = (
        np.minimum(x.min(-1, keepdims=True), 0),
        np.maximum(x.max(-1, keepdims=True), 0),
    )
    scale = (upper - lower) / 255
    zero = np.round(lower / scale)
    return (np.clip(np.round(x / scale) - zero, 0, 255) + zero) * scale


def expected(tokens, name, family="llama"):
    """Float64 logits behind each token, with the roundings of the file."""
    config, params = small(family)
    tensors = checkpoint.tensors_of(config, rounded(params, name))
    rows = int8_rows if name in ("dynamic", "int4") else lambda x: x
    return float64_logits(fields(family), tensors, np.asarray(tokens), rows=rows)


def opened(tmp_path, model):
    path = tmp_path / "model.tflite"
    path.write_bytes(model)
    return device.Device(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICE)
def test_logits_are_near_float64(name, tmp_path):
    made = opened(tmp_path, exported(name))
    tokens = np.random.default_rng(1).integers(0, 256, 12).tolist()
    wanted = expected(tokens, name)
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=NEAR[name] * wanted.std())
    logits, cache = made.prefill(tokens[:5])  # padded: what follows is not looked at
    near(logits, wanted[4])
    for position in range(5, 12):
        logits, cache = made.decode(tokens[position], cache, position)
        near(logits, wanted[position])


@pytest.mark.slow
def test_tied_tables_and_biases(tmp_path):
    """The table of Qwen 2 is looked up and multiplied with, and is in the file once."""
    made = opened(tmp_path, exported("dynamic", "qwen2"))
    tokens = np.random.default_rng(2).integers(0, 256, 9).tolist()
    wanted = expected(tokens, "dynamic", "qwen2")
    logits, cache = made.prefill(tokens[:8])
    np.testing.assert_allclose(logits, wanted[7], rtol=0, atol=0.1 * wanted.std())
    logits, _ = made.decode(tokens[8], cache, 8)
    np.testing.assert_allclose(logits, wanted[8], rtol=0, atol=0.1 * wanted.std())
    head = 256 * 64
    saved = len(exported("dynamic")) - len(exported("dynamic", "qwen2"))
    assert saved == pytest.approx(head, rel=0.5)


@pytest.mark.slow
def test_layers_with_other_heads():
    """Gemma 4 has two shapes of keys, and so four arrays in its cache."""
    config = parse_config(fields_of("gemma4_text"))
    params = varied(checkpoint.init(config))
    made = device.Device(device.export(config, params, "float", 4, 12).model)
    tokens = np.random.default_rng(4).integers(0, 256, 6).tolist()
    logits, cache = made.prefill(tokens[:4])
    assert list(cache) == [f"kv_cache_{part}_{i}" for part in "kv" for i in range(2)]
    for position in (4, 5):
        logits, cache = made.decode(tokens[position], cache, position)
    wanted = np.asarray(model.logits(config, params, np.asarray([tokens])))[0, -1]
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=NEAR["float"] * wanted.std())


@pytest.mark.slow
def test_the_likeliest_tokens(tmp_path):
    """Those of int8 are those of float64, where these have a clear choice."""
    made = opened(tmp_path, exported("dynamic"))
    prompt = np.random.default_rng(3).integers(0, 256, 6).tolist()
    found = made.generate(prompt, 11)
    assert len(found) == 11  # the last is behind position 15, the last of the cache
    logits = expected(prompt + found[:-1], "dynamic")[5:]
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    clear = first - second > 2 * NEAR["dynamic"] * logits.std()
    assert clear.sum() >= 4
    np.testing.assert_array_equal(np.array(found)[clear], logits.argmax(-1)[clear])


@pytest.mark.slow
def test_the_cache_goes_in_and_out(tmp_path):
    made = opened(tmp_path, exported("dynamic"))
    # Of 2 layers with 2 heads; a prompt that begins at the last position has room.
    shape = 1, 4, POSITIONS + PROMPT, 16
    _, cache = made.prefill([1, 2, 3])
    assert list(cache) == ["kv_cache_k_0", "kv_cache_v_0"]
    before = {name: array.copy() for name, array in cache.items()}
    _, after = made.decode(4, cache, 3)
    for name in cache:
        assert cache[name].shape == shape
        np.testing.assert_array_equal(cache[name], before[name])
        changed = (after[name] != before[name]).any(axis=(0, 1, 3))
        np.testing.assert_array_equal(changed, np.arange(POSITIONS + PROMPT) == 3)
    # Another cache, other logits: it is read, and not a state of the file.
    other, _ = made.decode(4, {name: array * 0 for name, array in cache.items()}, 3)
    again, _ = made.decode(4, cache, 3)
    first, _ = made.decode(4, cache, 3)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(other, again, atol=1e-2)


@pytest.mark.slow
def test_files_have_the_bits_of_their_weights():
    weights = {
        path[-1].key: x
        for path, x in jax.tree_util.tree_leaves_with_path(small()[1])
        if not path[-1].key.endswith("norm")
    }
    count = sum(x.size for x in weights.values())
    channels = sum(x.size // x.shape[-1 if n == "embed" else -2] for n, x in weights.items())
    # Both signatures have a float32 scale and an int64 zero point for each channel. They share the
    # float16 scale of each block.
    around = {"dynamic": 2 * 12 * channels, "weights": 2 * 12 * channels, "int4": count / 32 * 2}
    for name, scales in around.items():
        saved = len(exported("float")) - len(exported(name))
        assert saved == pytest.approx(count * (32 - BITS[name]) / 8 - scales, rel=0.03), name


@pytest.fixture
def folder(tmp_path):
    checkpoint.write(tmp_path / "float", fields(), *small())
    return tmp_path / "float"


@pytest.mark.slow
def test_the_command(folder, tmp_path, capsys):
    text, out = tmp_path / "text", tmp_path / "model.tflite"
    text.write_text("It was a dark night.")
    options = ["--prompt", "8", "--positions", "16", "--text", str(text), "--preset", "weights"]
    run_llm("device", str(folder), str(out), *options)
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:20].strip(): [float(x) for x in line[20:].split()] for line in lines[-4:]}
    assert list(rows) == ["perplexity", "equal tokens", "prefill, tokens/s", "decode, tokens/s"]
    tokens = list(text.read_bytes())[:POSITIONS]
    for found, name in zip(rows["perplexity"], ("float", "weights"), strict=True):
        logits = expected(tokens, name)[:-1]
        nats = np.log(np.exp(logits).sum(-1)) - logits[np.arange(15), tokens[1:]]
        assert found == pytest.approx(np.exp(nats.mean()), rel=2e-3)
    compared, equal = rows["equal tokens"]
    assert compared == POSITIONS - PROMPT + 1 >= equal
    made = device.Device(out)
    with pytest.raises(LlmError, match=r"must have 1 to 8 tokens, got 9\. Export with a larger"):
        made.prefill(range(9))
    with pytest.raises(LlmError, match=r"The position must be 0 to 15, got 16\. Export with"):
        made.decode(1, made.prefill([1])[1], 16)


@pytest.mark.slow
@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_bundle_has_the_file_the_tokenizer_and_what_ends_a_text(folder, tmp_path, has_tokenizer):
    """Read back by LiteRT-LM's own library."""
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    if has_tokenizer:
        named = byte_level()
        named.add_special_tokens(["<s>"])  # the token of "!", which begins a text, and ends it
        named.post_processor = processors.TemplateProcessing("<s> $A <s>", None, [("<s>", 33)])
        named.save(str(folder / "tokenizer.json"))
    out = tmp_path / "model.litertlm"
    run_llm("device", str(folder), str(out), "--prompt", "8", "--positions", "16")
    toml = Path(litert_lm_builder.unpack(str(out), str(tmp_path / "parts")))
    sections = tomllib.loads(toml.read_text())["section"]
    kinds = [one["section_type"] for one in sections]
    assert kinds == ["LlmMetadata", "HF_Tokenizer", "TFLiteModel"]
    assert sections[2]["model_type"] == "prefill_decode"
    metadata, tokenizer, tflite = (toml.parent / one["data_path"] for one in sections)
    found = text_format.Parse(metadata.read_text(), llm_metadata_pb2.LlmMetadata())
    assert found.max_num_tokens == 16
    assert [list(one.token_ids.ids) for one in found.stop_tokens] == [[7], [9]]
    assert list(found.start_token.token_ids.ids) == ([33] if has_tokenizer else [])
    assert found.jinja_prompt_template == "{{ messages }}"
    text = "Schön, 12 €\n"
    read = Tokenizer.from_str(zlib.decompress(tokenizer.read_bytes()[8:]).decode())
    ids = read.encode(text, add_special_tokens=False).ids
    assert ids == list(text.encode())
    assert read.decode(ids) == text
    device_run = device.Device(tflite)
    assert device_run.positions == 16
    assert device_run.generate([1, 2, 3], 4) == device.Device(exported("dynamic")).generate(
        [1, 2, 3], 4
    )


def test_what_can_not_be_exported(folder, tmp_path, capsys):
    """Said before anything is converted, and nothing is written."""
    out = tmp_path / "model.tflite"
    (tmp_path / "one").write_text("I")
    for options, message in (
        (["--prompt", "9", "--positions", "8"], "The prompt must have 1 to 8 tokens, got 9"),
        (["--text", str(tmp_path / "one")], "must have two tokens or more, got 1"),
        (["--text", str(tmp_path / "none")], "must be a file of text"),
    ):
        with pytest.raises(LlmError, match=message):
            run_llm("device", str(folder), str(out), *options)
    with pytest.raises(SystemExit, match="2"):
        run_llm("device", str(folder), str(out), "--prompt", "0")
    assert "--prompt: must be a whole number, 1 or more, got 0" in capsys.readouterr().err
    with pytest.raises(LlmError, match="must be in a folder that is there"):
        run_llm("device", str(folder), str(tmp_path / "none" / "model.tflite"))
    with pytest.raises(LlmError, match=r"must say which tokens end a text.*Add eos_token_id"):
        run_llm("device", str(folder), str(tmp_path / "model.litertlm"))
    with pytest.raises(LlmError, match="The model must have attention in all layers"):
        device.export(parse_config(fields_of("qwen3_5_text")), None, "dynamic", PROMPT, POSITIONS)
    with pytest.raises(LlmError, match="The model must have no experts"):
        device.export(*small("qwen3_moe"), "dynamic", PROMPT, POSITIONS)
    assert not out.exists()
